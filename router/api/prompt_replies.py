"""The prompts in a reply: the text that `echo` repeats, and `prompt_logprobs` in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from router.api.logprobs import completion_logprobs, entry_text, finite
from router.requests.answer import AnswerChunk, AnswerEnd
from router.requests.choices import Choices
from router.requests.request import Admitted, ClientRequest, Options
from router.requests.validation import RequestValidator
from router.text.token_scores import ScoredToken, TokenScore
from tandem.protocol.messages import FinishReason


@dataclass(frozen=True, slots=True)
class PromptForm:
    """The parts of the prompts that a reply shows, as the client requested. An immutable value of the parsed call."""

    echo: bool = False
    """True if the text of each choice begins with its prompt."""
    echo_top: int | None = None
    """Number of alternatives per token of the echoed prompt; None if the echo has no log probabilities."""
    listed: int | None = None
    """Number of alternatives per token in vLLM's `prompt_logprobs`; None if the reply does not have this field."""
    only: bool = False
    """True if the reply has only the prompt (`max_tokens` 0): one token is sampled, but left out of the reply."""

    @classmethod
    def of(cls, options: Options, *, echo: bool) -> PromptForm:
        """Return the form for a request with the client's `options` and `echo`."""
        alone = options.max_tokens == 0 and options.max_completion_tokens is None
        return cls(echo, options.logprobs if echo else None, options.prompt_logprobs, only=echo and alone)

    def options(self, given: Options) -> Options:
        """Return `given`, the client's options, with `prompt_logprobs` set to `top`, which the reply needs.

        If `only` is set, `max_tokens` is set to 1, the minimum.
        """
        return replace(given, prompt_logprobs=self.top, max_tokens=1 if self.only else given.max_tokens)

    def shown(self, event: AnswerChunk | AnswerEnd) -> AnswerChunk | AnswerEnd:
        """Return an answer's event as the client sees it: without the sampled token if `only` is set."""
        if not self.only:
            return event
        if isinstance(event, AnswerChunk):
            return AnswerChunk("", [], [])
        reason = FinishReason.ABORT if event.finish_reason is FinishReason.ABORT else FinishReason.LENGTH
        return replace(event, completion_tokens=0, finish_reason=reason)

    @property
    def needed(self) -> bool:
        """True if the reply shows its prompts, as text or as scores."""
        return self.echo or self.listed is not None

    @property
    def top(self) -> int | None:
        """Number of alternatives per prompt token that the workers must report: the larger of `echo_top` and `listed`.

        None if the reply has no log probabilities of the prompt.
        """
        return max((top for top in (self.echo_top, self.listed) if top is not None), default=None)


NO_PROMPTS = PromptForm()
"""The `PromptForm` of replies that do not show their prompts."""


@dataclass(frozen=True, slots=True)
class PromptReply:
    """The prompt of one choice, in the parts that the reply shows."""

    form: PromptForm
    text: str
    scores: Sequence[TokenScore] = ()
    """The scores of all prompt tokens (the first has no log probability); empty if the prompt is not scored."""

    def listed(self) -> dict[str, Any]:
        """Return vLLM's field `prompt_logprobs` if the reply shows it, else {}.

        The rank of a token is null if the token is not among the most likely ones.
        """
        top = self.form.listed
        if top is None:
            return {}
        listed = [_by_id(score.chosen, score.top[:top]) for score in self.scores[1:]]
        return {"prompt_logprobs": [None, *listed] if self.scores else None}

    def echo(self, choice: Mapping[str, Any], answer: Sequence[TokenScore]) -> dict[str, Any]:
        """Return a choice of a text completion, with the prompt before the answer if the reply echoes it.

        `answer` has the scores of the answer's tokens.
        """
        if not self.form.echo:
            return {**choice}
        top = self.form.echo_top
        echoed = {**choice, "text": self.text + choice["text"]}
        if top is not None and self.scores:
            shown = [replace(score, top=score.top[:top]) for score in self.scores]
            moved = [replace(score, offset=score.offset + len(self.text)) for score in answer]
            logprobs = completion_logprobs([*shown, *moved])
            logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
            echoed["logprobs"] = logprobs
        return echoed


class PromptReplies:
    """Makes the `PromptReply` of each prompt of a call, once the first event of its answers has arrived.

    The response owns it; all calls are on the event loop.
    """

    def __init__(
        self,
        form: PromptForm,
        validator: RequestValidator,
        requests: Sequence[ClientRequest],
        admitted: Sequence[Admitted],
        choices: Choices,
    ) -> None:
        self._form = form
        self._validator = validator
        self._requests = requests
        self._admitted = admitted
        self._choices = choices
        self._made: dict[int, PromptReply] = {}

    async def of(self, index: int) -> PromptReply | None:
        """Return the prompt of choice number `index` as the reply shows it; None if the reply shows no prompts."""
        if not self._form.needed:
            return None
        number = index // self._admitted[0].n
        if number not in self._made:
            self._made[number] = await self._make(number)
        return self._made[number]

    async def _make(self, number: int) -> PromptReply:
        admitted, prompt = self._admitted[number], self._requests[number].prompt
        ids, tenant = admitted.prompt_token_ids, admitted.tenant
        text = ""
        if self._form.echo:
            whole = isinstance(prompt, str) and self._requests[number].options.truncate_prompt_tokens is None
            text = str(prompt) if whole else await self._validator.detokenize(tenant, "", ids)
        answer = self._choices.answers[number * admitted.n]
        logprobs = None if self._form.top is None else await answer.scores_of_prompt()
        scores = () if logprobs is None else await self._validator.spelled(tenant, ids, logprobs)
        return PromptReply(self._form, text, scores)


def _by_id(chosen: ScoredToken, top: Sequence[ScoredToken]) -> dict[str, Any]:
    ranks = {token.token_id: rank for rank, token in enumerate(top, 1)}
    return {
        str(token.token_id): {
            "logprob": finite(token.logprob),
            "rank": ranks.get(token.token_id),
            "decoded_token": entry_text(token.utf8),
        }
        for token in (chosen, *top)
    }
