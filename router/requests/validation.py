"""Validates the client requests of both listeners (HTTP and gRPC), and completes them with token ids and defaults.

Each error names the field and its limit. Cheap checks come before the prompt is tokenized.
"""

import random
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from router.access.tenants import tenant_salt
from router.config import RouterConfig
from router.requests.answer_format import AnswerFormat, FormatCompiler
from router.requests.answer_syntaxes import AnswerSyntaxes, wanted_format
from router.requests.prompts import PromptEncoder, check_json, check_text, check_token_ids, field_of, too_long
from router.requests.request import Admitted, ClientRequest, Conversation, Options
from router.text.request_items import check_template_kwargs
from router.text.request_reader import RequestReader
from router.text.token_scores import TokenScore
from router.text.tokenizer import Tokenizer
from router.text.tokenizing import TokenizerPool
from router.workers.worker_pool import ServedModel
from tandem.protocol.errors import InvalidArgument, NotFound, TandemError, Unavailable, shown
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent
from tandem.protocol.lifecycle.request_trace import TraceContext
from tandem.protocol.messages import (
    CACHE_RETENTION_MAX_S,
    FREQUENCY_MAX,
    INT32_MAX,
    LOGIT_BIAS_MAX,
    LOGIT_BIASES_MAX,
    LOGPROBS_MAX,
    PRESENCE_MAX,
    PROMPT_SCORES_MAX,
    REPETITION_MAX,
    REPETITION_MIN,
    SEED_MAX,
    TEMPERATURE_MAX,
    AdapterFacts,
    PromptLogprobs,
    SamplingParams,
)
from tandem.settings.slo import classes_by_name
from tandem.tokenizers.model_folder import GenerationDefaults

_T = TypeVar("_T")
_REQUEST_ID = re.compile(r"[!-~]{1,128}")
SALT_MAX, SESSION_MAX = 256, 256
_GREEDY_BELOW = 1e-5
"""A lower temperature is set to 0 (greedy), which gives the same result: logits ÷ temperature could overflow."""


def find_adapter(name: str, config: RouterConfig, served: ServedModel | None) -> AdapterFacts | None:
    """Return the adapter with the name `name`; None if `name` is a name of the base model.

    Raises NotFound if neither an adapter nor the model has this name, and Unavailable while the adapters are unknown.
    """
    if name in config.served.names:
        return None
    if served is None:
        raise _starting(config)
    adapters = {adapter.name: adapter for adapter in served.facts.adapters}
    if name not in adapters:
        names = " or ".join(map(repr, (*config.served.names, *adapters)))
        raise NotFound(f"model: {shown(name)} is not served here; this router serves {names}")
    return adapters[name]


