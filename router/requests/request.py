"""The forms of a request inside the router: as sent by the client, as validated, and in flight with its state.

Validation turns a `ClientRequest` into an `Admitted`, and the dispatcher makes one `RoutedRequest` per answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from router.observability.prediction_quality import PlacementRecord
from router.observability.request_outcome import GapTracker, JointOutcome
from router.placement.policy import Placement
from router.placement.queue import QueuedRequest
from router.requests.answer import Answer, AnswerEnd
from router.requests.answer_format import AnswerFormat
from router.requests.assembler import TokenAssembler
from router.text.answer_syntax.formats import AnswerSyntax
from router.text.answer_text import AnswerText
from router.text.chat_template import ChatTurn, PromptEnd
from router.text.tools import ToolOptions
from router.workers.worker import Worker
from tandem.protocol.lifecycle.events import EventTime, LifecycleEvent, Timeline, TransferStats
from tandem.protocol.lifecycle.request_trace import RequestTrace, TraceContext
from tandem.protocol.messages import AdapterFacts, FinishReason, Lease, RequestRef, SamplingParams
from tandem.protocol.page_digests import root_digest
from tandem.protocol.prefixes import PrefixRun
from tandem.settings.slo import BEST_EFFORT, SloClass

SILENCE_S = 1e-3
"""Minimum time without an event from a request's workers that `note_silence` records as SILENT, in seconds."""


