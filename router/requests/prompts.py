"""Turns a client's prompt into token ids and page digests, in the tokenizer threads."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any

from router.requests.request import ClientRequest, Conversation
from router.text.chat_template import ChatTurn
from router.text.request_reader import check_message_count
from router.text.token_scores import TokenScore, format_prompt_logprobs
from router.text.tokenizer import Tokenizer
from router.text.tokenizing import TokenizerPool
from router.workers.worker_pool import ServedModel
from tandem.protocol.errors import ContextLengthExceeded, ContextLengths, InvalidArgument, shown
from tandem.protocol.messages import PromptLogprobs
from tandem.protocol.page_digests import page_digests, root_digest

_ROLES = ("system", "user", "assistant", "tool")
_PAGES_INLINE = 64
"""Maximum number of pages hashed on the event loop (1 µs per page); longer prompts are hashed in a tokenizer thread."""


class PromptEncoder:
    """Checks prompts, tokenizes them and computes their page digests.

    The `RequestValidator` owns it. Its coroutines run on the event loop and pass the work to the tokenizer threads.
    """

    def __init__(self, tokenizer: Tokenizer, pool: TokenizerPool, max_messages: int) -> None:
        """`max_messages` is the maximum number of messages in a conversation."""
        self._tokenizer = tokenizer
        self._pool = pool
        self._max_messages = max_messages

    def check(self, request: ClientRequest) -> None:
        """Raise InvalidArgument for errors that are cheap to find; rendering checks the messages later."""
        prompt = request.prompt
        if isinstance(prompt, Conversation):
            if not prompt.turns:
                raise InvalidArgument("messages", "is empty; send at least one message")
            check_message_count(len(prompt.turns), self._max_messages)
            return
        if not prompt:
            raise InvalidArgument("prompt", "is empty; send at least one token")
        if isinstance(prompt, str):
            check_text("prompt", prompt)

    async def token_ids(self, request: ClientRequest, served: ServedModel, last: int | None) -> tuple[int, ...]:
        """Return the prompt's token ids: all if `last` is None, else the last `last` of them.

        Raises InvalidArgument if there are no tokens or too many, and ResourceExhausted if too many prompts wait.
        """
        prompt = request.prompt
        if isinstance(prompt, tuple):
            if last is not None:
                prompt = prompt[max(0, len(prompt) - last) :]
            if len(prompt) >= served.facts.max_context:
                context = served.facts.max_context
                raise too_long("prompt", field="prompt", prompt=len(prompt), answer=1, limit=context, context=context)
            check_token_ids("prompt", prompt, served.facts.vocab_size)
            return prompt
        ids = await self._pool.run(request.tenant, _prompt_chars(prompt), partial(self._encode, request, served, last))
        if not ids:
            raise InvalidArgument(field_of(request), "gives no tokens; send at least one")
        return tuple(ids)

    async def hinted_tokens(self, request: ClientRequest, ids: Sequence[int]) -> int | None:
        """Return the number of the prompt's tokens in its `Conversation.hinted_turns`; None = all."""
        prompt = request.prompt
        if not isinstance(prompt, Conversation) or prompt.hinted_turns is None:
            return None
        return await self._pool.run(request.tenant, _prompt_chars(prompt), partial(self._count_hinted, request, ids))

    def _count_hinted(self, request: ClientRequest, ids: Sequence[int]) -> int | None:
        """Return the number of tokens of the text that the prompt and its hinted turns alone have in common.

        None if the template does not render the hinted turns alone, or if the prompt was truncated.
        """
        prompt = request.prompt
        assert isinstance(prompt, Conversation)
        turns, rest = prompt.turns[: prompt.hinted_turns], (prompt.variables, prompt.tools.shown, prompt.end)
        try:
            whole, hinted = (self._tokenizer.render_chat(some, *rest) for some in (prompt.turns, turns))
        except InvalidArgument:
            return None
        common = bisect_left(range(len(hinted)), True, key=lambda end: not whole.startswith(hinted[: end + 1]))
        if request.options.truncate_prompt_tokens is not None:
            return None
        # The shorter part is encoded; at the cut, the count may be off by a token or two.
        if 2 * common <= len(whole):
            return min(len(ids), len(self._tokenizer.encode_rendered(whole[:common])))
        return max(0, len(ids) - len(self._tokenizer.encode_rendered(whole[common:])))

    def _encode(self, request: ClientRequest, served: ServedModel, last: int | None) -> list[int]:
        """Return the prompt's token ids; runs in a tokenizer thread.

        Raises InvalidArgument for invalid messages or tools, and ContextLengthExceeded for a text that cannot fit the
        context.
        """
        prompt, special = request.prompt, request.options.add_special_tokens
        assert not isinstance(prompt, tuple)
        if isinstance(prompt, Conversation):
            for number, turn in enumerate(prompt.turns):
                _check_turn(f"messages[{number}]", turn)
            check_json("tools", prompt.tools.tools)
            text = self._tokenizer.render_chat(prompt.turns, prompt.variables, prompt.tools.shown, prompt.end)
        else:
            text = prompt
        if last is None or last >= served.facts.max_context:
            self._check_text_length(field_of(request), text, served)
        if isinstance(prompt, Conversation):
            return self._tokenizer.encode_rendered(text, add_special_tokens=bool(special), last=last)
        return self._tokenizer.encode(text, add_special_tokens=special is not False, last=last)

    def _check_text_length(self, field: str, text: str, served: ServedModel) -> None:
        """Reject a text that cannot fit the context, without encoding it, which would take one second per megabyte."""
        context = served.facts.max_context
        least = self._tokenizer.fewest_tokens(text, context)
        if least >= context:
            raise too_long(
                field, field=field, prompt=least, answer=1, limit=context, context=context, least="at least "
            )

    async def tokenized(
        self, request: ClientRequest, served: ServedModel, last: int | None, *, token_texts: bool
    ) -> tuple[list[int], list[str] | None]:
        """Return the token ids of a text or a conversation for /tokenize, and each token's text if `token_texts`.

        `last` is the same as in `token_ids`. Raises InvalidArgument for a prompt that cannot fit the context, and
        ResourceExhausted if too many prompts wait.
        """
        prompt = request.prompt
        assert not isinstance(prompt, tuple)

        def encode() -> tuple[list[int], list[str] | None]:
            ids, context = self._encode(request, served, last), served.facts.max_context
            if len(ids) > context:
                field = field_of(request)
                raise too_long(field, field=field, prompt=len(ids), answer=0, limit=context, context=context)
            return ids, self._tokenizer.spellings(ids) if token_texts else None

        return await self._pool.run(request.tenant, _prompt_chars(prompt), encode)

    async def text(self, tenant: str, ids: tuple[int, ...], served: ServedModel) -> str:
        """Return the text of token ids, including special tokens.

        Raises InvalidArgument if there are more ids than the context has tokens, or one is not in the vocabulary.
        """
        if len(ids) > served.facts.max_context:
            raise InvalidArgument("tokens", f"has {len(ids)} ids, the limit is {served.facts.max_context}, the context")
        check_token_ids("tokens", ids, served.facts.vocab_size)
        return await self._pool.run(tenant, len(ids), partial(self._tokenizer.decode_all, ids))

    async def spelled(self, tenant: str, ids: tuple[int, ...], logprobs: PromptLogprobs) -> list[TokenScore]:
        """Return the scores of a prompt's tokens: log probabilities and texts, as in `format_prompt_logprobs`."""
        values = len(ids) * (1 + logprobs.top_count)
        return await self._pool.run(
            tenant, values, partial(format_prompt_logprobs, ids, logprobs, self._tokenizer.token_bytes)
        )

    async def page_digests(self, tenant: str, ids: tuple[int, ...], salt: str, page_tokens: int) -> tuple[bytes, ...]:
        """Return the digests of the prompt's full pages, which are the keys of the prefix caches.

        Returns () if the prompt has no full page, or if `page_tokens` is 0 because the workers' page sizes differ.
        """
        if not 0 < page_tokens <= len(ids):
            return ()
        if len(ids) <= _PAGES_INLINE * page_tokens:
            return tuple(page_digests(ids, page_tokens, root_digest(salt)))
        work = partial(page_digests, ids, page_tokens, root_digest(salt))
        return tuple(await self._pool.run(tenant, len(ids), work))