class RequestValidator:
    """Checks requests against the limits of the model and of the router, and tokenizes their prompts.

    The router has one. All calls come on the event loop; `close` ends its tokenizer threads and grammar processes.
    """

    def __init__(
        self,
        config: RouterConfig,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        model: Callable[[], ServedModel | None],
        refused: Callable[[str, TandemError], None],
    ) -> None:
        """Set the callbacks.

        `model` returns the model that the workers serve, or None while it is unknown. `refused` is called with the SLO
        class and the error of each rejection.
        """
        self._config = config
        self._classes = classes_by_name(config.slo_classes)
        self._defaults = defaults
        self._model = model
        self._refused = refused
        self.tokenizer_facts = tokenizer.facts
        """The tokenizer's class, chat template and special tokens, for /tokenizer_info."""
        self._pool = TokenizerPool(config.tokenizer_threads, config.max_tokenizing_bytes, config.retry_after_s)
        self._prompts = PromptEncoder(tokenizer, self._pool, config.max_messages)
        self._syntaxes = AnswerSyntaxes(config, tokenizer)
        self._formats = FormatCompiler(config)
        self.reader = RequestReader(config, self._pool, self._context)
        """The parser of request bodies, which uses the tokenizer threads for large bodies."""

    async def admit_all(self, requests: Sequence[ClientRequest]) -> list[Admitted]:
        """Validate the requests of one call, which differ only in their prompts and share one id and one grammar."""
        admitted: list[Admitted] = []
        for client_request in requests:
            first = admitted[0] if admitted else None
            request = client_request if first is None else replace(client_request, request_id=first.request_id)
            admitted.append(await self.admit(request, like=first))
        return admitted

    async def admit(self, request: ClientRequest, like: Admitted | None = None) -> Admitted:
        """Validate the request, and return it with token ids and complete sampling values.

        `like` is another prompt of the same call, whose grammar is reused. Raises InvalidArgument, NotFound or another
        `TandemError` if the request cannot be served.
        """
        try:
            return await self._admit(request, like)
        except TandemError as error:
            self._refused(request.options.slo_class or self._config.default_slo_class, error)
            raise

    async def tokenize(self, request: ClientRequest, *, token_texts: bool) -> tuple[list[int], list[str] | None, int]:
        """Return a prompt's token ids, each token's text (None without `token_texts`), and the context in tokens."""
        self._adapter(request.model)
        served = self._served()
        self._prompts.check(request)
        self._check_variables(request)
        last = self._last(request.options, served)
        ids, spelled = await self._prompts.tokenized(request, served, last, token_texts=token_texts)
        return ids, spelled, served.facts.max_context

    async def spelled(self, tenant: str, ids: tuple[int, ...], logprobs: PromptLogprobs) -> list[TokenScore]:
        """Return the scores of a prompt's tokens: log probabilities and texts, as in `format_prompt_logprobs`."""
        return await self._prompts.spelled(tenant, ids, logprobs)

    async def detokenize(self, tenant: str, model: str, ids: tuple[int, ...]) -> str:
        """Return the text of token ids, including special tokens."""
        self._adapter(model)
        return await self._prompts.text(tenant, ids, self._served())

    def check_token_count(self, count: int) -> None:
        """Raise InvalidArgument if a prompt of `count` tokens exceeds the model's context."""
        context = self._context()
        if context and count >= context:
            raise too_long("prompt", field="prompt", prompt=count, answer=1, limit=context, context=context)

    async def _admit(self, request: ClientRequest, like: Admitted | None) -> Admitted:
        adapter = self._adapter(request.model)
        served = self._served()
        request_id = _checked_id(request.request_id)
        self._prompts.check(request)
        self._syntaxes.check(request)
        self._check_variables(request)
        self._check_options(request.options, served)
        ids = await self._prompts.token_ids(request, served, self._last(request.options, served))
        max_tokens = self._checked_length(field_of(request), len(ids), request.options, served)
        _check_range("min_tokens", request.options.min_tokens, 0, max_tokens)
        wanted = wanted_format(request)
        grammar = await self._grammar(request, wanted, served) if like is None else like.sampling.grammar
        salt = tenant_salt(request.tenant, request.options.cache_salt, "" if adapter is None else adapter.identity)
        digests = await self._prompts.page_digests(request.tenant, ids, salt, served.page_tokens)
        sampling = self._sampling(request.options, max_tokens, grammar)
        _check_scores(sampling.prompt_scores(len(ids)))
        return Admitted(
            request_id=request_id,
            prompt_token_ids=ids,
            sampling=sampling,
            stop=request.options.stop,
            include_stop=request.options.include_stop,
            priority=request.options.priority,
            event_times=(request.received, EventTime.now(LifecycleEvent.TOKENIZED)),
            cache_salt=salt,
            adapter=adapter,
            tenant=request.tenant,
            slo=self._classes[request.options.slo_class or self._config.default_slo_class],
            digests=digests,
            cacheable_tokens=len(digests) * served.page_tokens if self._config.prefix_cache else 0,
            session=request.options.session,
            cache_retention_s=request.options.cache_retention_s,
            hinted_tokens=await self._prompts.hinted_tokens(request, ids),
            n=request.options.answers,
            context=TraceContext.of(request.traceparent),
            operation=request.operation,
            syntax=self._syntaxes.of(request, ids),
            format_field="" if wanted is None else wanted.field,
        )

    def close(self) -> None:
        """Stop the tokenizer threads and the grammar processes."""
        self._pool.close()
        self._formats.close()

    # ---- the prompt ----

    def _context(self) -> int:
        served = self._model()
        return 0 if served is None else served.facts.max_context

    def _checked_length(self, field: str, prompt: int, options: Options, served: ServedModel) -> int:
        """Return the maximum number of answer tokens.

        Raises ContextLengthExceeded if prompt and answer exceed the context or the page pool of every worker.
        """
        context = served.facts.max_context
        limited_by, max_tokens = options.answer_limit
        limit, prompt_limit = _limits(max_tokens, served)
        if prompt >= prompt_limit:
            raise too_long(
                field, field=field, prompt=prompt, answer=max_tokens or 1, limit=prompt_limit, context=context
            )
        if max_tokens is None:
            return self._unnamed_length(prompt, limit, served)
        if prompt + max_tokens > limit:
            raise too_long(limited_by, field=field, prompt=prompt, answer=max_tokens, limit=limit, context=context)
        return max_tokens

    def _last(self, options: Options, served: ServedModel) -> int | None:
        """Return the number of tokens to keep at the end of the prompt; None keeps all."""
        count = options.truncate_prompt_tokens
        _check_range("truncate_prompt_tokens", count, -1, INT32_MAX)
        if count == 0:
            raise InvalidArgument("truncate_prompt_tokens", "is 0, it must be at least 1, or -1 for what fits")
        if count != -1:
            return count
        _, max_tokens = options.answer_limit
        limit, prompt_limit = _limits(max_tokens, served)
        return max(1, min(prompt_limit - 1, limit - (max_tokens or 1)))

    def _unnamed_length(self, prompt: int, limit: int, served: ServedModel) -> int:
        """Return the maximum number of answer tokens for a request that does not set it.

        The maximum is the number of tokens that every decode worker can hold after the prompt. If the largest decode
        worker can hold more than twice as many, its number is used instead. `default_max_tokens` is an upper bound.
        """
        largest, everywhere = limit - prompt, min(limit, served.decode_tokens_min + 1) - prompt
        fits = largest if largest > 2 * everywhere else everywhere
        bound = self._config.default_max_tokens
        return fits if bound is None else min(fits, bound)

    # ---- the options ----

    def _adapter(self, name: str) -> AdapterFacts | None:
        return find_adapter(name, self._config, self._model()) if name else None

    def _check_options(self, options: Options, served: ServedModel) -> None:
        _check_range("max_tokens", options.max_tokens, 1, INT32_MAX)
        _check_range("max_completion_tokens", options.max_completion_tokens, 1, INT32_MAX)
        _check_range("temperature", options.temperature, 0.0, TEMPERATURE_MAX)
        _check_range("top_k", options.top_k, 0, INT32_MAX)
        _check_range("min_p", options.min_p, 0.0, 1.0)
        _check_range("frequency_penalty", options.frequency_penalty, -FREQUENCY_MAX, FREQUENCY_MAX)
        _check_range("presence_penalty", options.presence_penalty, -PRESENCE_MAX, PRESENCE_MAX)
        _check_range("repetition_penalty", options.repetition_penalty, REPETITION_MIN, REPETITION_MAX)
        _check_range("logprobs", options.logprobs, 0, LOGPROBS_MAX)
        _check_range("top_logprobs", options.top_logprobs, 0, LOGPROBS_MAX)
        _check_range("seed", options.seed, 0, SEED_MAX)
        _check_range("prompt_logprobs", options.prompt_logprobs, 0, LOGPROBS_MAX)
        _check_range("n", options.n, 1, self._config.max_choices)
        _check_range("best_of", options.best_of, options.n or 1, self._config.max_choices)
        _check_bias(options.logit_bias, served.facts.vocab_size)
        _check_range("priority", options.priority, -INT32_MAX - 1, INT32_MAX)
        if options.top_p is not None and not 0.0 < options.top_p <= 1.0:
            raise InvalidArgument("top_p", f"is {options.top_p:g}, it must be greater than 0 and at most 1")
        if options.slo_class and options.slo_class not in self._classes:
            names = ", ".join(self._classes)
            raise InvalidArgument("slo_class", f"{shown(options.slo_class)} is not one of {names}; or leave it empty")
        if len(options.cache_salt) > SALT_MAX:
            raise InvalidArgument("cache_salt", f"has {len(options.cache_salt)} characters, the limit is {SALT_MAX}")
        check_text("cache_salt", options.cache_salt)
        if len(options.session) > SESSION_MAX:
            message = f"has {len(options.session)} characters, the limit is {SESSION_MAX}"
            raise InvalidArgument("the session id (X-Session-Id, prompt_cache_key)", message)
        _check_range("cache_retention_s", options.cache_retention_s, 0.0, CACHE_RETENTION_MAX_S)
        self._check_stop(options, served)

    def _check_variables(self, request: ClientRequest) -> None:
        """Raise InvalidArgument if the template variables are not JSON, too large, or contain invalid text."""
        variables = request.prompt.variables if isinstance(request.prompt, Conversation) else None
        if not variables:
            return
        check_template_kwargs(variables, self._config.max_template_kwargs_bytes)
        check_json("chat_template_kwargs", variables)

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

    async def _grammar(self, request: ClientRequest, wanted: AnswerFormat | None, served: ServedModel) -> str:
        if wanted is None:
            return ""
        for name in ("min_tokens", "ignore_eos"):
            if getattr(request.options, name):
                raise InvalidArgument(name, f"cannot be combined with {wanted.field}, which says where an answer ends")
        return await self._formats.grammar(request.tenant, wanted, served.facts)

    def _sampling(self, options: Options, max_tokens: int, grammar: str) -> SamplingParams:
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
            logprobs=0 if options.alternatives is None and options.best_of is not None else options.alternatives,
            speculate=options.speculate,
            grammar=grammar,
            prompt_logprobs=options.prompt_logprobs,
            logit_bias=options.logit_bias,
        )

    def _served(self) -> ServedModel:
        """Return the served model. Raises Unavailable while it is unknown."""
        if (served := self._model()) is not None:
            return served
        raise _starting(self._config)


