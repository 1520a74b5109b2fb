"""A request inside the router: what was asked, what was admitted, and the one object that holds its state."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from router.observability.prediction_quality import PlacementRecord
from router.observability.verdict import JointVerdict, TokenPace
from router.placement.latency_model import Prediction
from router.placement.queue import QueuedRequest
from router.requests.answer import Answer, Ending
from router.requests.assembler import TokenAssembler
from router.slo import BEST_EFFORT, SloClass
from router.text.answer_text import AnswerText
from router.text.chat_template import ChatTurn
from wire.messages import FinishReason, Lease, RequestRef, SamplingParams
from wire.tracing.request_trace import RequestTrace, TraceContext
from wire.tracing.timeline import Edge, EdgeStamp, Timeline, TransferStats

if TYPE_CHECKING:
    from router.workers.worker_link import WorkerLink

SILENCE_S = 1e-3
"""Workers that were heard of within that are not silent."""


@dataclass(frozen=True, slots=True)
class Options:
    """Generation options as a client gave them, unchecked; None = not given."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """OpenAI's newer name for `max_tokens`; counts where both are given."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logprobs: int | None = None
    """Most likely tokens to report beside each chosen one; None = no log probabilities."""
    top_logprobs: int | None = None
    """The same under the name that OpenAI's chat gives it; counts where both are given."""
    seed: int | None = None
    n: int | None = None
    """How many answers."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False
    """Whether the stop string that ends the answer is the end of its text."""
    ignore_eos: bool = False
    priority: int = 0
    """Lower goes first, among those of its tenant."""
    slo_class: str = ""
    cache_salt: str = ""
    """Cached KV is used again only between requests of the same salt."""

    @property
    def alternatives(self) -> int | None:
        """Most likely tokens to report beside each chosen one, whatever the field is called."""
        return self.logprobs if self.top_logprobs is None else self.top_logprobs

    @property
    def answer_limit(self) -> tuple[str, int | None]:
        """Most tokens of the answer, behind the name of the field that says so."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt in turns, for the chat template."""

    turns: tuple[ChatTurn, ...]
    variables: Mapping[str, Any] = field(default_factory=dict)
    """What the client gives to the template beside the turns (`chat_template_kwargs`), as JSON had it."""