def field_of(request: ClientRequest) -> str:
    """Return the name of the request field that holds the prompt."""
    return "messages" if isinstance(request.prompt, Conversation) else "prompt"


def too_long(
    wrong: str, *, field: str, prompt: int, answer: int, limit: int, context: int, least: str = ""
) -> ContextLengthExceeded:
    """Return the error for a request that exceeds the context; its text has the words that OpenAI clients look for.

    `wrong` is the field to change, `field` the field of the prompt. `prompt`, `answer`, `context` and `limit` (for
    prompt and answer together) are in tokens; `least` is "at least " if the prompt may be longer than `prompt`.
    """
    held = "" if limit == context else f" The workers' KV cache holds no more of the model's context of {context}."
    return ContextLengthExceeded(
        wrong,
        f"This model's maximum context length is {limit} tokens. However, you requested {least}{prompt + answer} tokens"
        f" ({least}{prompt} in the {field}, {answer} in the completion). Please reduce the length of the {field} or"
        f" completion.{held}",
        ContextLengths(prompt, answer, limit),
    )


def _check_turn(field: str, turn: ChatTurn) -> None:
    if turn.role not in _ROLES:
        raise InvalidArgument(f"{field}.role", f"is {shown(turn.role)}, it must be one of {_ROLES}")
    check_text(f"{field}.content", turn.content)
    for name, value in turn.extras.items():
        check_json(f"{field}.{name}", value)


def check_json(field: str, value: Any) -> None:
    """Raise InvalidArgument if `check_text` rejects a string in the JSON value, or the value is nested too deeply."""
    if value:
        try:
            # JSON escapes NUL as \u0000. With escaped backslashes removed first, any \u0000 left is such an escape and
            # not the six characters of a string.
            text = json.dumps(value, ensure_ascii=False).replace("\\\\", "")
            check_text(field, text.replace("\\u0000", "\0"))
        except RecursionError:
            raise InvalidArgument(field, "is nested too deeply") from None


def check_text(field: str, text: str) -> None:
    """Raise InvalidArgument if `text` has a NUL character or is not valid Unicode."""
    if "\0" in text:
        raise InvalidArgument(field, "contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, "is not valid Unicode: it contains a lone surrogate; remove it") from error


def check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidArgument if one of `ids` is not in the vocabulary."""
    wrong = next((i for i in (min(ids), max(ids)) if not 0 <= i < vocab_size), None) if ids else None
    if wrong is not None:
        message = f"contains token id {str(wrong)[:40]}, ids of this model are 0 to {vocab_size - 1}"
        raise InvalidArgument(field, message)


def _prompt_chars(prompt: str | Conversation) -> int:
    return len(prompt) if isinstance(prompt, str) else sum(turn.chars for turn in prompt.turns) + prompt.tools.chars