def _starting(config: RouterConfig) -> Unavailable:
    message = "the cluster is starting, no worker of each role has been seen yet; try again in a moment"
    return Unavailable(message, retry_after_s=config.retry_after_s)


def _limits(max_tokens: int | None, served: ServedModel) -> tuple[int, int]:
    """Return two limits in tokens: the maximum of prompt plus answer, and a number below which the prompt must be."""
    # Both limits exceed the page pool by one, because the KV of the answer's last token is never stored. An answer of
    # one token comes from prefill, so no decode worker limits it.
    limit = served.facts.max_context if max_tokens == 1 else min(served.facts.max_context, served.decode_tokens_max + 1)
    return limit, min(limit, served.prefill_tokens_max + 1)


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


def _check_bias(biases: Sequence[tuple[int, float]], vocab_size: int) -> None:
    if len(biases) > LOGIT_BIASES_MAX:
        raise InvalidArgument("logit_bias", f"has {len(biases)} tokens, the limit is {LOGIT_BIASES_MAX}")
    check_token_ids("logit_bias", [token_id for token_id, _ in biases], vocab_size)
    for token_id, bias in biases:
        _check_range(f"logit_bias.{token_id}", bias, -LOGIT_BIAS_MAX, LOGIT_BIAS_MAX)


def _check_scores(count: int) -> None:
    if count > PROMPT_SCORES_MAX:
        raise InvalidArgument(
            "prompt_logprobs",
            f"(or echo with logprobs) asks for {count} log probabilities of the prompt, the limit is"
            f" {PROMPT_SCORES_MAX}; send a shorter prompt or ask for fewer alternatives",
        )
