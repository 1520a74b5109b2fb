"""The one validator of gRPC and HTTP: from what a client asked to what workers can be told.

Every refusal names the field and its limit. Checks that cost nothing come before the prompt is tokenized.
"""

import json
import random
import re
import uuid
from collections.abc import Callable
from typing import TypeVar

from router.config import RouterConfig
from router.requests.prompts import PromptEncoder, check_text, check_token_ids, field_of, too_long
from router.requests.request import Admitted, Ask, Conversation, Options
from router.requests.tenants import tenant_salt
from router.slo import classes_by_name
from router.text.model_folder import GenerationDefaults
from router.text.request_reader import RequestReader
from router.text.tokenizer import Tokenizer
from router.text.tokenizing import TokenizerPool
from router.workers.worker_pool import ServedModel
from wire.errors import InvalidArgument, NotFound, TandemError, Unavailable, shown
from wire.messages import (
    FREQUENCY_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SamplingParams,
)
from wire.tracing.request_trace import TraceContext
from wire.tracing.timeline import Edge, EdgeStamp

_T = TypeVar("_T")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_INT32_MAX = 2**31 - 1
_SALT_MAX = 256
_TEMPERATURE_MAX = 100.0
_GREEDY_BELOW = 1e-5
"""Temperatures so small that float32 overflows; the most likely token has all the weight there anyway."""