@dataclass(frozen=True, slots=True)
class Options:
    """Generation options as a client gave them, not validated; None means that the client did not give the option."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; it takes precedence if both are given."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    """Number of most likely tokens to report with each sampled token; None = no log probabilities."""
    top_logprobs: int | None = None
    """OpenAI's name of `logprobs` in the chat API; it takes precedence if both are given."""
    prompt_logprobs: int | None = None
    """Number of most likely tokens to report with each prompt token; None = the prompt is not scored."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs (token id, bias); the bias is added to the token's logit."""
    seed: int | None = None
    n: int | None = None
    """Number of answers to return."""
    best_of: int | None = None
    """Number of answers to generate, of which the `n` most likely ones are returned; None = `n`."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    """True if the answer's text includes the stop string that ends it."""
    ignore_eos: bool = False
    speculate: bool = True
    """True if draft tokens may be used; False decodes one token per step."""
    priority: int = 0
    """The client's priority: among the requests of one tenant, lower values are served first."""
    slo_class: str = ""
    cache_salt: str = ""
    """A salt of the prefix cache: cached KV pages are reused only between requests with the same salt."""
    session: str = ""
    """The client's id of the session that the request belongs to; "" = unknown."""
    cache_retention_s: float = 0.0
    """Seconds for which the client expects to send a prompt with this prefix again; 0 = unknown."""
    answer_format: AnswerFormat | None = None
    """The format that every answer follows; None = any text."""
    add_special_tokens: bool | None = None
    """True to add the model's special tokens to the prompt; None adds them to plain text, but not to a conversation."""
    truncate_prompt_tokens: int | None = None
    """Number of tokens to keep at the end of the prompt; -1 keeps as many as fit into the context with the answer."""

    @property
    def alternatives(self) -> int | None:
        """Number of most likely tokens to report with each sampled token, from `top_logprobs` or `logprobs`.

        None means that no log probabilities are reported.
        """
        return self.logprobs if self.top_logprobs is None else self.top_logprobs

    @property
    def answers(self) -> int:
        """Number of answers to generate."""
        return self.best_of or self.n or 1

    @property
    def answer_limit(self) -> tuple[str, int | None]:
        """The name of the field that limits the answer's length, and the limit in tokens (None if not given)."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt of chat messages, which the chat template renders."""

    turns: tuple[ChatTurn, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The client's variables for the chat template (`chat_template_kwargs`), as parsed from JSON."""
    tools: ToolOptions = field(default_factory=ToolOptions)
    end: PromptEnd = PromptEnd.NEXT_TURN
    parsed: bool = False
    """True if the answer is parsed into reasoning, content and tool calls."""
    hinted_turns: int | None = None
    """The number of leading turns to which `Options.cache_retention_s` applies; None = all."""


Prompt = str | tuple[int, ...] | Conversation
"""A prompt: text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A request as the HTTP or gRPC listener parsed it, not validated.

    If `request_id` is "", the router makes an id.
    """

    request_id: str
    model: str
    prompt: Prompt
    options: Options
    received: EventTime
    tenant: str = ""
    """The tenant that owns the request (`router/access/tenants.py`)."""
    traceparent: str = ""
    """The client's traceparent header (`tandem/protocol/lifecycle/request_trace.py`); "" if it sent none."""

    @property
    def operation(self) -> str:
        """The operation's name in OpenTelemetry's conventions for generative AI, such as `text_completion`."""
        return "chat" if isinstance(self.prompt, Conversation) else "text_completion"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A validated prompt of a request, ready for dispatch, with token ids, all sampling values and stop strings."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    priority: int
    event_times: tuple[EventTime, ...]
    include_stop: bool = False
    """True if the answer's text includes the stop string that ends it."""
    cache_salt: str = ""
    """The prefix cache salt derived from tenant, adapter and the client's salt (`router/access/tenants.py`)."""
    adapter: AdapterFacts | None = None
    """The LoRA adapter to apply; None = the base model."""
    tenant: str = ""
    slo: SloClass = BEST_EFFORT
    digests: tuple[bytes, ...] = ()
    """The digests of the prompt's full pages; () if they are unknown."""
    cacheable_tokens: int = 0
    """Number of prompt tokens that a prefix cache can store: those of full pages."""
    session: str = ""
    """The client's `Options.session`."""
    cache_retention_s: float = 0.0
    """The client's `Options.cache_retention_s`."""
    hinted_tokens: int | None = None
    """The number of leading prompt tokens to which it applies; None = all."""
    n: int = 1
    """Number of answers to generate (`router/requests/choices.py`)."""
    context: TraceContext = field(default_factory=TraceContext.fresh)
    """The client's trace context; a new context if the client sent none."""
    operation: str = "text_completion"
    """The operation's name in OpenTelemetry's conventions for generative AI."""
    syntax: AnswerSyntax | None = None
    """The syntax by which the answers are parsed into reasoning, content and tool calls; None = plain text."""
    format_field: str = ""
    """The name of the request field that sets the answer format, for error messages; "" without a format."""

    def model_name(self, base: str) -> str:
        """Return the name of the adapter, or `base` if the base model answers."""
        return base if self.adapter is None else self.adapter.name

    @property
    def waited_s(self) -> float:
        """The seconds since the router received the request; TTFT is measured from then and includes tokenization."""
        return max(0.0, (time.time_ns() - self.event_times[0].unix_nanos) / 1e9) if self.event_times else 0.0

    def queued(self, internal_id: str, sequence: int, arrived_s: float) -> QueuedRequest:
        """Return the sizes and targets of the request for the queue and placement.

        `arrived_s` is its time of arrival in seconds of the router's clock. The digests are left out if the prompt is
        scored, so that every worker computes all its tokens: only computed tokens are scored.
        """
        return QueuedRequest(
            internal_id=internal_id,
            sequence=sequence,
            arrived_s=arrived_s,
            prompt_tokens=len(self.prompt_token_ids),
            max_tokens=self.sampling.max_tokens,
            to_the_limit=self.sampling.runs_to_limit and not self.stop,
            digests=() if self.sampling.prompt_logprobs is not None else self.digests,
            tenant=self.tenant,
            priority=self.priority,
            slo=self.slo,
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """The state of one answer in flight. The dispatcher owns it until it ends; only the event loop changes it."""

    internal_id: str
    """The id of the request on workers, which is unique even if clients reuse ids."""
    admitted: Admitted
    queued: QueuedRequest
    """The sizes and targets of the request for the queue and placement."""
    text: AnswerText
    answer: Answer
    waiting_since: float
    """Monotonic time at which the request last entered the queue, in seconds."""
    last_event_s: float = 0.0
    """Monotonic time of the placement or of the last event from the workers, whichever is later, in seconds."""
    attempt: int = 1
    failures: int = 0
    prediction: Placement | None = None
    """The placement of the current attempt, with its predicted latencies."""
    placed_s: float = 0.0
    """Monotonic time of the current placement, in seconds."""
    first_token_s: float = 0.0
    """Monotonic time at which the attempt's first token reached the router, in seconds."""
    last_token_s: float = 0.0
    """Monotonic time at which the answer's last token reached the router, in seconds."""
    prefill: Worker | None = None
    decode: Worker | None = None
    lease: Lease | None = None
    assembler: TokenAssembler = field(default_factory=TokenAssembler)
    event_times: list[EventTime] = field(default_factory=list)
    transfer: TransferStats | None = None
    preempted_at: int | None = None
    """Number of answer tokens at which the decode worker preempted the current attempt; None = not preempted.

    The first token of the attempt may still be in flight from the prefill worker.
    """
    retention_s: float = 0.0
    """Seconds for which workers keep the prompt's pages: the client's hint or the router's estimate (`reuse.py`).

    A hint for the beginning of the prompt only is not part of it.
    """
    cached_tokens: int = 0
    """Number of prompt tokens whose KV was found in the prefix cache."""
    reloaded_tokens: int = 0
    """The part of `cached_tokens` whose KV was loaded from a tier of the prefix cache for this prompt."""
    reads_ahead: bool = False
    """True once it was decided whether a worker loads KV of the prompt while the request waits in the queue."""
    prefill_worker: str = ""
    decode_worker: str = ""
    pace: GapTracker = field(default_factory=GapTracker)
    """The gaps between the answer's tokens as they leave for the client."""
    counted: bool = False
    """True if the end of the request has been counted in the metrics."""
    failure: str = ""
    """The code of an error that is to be sent after the last tokens; "" if there is none or it has been sent."""
    joint: JointOutcome = field(default_factory=JointOutcome)
    """The SLO outcome of the client's request, shared by all its answers."""
    generated: bool = False
    """True once the workers have generated the whole answer and hold no state of the request."""
    held: tuple[RoutedRequest, ...] = ()
    """The other answers to the same prompt, which enter the queue once this answer's prompt is cached."""
    ended: bool = False

    @property
    def ref(self) -> RequestRef:
        """The current attempt: internal id and attempt number."""
        return RequestRef(self.internal_id, self.attempt)

    @property
    def prior_output_tokens(self) -> int:
        """Number of answer tokens from earlier attempts; this attempt prefills them after the prompt."""
        return self.queued.prior_output_tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids to prefill: the prompt and the first `prior_output_tokens` tokens of the answer."""
        return self.admitted.prompt_token_ids + self.assembler.first(self.prior_output_tokens)

    def read_ahead(self, worker: Worker) -> None:
        """Let `worker` load what it has of the prompt in its tiers, before the prompt is sent."""
        digests = self.queued.readable_digests(worker.info.page_tokens)
        worker.read_ahead(PrefixRun(root_digest(self.admitted.cache_salt), digests))

    def only_continues_at(self, attempt: int, index: int) -> bool:
        """Return True if the attempt's tokens from `index` on are the answer's next, and change no other state.

        This holds once the attempt's first token has arrived and the decode worker has admitted the request, until an
        end or a preemption of the answer is known.
        """
        return (
            attempt == self.attempt
            and index > self.queued.prior_output_tokens
            and self.lease is None
            and self.preempted_at is None
            and self.assembler.only_continues_at(index)
        )

    def note_silence(self, now: float) -> None:
        """Record that the workers have sent nothing since their last event: SILENT, with the time of that event.

        Does nothing if that event came less than `SILENCE_S` before `now`, the monotonic time in seconds.
        """
        silent_s = now - self.last_event_s
        if self.prefill is not None and silent_s > SILENCE_S:
            self.event_times.append(EventTime(LifecycleEvent.SILENT, time.time_ns() - int(silent_s * 1e9)))

    def timeline(self) -> Timeline:
        """Return the request's lifecycle events so far, with their times."""
        record = self.placement_record()
        placement = None if record is None else record.stats
        return Timeline(tuple(self.event_times), self.transfer, self.prefill_worker, self.decode_worker, placement)

    def ending(self, reason: FinishReason, matched_stop: str) -> AnswerEnd:
        """Return the ending of the answer for the client, and record the FINISHED event."""
        self.event_times.append(EventTime.now(LifecycleEvent.FINISHED))
        return AnswerEnd(
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.admitted.prompt_token_ids),
            completion_tokens=self.answer.token_count,
            cached_tokens=(cached := min(self.cached_tokens, len(self.admitted.prompt_token_ids))),
            cache_written_tokens=max(0, self.admitted.cacheable_tokens - cached) if self.assembler.count else 0,
            timeline=self.timeline(),
        )

    def trace(self, model: str, outcome: str) -> RequestTrace:
        """Return the trace of the request; `model` is the base model, `outcome` a finish reason or an error code."""
        if self.event_times[-1].event is not LifecycleEvent.FINISHED:
            self.event_times.append(EventTime.now(LifecycleEvent.FINISHED))
        admitted = self.admitted
        prompt = len(admitted.prompt_token_ids)
        return RequestTrace(
            request_id=admitted.request_id,
            internal_id=self.internal_id,
            context=admitted.context,
            model=admitted.model_name(model),
            operation=admitted.operation,
            slo_class=admitted.slo.name,
            outcome=outcome,
            prompt_tokens=prompt,
            completion_tokens=self.pace.tokens,
            cached_tokens=min(self.cached_tokens, prompt),
            timeline=self.timeline(),
        )

    def placement_record(self) -> PlacementRecord | None:
        """Return the predicted and actual latencies of the placement; None without a prediction or after a retry."""
        if self.prediction is None or self.attempt > 1 or not self.first_token_s:
            return None
        gaps = self.assembler.count - 1
        return PlacementRecord(
            request_id=self.admitted.request_id,
            prefill_worker=self.prefill_worker,
            decode_worker=self.decode_worker,
            slo_class=self.queued.slo.name,
            prediction=self.prediction,
            ttft_s=self.first_token_s - self.placed_s,
            itl_s=(self.last_token_s - self.first_token_s) / gaps if gaps > 0 else None,
            cached_tokens=self.cached_tokens,
            reloaded_tokens=self.reloaded_tokens,
        )
