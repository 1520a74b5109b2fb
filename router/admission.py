"""The one validator of both doors: from what a client asked to what workers can be told.

Every refusal names the field and its limit. Checks that cost nothing come before the prompt is tokenized.
"""

import asyncio
import random
import re
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.config import RouterConfig
from router.model_folder import GenerationDefaults
from router.request import Admitted, Ask, Conversation, Options
from router.slo import classes_by_name
from router.tenants import tenant_salt
from router.tokenizer import Tokenizer
from router.worker_pool import ServedModel
from wire.errors import InvalidArgument, TandemError, Unavailable
from wire.messages import (
    FREQUENCY_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SamplingParams,
)
from wire.page_digests import page_digests, root_digest
from wire.request_trace import TraceContext
from wire.timeline import Edge, EdgeStamp

_T = TypeVar("_T")
_ROLES = ("system", "user", "assistant")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_INT32_MAX = 2**31 - 1
_SALT_MAX = 256
_PAGES_INLINE = 64
"""Pages that are named on the event loop, a microsecond each; more go to the tokenizer's threads."""
_TEMPERATURE_MAX = 100.0
_GREEDY_BELOW = 1e-5
"""Temperatures so small that float32 overflows; the most likely token has all the weight there anyway."""


def check_size(size: int, limit: int) -> None:
    """`InvalidArgument` if a request of `size` bytes is over `limit`."""
    if size > limit:
        raise InvalidArgument("request", f"is {size} bytes long, the limit is {limit}; send a shorter prompt")


class Admission:
    """Checks requests against the model's and the router's limits. Close it to end its threads."""

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        model: Callable[[], ServedModel | None],
        refused: Callable[[str, TandemError], None],
    ) -> None:
        """`model` tells what the workers serve now, None if that is not known yet; `refused` hears of each refusal,
        with the class that was asked for.
        """
        self._config = config
        self._classes = classes_by_name(config.slo_classes)
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._model = model
        self._refused = refused
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="router-tokenizer")

    async def admit(self, ask: Ask) -> Admitted:
        """The request with token ids and complete sampling values, or the `TandemError` that says what is wrong."""
        try:
            return await self._admit(ask)
        except TandemError as error:
            self._refused(ask.options.slo_class or self._config.default_slo_class, error)
            raise

    async def _admit(self, ask: Ask) -> Admitted:
        self._check_model(ask.model)
        served = self._model()
        if served is None:
            raise self._not_ready()
        request_id = _checked_id(ask.request_id)
        _check_prompt(ask)
        self._check_options(ask.options, served)
        ids = await self._token_ids(ask, served)
        max_tokens = self._checked_length(_field(ask), len(ids), ask.options, served)
        salt = tenant_salt(ask.tenant, ask.options.cache_salt)
        digests = await self._page_digests(ids, salt, served.page_tokens)
        return Admitted(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=self._sampling(ask.options, max_tokens),
            stop=ask.options.stop,
            priority=ask.options.priority,
            edges=(ask.received, EdgeStamp.now(Edge.TOKENIZED)),
            cache_salt=salt,
            tenant=ask.tenant,
            slo=self._classes[ask.options.slo_class or self._config.default_slo_class],
            digests=digests,
            n=_or(ask.options.n, 1),
            context=TraceContext.of(ask.traceparent),
            operation=ask.operation,
        )

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ---- the prompt ----

    async def _token_ids(self, ask: Ask, served: ServedModel) -> tuple[int, ...]:
        prompt = ask.prompt
        if isinstance(prompt, tuple):
            _check_token_ids("prompt", prompt, served.facts.vocab_size)
            return prompt
        loop = asyncio.get_running_loop()
        if isinstance(prompt, Conversation):
            ids = await loop.run_in_executor(self._threads, self._tokenizer.encode_chat, prompt.turns)
        else:
            ids = await loop.run_in_executor(self._threads, self._tokenizer.encode, prompt)
        if not ids:
            raise InvalidArgument(_field(ask), "gives no tokens; send at least one")
        return tuple(ids)

    async def _page_digests(self, ids: tuple[int, ...], salt: str, page_tokens: int) -> tuple[bytes, ...]:
        """Names of the full pages of the prompt, by which workers tell what they hold; () where pages differ."""
        if not 0 < page_tokens <= len(ids):
            return ()
        if len(ids) <= _PAGES_INLINE * page_tokens:
            return tuple(page_digests(ids, page_tokens, root_digest(salt)))
        loop = asyncio.get_running_loop()
        return tuple(await loop.run_in_executor(self._threads, page_digests, ids, page_tokens, root_digest(salt)))

    def _checked_length(self, field: str, prompt: int, options: Options, served: ServedModel) -> int:
        """The answer's limit in tokens; refuses what no context or no page pool could hold."""
        context = served.facts.max_context
        limited_by, max_tokens = options.answer_limit
        # The last token's KV is never stored, and if it is the first, none is decoded.
        room = context if max_tokens == 1 else min(context, served.decode_tokens_max + 1)
        if prompt >= context:
            raise InvalidArgument(field, f"is {prompt} tokens long, the limit is {context - 1} (context {context})")
        limit = min(room - 1, served.prefill_tokens_max)
        if prompt > limit:
            raise InvalidArgument(field, f"is {prompt} tokens long, the limit is {limit} (KV cache of the workers)")
        if max_tokens is None:
            return min(self._config.default_max_tokens, room - prompt)
        if prompt + max_tokens > room:
            what = f"context {context}" if room == context else f"KV cache of a decode worker, {room - 1} tokens"
            message = f"is {max_tokens}, the limit behind a prompt of {prompt} tokens is {room - prompt} ({what})"
            raise InvalidArgument(limited_by, message)
        return max_tokens

    # ---- the options ----

    def _check_model(self, name: str) -> None:
        if name and name != self._config.model_name:
            raise InvalidArgument(
                "model", f"{name!r} is not served here; this router serves {self._config.model_name!r}"
            )

    def _check_options(self, options: Options, served: ServedModel) -> None:
        _check_range("max_tokens", options.max_tokens, 1, _INT32_MAX)
        _check_range("max_completion_tokens", options.max_completion_tokens, 1, _INT32_MAX)
        _check_range("temperature", options.temperature, 0.0, _TEMPERATURE_MAX)
        _check_range("top_k", options.top_k, 0, _INT32_MAX)
        _check_range("min_p", options.min_p, 0.0, 1.0)
        _check_range("frequency_penalty", options.frequency_penalty, -FREQUENCY_MAX, FREQUENCY_MAX)
        _check_range("presence_penalty", options.presence_penalty, -PRESENCE_MAX, PRESENCE_MAX)
        _check_range("repetition_penalty", options.repetition_penalty, REPETITION_MIN, REPETITION_MAX)
        _check_range("logprobs", options.logprobs, 0, LOGPROBS_MAX)
        _check_range("top_logprobs", options.top_logprobs, 0, LOGPROBS_MAX)
        _check_range("seed", options.seed, 0, 2**64 - 1)
        _check_range("n", options.n, 1, self._config.max_choices)
        _check_range("priority", options.priority, -_INT32_MAX - 1, _INT32_MAX)
        if options.top_p is not None and not 0.0 < options.top_p <= 1.0:
            raise InvalidArgument("top_p", f"is {options.top_p:g}, it must be greater than 0 and at most 1")
        if options.slo_class and options.slo_class not in self._classes:
            names = ", ".join(self._classes)
            raise InvalidArgument("slo_class", f"{options.slo_class[:40]!r} is none of {names}; or leave it empty")
        if len(options.cache_salt) > _SALT_MAX:
            raise InvalidArgument("cache_salt", f"has {len(options.cache_salt)} characters, the limit is {_SALT_MAX}")
        _check_text("cache_salt", options.cache_salt)
        self._check_stop(options, served)

    def _check_stop(self, options: Options, served: ServedModel) -> None:
        most, longest = self._config.max_stop_strings, self._config.max_stop_chars
        if len(options.stop) > most:
            raise InvalidArgument("stop", f"has {len(options.stop)} strings, the limit is {most}")
        for text in options.stop:
            if not 0 < len(text) <= longest:
                message = f"has a string of {len(text)} characters, each must have 1 to {longest}"
                raise InvalidArgument("stop", message)
            _check_text("stop", text)
        if len(options.stop_token_ids) > self._config.max_stop_token_ids:
            limit = self._config.max_stop_token_ids
            raise InvalidArgument("stop_token_ids", f"has {len(options.stop_token_ids)} ids, the limit is {limit}")
        _check_token_ids("stop_token_ids", options.stop_token_ids, served.facts.vocab_size)

    def _sampling(self, options: Options, max_tokens: int) -> SamplingParams:
        defaults = self._defaults
        temperature = _or(options.temperature, defaults.temperature)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
            top_k=_or(options.top_k, defaults.top_k),
            top_p=_or(options.top_p, defaults.top_p),
            min_p=_or(options.min_p, defaults.min_p),
            seed=random.getrandbits(64) if options.seed is None else options.seed,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
            frequency_penalty=_or(options.frequency_penalty, 0.0),
            presence_penalty=_or(options.presence_penalty, 0.0),
            repetition_penalty=_or(options.repetition_penalty, defaults.repetition_penalty),
            logprobs=options.alternatives,
        )

    def _not_ready(self) -> TandemError:
        message = "the cluster is starting, no worker of each role has been seen yet; try again in a moment"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)