Prompt = str | tuple[int, ...] | Conversation
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What either listener hands to admission, unchecked. An empty `request_id` lets the router make one."""

    request_id: str
    model: str
    prompt: Prompt
    options: Options
    received: EdgeStamp
    tenant: str = ""
    """On whose account it goes (`router/requests/tenants.py`)."""
    traceparent: str = ""
    """Where its client traces it, as it says (`wire/tracing/request_trace.py`); "" = nowhere."""

    @property
    def operation(self) -> str:
        """As OpenTelemetry names it."""
        return "chat" if isinstance(self.prompt, Conversation) else "text_completion"


@dataclass(frozen=True, slots=True)
class Admitted:
    """A checked request: token ids, complete sampling values, stop strings."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    stop: tuple[str, ...]
    priority: int
    edges: tuple[EdgeStamp, ...]
    include_stop: bool = False
    """As in `Options`."""
    cache_salt: str = ""
    """The tenant's own (`router/requests/tenants.py`)."""
    tenant: str = ""
    slo: SloClass = BEST_EFFORT
    digests: tuple[bytes, ...] = ()
    """Names of the prompt's full pages, () = unknown."""
    n: int = 1
    """How many answers (`router/requests/choices.py`)."""
    context: TraceContext = field(default_factory=TraceContext.fresh)
    """Its place in its client's trace, or one of its own."""
    operation: str = "text_completion"
    """As in `Ask`."""

    def queued(self, wire_id: str, sequence: int, now: float) -> QueuedRequest:
        """What policies know of it when it arrives."""
        return QueuedRequest(
            wire_id=wire_id,
            sequence=sequence,
            arrived_s=now,
            prompt_tokens=len(self.prompt_token_ids),
            max_tokens=self.sampling.max_tokens,
            to_the_limit=self.sampling.runs_to_limit and not self.stop,
            digests=self.digests,
            tenant=self.tenant,
            priority=self.priority,
            slo=self.slo,
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """All the router knows of one request in flight. The dispatcher owns it; it is gone when the request ends."""

    wire_id: str
    """Its name among workers: never used twice, whatever ids clients choose."""
    admitted: Admitted
    queued: QueuedRequest
    """What policies know of it."""
    text: AnswerText
    answer: Answer
    waiting_since: float
    """Monotonic seconds at which it entered the queue."""
    last_heard: float = 0.0
    """Monotonic seconds of the last sign of life from its workers, once placed."""
    attempt: int = 1
    failures: int = 0
    prediction: Prediction | None = None
    """What was expected of the current attempt's workers."""
    placed_s: float = 0.0
    """Monotonic seconds: placed, the attempt's first token here, the last one."""
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    prefill: WorkerLink | None = None
    decode: WorkerLink | None = None
    lease: Lease | None = None
    assembler: TokenAssembler = field(default_factory=TokenAssembler)
    edges: list[EdgeStamp] = field(default_factory=list)
    transfer: TransferStats | None = None
    preempted_at: int | None = None
    """Tokens of the answer that its decode worker had when it preempted the current attempt; the first of this attempt
    may still be on its way from the other worker."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for the first token, as their KV was cached."""
    prefill_worker: str = ""
    decode_worker: str = ""
    pace: TokenPace = field(default_factory=TokenPace)
    """How its tokens leave."""
    counted: bool = False
    """Whether its end is in the metrics."""
    failure: str = ""
    """The code of its error, which is on its way to the client behind the last tokens; "" = there is none, or the
    client has it."""
    joint: JointVerdict = field(default_factory=JointVerdict)
    """On its client's request; shared with the other answers to it."""
    generated: bool = False
    """Whether its workers have finished it and hold nothing of it."""
    held: tuple[RoutedRequest, ...] = ()
    """Further answers to the same request, which begin when this one's prompt is cached."""
    ended: bool = False

    @property
    def ref(self) -> RequestRef:
        return RequestRef(self.wire_id, self.attempt)

    @property
    def answered(self) -> int:
        """Tokens of the answer that this attempt starts behind: they go to its workers with the prompt."""
        return self.queued.answered

    @property
    def token_ids(self) -> tuple[int, ...]:
        """These tokens."""
        return self.admitted.prompt_token_ids + self.assembler.first(self.answered)

    def note_silence(self, now: float) -> None:
        """Its workers are given up, at `now` of the monotonic clock: since when nothing was heard of them."""
        silent_s = now - self.last_heard
        if self.prefill is not None and silent_s > SILENCE_S:
            self.edges.append(EdgeStamp(Edge.SILENT, time.time_ns() - int(silent_s * 1e9)))

    def timeline(self) -> Timeline:
        """Its edges until now."""
        return Timeline(tuple(self.edges), self.transfer, self.prefill_worker, self.decode_worker)

    def ending(self, reason: FinishReason, matched_stop: str) -> Ending:
        """How its answer ended, for its client."""
        self.edges.append(EdgeStamp.now(Edge.FINISHED))
        return Ending(
            finish_reason=reason,
            matched_stop=matched_stop,
            prompt_tokens=len(self.admitted.prompt_token_ids),
            completion_tokens=self.answer.token_count,
            cached_tokens=min(self.cached_tokens, len(self.admitted.prompt_token_ids)),
            timeline=self.timeline(),
        )

    def trace(self, model: str, outcome: str) -> RequestTrace:
        """What is remembered of it, ended as `outcome`."""
        if self.edges[-1].edge is not Edge.FINISHED:
            self.edges.append(EdgeStamp.now(Edge.FINISHED))
        admitted = self.admitted
        prompt = len(admitted.prompt_token_ids)
        return RequestTrace(
            request_id=admitted.request_id,
            wire_id=self.wire_id,
            context=admitted.context,
            model=model,
            operation=admitted.operation,
            slo_class=admitted.slo.name,
            outcome=outcome,
            prompt_tokens=prompt,
            completion_tokens=self.pace.tokens,
            cached_tokens=min(self.cached_tokens, prompt),
            timeline=self.timeline(),
        )

    def placement_record(self) -> PlacementRecord | None:
        """What was expected of its placement and what came; None if nothing was, or an attempt before had failed."""
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
        )