def check_model(name: str, served: str) -> None:
    """`NotFound` if a client asks for another model than the one that is `served`."""
    if name != served:
        raise NotFound(f"model: {shown(name)} is not served here; this router serves {served!r}")


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
        self._defaults = defaults
        self._model = model
        self._refused = refused
        self._pool = TokenizerPool(config.tokenizer_threads, config.max_tokenizing_bytes, config.retry_after_s)
        self._prompts = PromptEncoder(tokenizer, self._pool, config.max_messages)
        self.reader = RequestReader(config, self._pool, self._context)
        """Reads what is admitted here, in the same threads."""

    async def admit(self, ask: Ask) -> Admitted:
        """The request with token ids and complete sampling values, or the `TandemError` that says what is wrong."""
        try:
            return await self._admit(ask)
        except TandemError as error:
            self._refused(ask.options.slo_class or self._config.default_slo_class, error)
            raise

    def check_token_count(self, count: int) -> None:
        """InvalidArgument if no context of the model could hold a prompt of so many tokens."""
        context = self._context()
        if context and count >= context:
            raise too_long("prompt", field="prompt", prompt=count, answer=1, room=context, context=context)

    async def _admit(self, ask: Ask) -> Admitted:
        self._check_model(ask.model)
        served = self._model()
        if served is None:
            raise self._not_ready()
        request_id = _checked_id(ask.request_id)
        self._prompts.check(ask)
        self._check_variables(ask)
        self._check_options(ask.options, served)
        ids = await self._prompts.token_ids(ask, served)
        max_tokens = self._checked_length(field_of(ask), len(ids), ask.options, served)
        _check_range("min_tokens", ask.options.min_tokens, 0, max_tokens)
        salt = tenant_salt(ask.tenant, ask.options.cache_salt)
        digests = await self._prompts.page_digests(ask.tenant, ids, salt, served.page_tokens)
        return Admitted(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=self._sampling(ask.options, max_tokens),
            stop=ask.options.stop,
            include_stop=ask.options.include_stop,
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
        self._pool.close()

    # ---- the prompt ----

    def _context(self) -> int:
        served = self._model()
        return 0 if served is None else served.facts.max_context

    def _checked_length(self, field: str, prompt: int, options: Options, served: ServedModel) -> int:
        """The answer's limit in tokens; refuses what no context or no page pool could hold."""
        context = served.facts.max_context
        limited_by, max_tokens = options.answer_limit
        # The last token's KV is never stored, and if it is the first, none is decoded.
        room = context if max_tokens == 1 else min(context, served.decode_tokens_max + 1)
        prompt_room = min(room, served.prefill_tokens_max + 1)
        if prompt >= prompt_room:
            raise too_long(field, field=field, prompt=prompt, answer=max_tokens or 1, room=prompt_room, context=context)
        if max_tokens is None:
            return self._unnamed_length(prompt, room, served)
        if prompt + max_tokens > room:
            raise too_long(limited_by, field=field, prompt=prompt, answer=max_tokens, room=room, context=context)
        return max_tokens

    def _unnamed_length(self, prompt: int, room: int, served: ServedModel) -> int:
        """The answer's limit where the client names none: what fits behind the prompt at every decode worker, or at the
        largest where that is more than twice as much.
        """
        largest, everywhere = room - prompt, min(room, served.decode_tokens_min + 1) - prompt
        fits = largest if largest > 2 * everywhere else everywhere
        bound = self._config.default_max_tokens
        return fits if bound is None else min(fits, bound)

    # ---- the options ----

    def _check_model(self, name: str) -> None:
        if name:
            check_model(name, self._config.model_name)

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
            raise InvalidArgument("slo_class", f"{shown(options.slo_class)} is none of {names}; or leave it empty")
        if len(options.cache_salt) > _SALT_MAX:
            raise InvalidArgument("cache_salt", f"has {len(options.cache_salt)} characters, the limit is {_SALT_MAX}")
        check_text("cache_salt", options.cache_salt)
        self._check_stop(options, served)

    def _check_variables(self, ask: Ask) -> None:
        """Of the chat template: they are small, and what JSON holds."""
        variables = ask.prompt.variables if isinstance(ask.prompt, Conversation) else None
        if not variables:
            return
        limit = self._config.max_template_kwargs_bytes
        try:
            size = len(json.dumps(dict(variables)))
        except (RecursionError, ValueError) as error:
            raise InvalidArgument("chat_template_kwargs", f"cannot be given to the template: {error}") from error
        if size > limit:
            raise InvalidArgument("chat_template_kwargs", f"is {size} bytes long, the limit is {limit}")

    def _check_stop(self, options: Options, served: ServedModel) -> None:
        most, longest = self._config.max_stop_strings, self._config.max_stop_chars
        if len(options.stop) > most:
            raise InvalidArgument("stop", f"has {len(options.stop)} strings, the limit is {most}")
        for text in options.stop:
            if not 0 < len(text) <= longest:
                message = f"has a string of {len(text)} characters, each must have 1 to {longest}"
                raise InvalidArgument("stop", message)
            check_text("stop", text)
        if len(options.stop_token_ids) > self._config.max_stop_token_ids:
            limit = self._config.max_stop_token_ids
            raise InvalidArgument("stop_token_ids", f"has {len(options.stop_token_ids)} ids, the limit is {limit}")
        check_token_ids("stop_token_ids", options.stop_token_ids, served.facts.vocab_size)

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
            min_tokens=options.min_tokens,
            ignore_eos=options.ignore_eos,
            frequency_penalty=_or(options.frequency_penalty, 0.0),
            presence_penalty=_or(options.presence_penalty, 0.0),
            repetition_penalty=_or(options.repetition_penalty, defaults.repetition_penalty),
            logprobs=options.alternatives,
        )

    def _not_ready(self) -> TandemError:
        message = "the cluster is starting, no worker of each role has been seen yet; try again in a moment"
        return Unavailable(message, retry_after_s=self._config.retry_after_s)


def _or(value: _T | None, fallback: _T) -> _T:
    return fallback if value is None else value


def _checked_id(request_id: str) -> str:
    if not request_id:
        return f"req-{uuid.uuid4().hex}"
    if _REQUEST_ID.fullmatch(request_id) is None:
        raise InvalidArgument("request_id", "must be 1 to 128 printable ASCII characters without spaces")
    return request_id


def _check_range(field: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # NaN compares false
        limits = " to ".join(f"{limit}" if isinstance(limit, int) else f"{limit:g}" for limit in (low, high))
        raise InvalidArgument(field, f"is {str(value)[:40]}, it must be {limits}")