def _field(ask: Ask) -> str:
    return "messages" if isinstance(ask.prompt, Conversation) else "prompt"


def _or(value: _T | None, fallback: _T) -> _T:
    return fallback if value is None else value


def _checked_id(request_id: str) -> str:
    if not request_id:
        return f"req-{uuid.uuid4().hex}"
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise InvalidArgument("request_id", "must be 1 to 128 printable ASCII characters without spaces")
    return request_id


def _check_prompt(ask: Ask) -> None:
    prompt = ask.prompt
    if isinstance(prompt, Conversation):
        if not prompt.turns:
            raise InvalidArgument("messages", "is empty; send at least one message")
        for number, turn in enumerate(prompt.turns):
            if turn.role not in _ROLES:
                raise InvalidArgument(f"messages[{number}].role", f"is {turn.role!r}, it must be one of {_ROLES}")
            _check_text(f"messages[{number}].content", turn.content)
        return
    if not prompt:
        raise InvalidArgument("prompt", "is empty; send at least one token")
    if isinstance(prompt, str):
        _check_text("prompt", prompt)


def _check_text(field: str, text: str) -> None:
    if "\0" in text:
        raise InvalidArgument(field, "contains a NUL character; remove it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, "is not valid Unicode: it contains a lone surrogate; remove it") from error


def _check_token_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = next((i for i in (min(ids), max(ids)) if not 0 <= i < vocab_size), None) if ids else None
    if wrong is not None:
        message = f"contains token id {str(wrong)[:40]}, ids of this model are 0 to {vocab_size - 1}"
        raise InvalidArgument(field, message)


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN compares false
        limits = " to ".join(f"{limit}" if isinstance(limit, int) else f"{limit:g}" for limit in (low, high))
        raise InvalidArgument(field, f"is {str(value)[:40]}, it must be {limits}")
