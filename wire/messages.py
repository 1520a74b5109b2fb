"""What rooms say to each other: frozen dataclasses, one for each message of `proto/` that leaves a servicer.

The schemas in `proto/tandem/v1/` carry the meaning of every field; here stand the types.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import chain

import numpy as np

from wire.cost_parameters import UNMEASURED, CostParameters
from wire.errors import InvalidArgument
from wire.policy_name import PolicyName
from wire.prefixes import PrefixChanges
from wire.timeline import EdgeStamp, TransferStats


class Role(StrEnum):
    """Which halves of a worker take work."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"

    @property
    def prefills(self) -> bool:
        return self is not Role.DECODE

    @property
    def decodes(self) -> bool:
        return self is not Role.PREFILL

    def __or__(self, other: "Role") -> "Role":
        """The halves of both."""
        return self if self is other else Role.BOTH

    def without(self, other: "Role") -> "Role | None":
        """Its halves but those of `other`; None = none is left."""
        if other is Role.BOTH or self is other:
            return None
        if self is Role.BOTH:
            return Role.DECODE if other is Role.PREFILL else Role.PREFILL
        return self


@dataclass(frozen=True, slots=True)
class Duty:
    """What a worker does until it is told otherwise: which halves take work, and what its steps are made of.

    `step_budget` in tokens, None = 512; `itl_target_s` in seconds, None = no limit.
    """

    role: Role
    step_policy: PolicyName = PolicyName.UNCHUNKED
    step_budget: int | None = None
    itl_target_s: float | None = None

    def __post_init__(self) -> None:
        """InvalidArgument names the field and its limit."""
        if self.step_budget is not None and self.step_budget < 1:
            raise InvalidArgument("step_budget", f"{self.step_budget} is less than 1")
        if self.itl_target_s is not None and not self.itl_target_s > 0:
            raise InvalidArgument("itl_target_s", f"{self.itl_target_s:g} is not above 0")

    @property
    def steps(self) -> str:
        """How its steps are made, in words."""
        limits = [] if self.step_budget is None else [f"{self.step_budget}"]
        limits += [] if self.itl_target_s is None else [f"{1e3 * self.itl_target_s:g} ms"]
        return " ".join([self.step_policy, *limits])


class FinishReason(IntEnum):
    """Why a generation ended, numbered as in `tandem.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2
    ABORT = 3
    ERROR = 4


LOGPROBS_MAX = 20
"""Most tokens that can be reported beside each chosen one."""
FREQUENCY_MAX = PRESENCE_MAX = 2.0
"""Largest absolute value of these penalties."""
REPETITION_MIN, REPETITION_MAX = 1e-6, 100.0
"""Limits of that penalty, within which no logit overflows."""
CACHE_SALT_MAX = 512
"""Most characters of a cache salt on its way to workers."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; already validated. `temperature` 0 is greedy, `top_k` 0 keeps all.

    `logprobs` is how many tokens are reported beside each chosen one, None = no log probabilities at all.
    """

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None

    @property
    def runs_to_limit(self) -> bool:
        """Whether no token ends the answer before `max_tokens`; a stop string still may."""
        return self.ignore_eos and not self.stop_token_ids

    @property
    def penalized(self) -> bool:
        """Whether earlier tokens change the choice."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of probabilities where one token was chosen: its own, and the `top` most likely ones."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ErrorDetail:
    """A failure on the wire: the code of a `TandemError`, its sentence and its retry hint in seconds."""

    code: str
    message: str
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRef:
    """One try at one request: attempts count from 1."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A decode worker's promise to one attempt; `epoch` grows with each lease it grants and fences what is late."""

    request_id: str
    attempt: int
    epoch: int


@dataclass(frozen=True, slots=True)
class GrantedLease:
    """A lease, how many seconds it lives without a heartbeat, and how many of the prompt's first tokens need not be
    sent.
    """

    lease: Lease
    duration_s: float
    held_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PeerRef:
    """One run of one worker process."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class _Continued:
    """An attempt may go on behind the answer's first tokens, which an earlier one has generated: then the last
    `answered` of `prompt_token_ids` are these.
    """

    router_id: str
    ref: RequestRef
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    answered: int = field(default=0, kw_only=True)
    cache_salt: str = field(default="", kw_only=True)

    @property
    def question_tokens(self) -> int:
        """How long the client's own prompt is."""
        return len(self.prompt_token_ids) - self.answered

    @property
    def question(self) -> tuple[int, ...]:
        """The client's own prompt."""
        return self.prompt_token_ids[: self.question_tokens]

    @property
    def answer(self) -> tuple[int, ...]:
        """What earlier attempts have generated."""
        return self.prompt_token_ids[self.question_tokens :]


@dataclass(frozen=True, slots=True)
class Reservation(_Continued):
    """Router to decode: promise pages for this prompt and its answer; `prefill` alone may write them. Its service class
    bears gaps of `gap_target_s` seconds between tokens there, infinite = any.
    """

    prefill: PeerRef
    gap_target_s: float = field(default=math.inf, kw_only=True)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a prefilled request goes: a decode worker, its gRPC address and its lease."""

    peer: PeerRef
    address: str
    lease: Lease


@dataclass(frozen=True, slots=True)
class PrefillTask(_Continued):
    """Router to prefill: build this prompt's KV and sample the next token. No destination: the next is the last."""

    destination: Destination | None


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """What happened to one request in a step; `token_ids[0]` is token number `first_index` of the answer.

    `logprobs` has one entry for each token if its sampling asks for them, else none.
    """

    ref: RequestRef
    first_index: int = 0
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: ErrorDetail | None = None
    edges: tuple[EdgeStamp, ...] = ()
    transfer: TransferStats | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    preempted: bool = False
    """The attempt ends here, `first_index` tokens of the answer are there: to be computed again behind these."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """One more token for each of many requests of a router, of which there is nothing else to tell: columns of equal
    length, so that a step's usual news is one message, however many requests it is of.
    """

    request_ids: Sequence[str]
    attempts: Sequence[int]
    indices: Sequence[int]
    """Each token's number in its answer, from 0."""
    token_ids: Sequence[int]

    def __len__(self) -> int:
        """Requests."""
        return len(self.token_ids)

    def events(self) -> Iterator[RequestEvent]:
        """The same, request by request."""
        columns = zip(self.request_ids, self.attempts, self.indices, self.token_ids, strict=True)
        for request_id, attempt, index, token_id in columns:
            yield RequestEvent(RequestRef(request_id, attempt), index, (token_id,))


@dataclass(frozen=True, slots=True)
class RoutedEvent:
    """An event on its way out of a worker, and the router it is for."""

    router_id: str
    event: RequestEvent


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """The same of tokens."""

    router_id: str
    tokens: StepTokens


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load after a step; tokens and pages are counts."""

    prefill_requests: int
    prefill_tokens: int
    decode_requests: int
    pages_used: int
    pages_total: int
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    decode_context_tokens: int = 0
    cost: CostParameters = UNMEASURED
    preemptions: int = 0
    """Requests that had to give their pages to older ones, since the worker started."""


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What one step, or several, brought for one router: `events`, and behind them `tokens`."""

    step: int
    events: tuple[RequestEvent, ...]
    load: WorkerLoad
    prefixes: tuple[PrefixChanges, ...] = ()
    tokens: tuple[StepTokens, ...] = ()

    def each(self) -> Iterator[RequestEvent]:
        """Everything, request by request."""
        return chain(self.events, *(some.events() for some in self.tokens))


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What routers need to know of the loaded model; `max_context` counts prompt and answer, in tokens."""

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker that serves, as it registers with the controller. `role`: the halves that are open or still finish what
    they have.
    """

    peer: PeerRef
    role: Role
    address: str
    model: ModelFacts
    pages_total: int
    page_tokens: int
    max_batch_requests: int
    max_step_tokens: int
    device: str
    transport: str
    not_ready: str = ""
    """Why it takes nothing new for now; empty = it is ready."""
    warnings: tuple[str, ...] = ()
    """What works but should not stay as it is."""
    duty: Duty | None = None
    """What it was told to do last; None = nobody knows."""
    closing: Role | None = None
    """The halves among `role` that take nothing new and finish what they have."""

    @property
    def open(self) -> Role | None:
        """The halves that take new work; None = neither does, it drains."""
        return self.role if self.closing is None else self.role.without(self.closing)

    @property
    def takes_prompts(self) -> bool:
        return self.open is not None and self.open.prefills

    @property
    def takes_answers(self) -> bool:
        return self.open is not None and self.open.decodes


@dataclass(frozen=True, slots=True)
class Membership:
    """All serving workers; `revision` grows with each change, `mode` is the routers', "" = as they were started."""

    revision: int
    workers: tuple[WorkerInfo, ...]
    mode: str = ""


@dataclass(frozen=True, slots=True)
class PeerDescription:
    """How to reach a worker's KV memory: back-end metadata, base address (bytes), page size (bytes) and count.

    `host` names the running host, `process` the owner's process to those who can see it; empty = unknown.
    """

    peer: PeerRef
    agent_metadata: bytes
    base_address: int
    page_bytes: int
    pages: int
    device_id: int
    memory: str
    host: str = ""
    process: str = ""


@dataclass(frozen=True, slots=True)
class Handshake:
    """One side's introduction; version and hash are compared before the rest is looked at."""

    protocol_version: int
    compatibility_hash: str
    compatibility_facts: tuple[tuple[str, str], ...]
    description: PeerDescription


@dataclass(frozen=True, slots=True)
class PageChecksum:
    """What the prompt's page number `page` held when it was written; `value` is below 2^64."""

    page: int
    value: int


@dataclass(frozen=True, slots=True)
class TransferNotice:
    """Goes with the last write: what arrived, stamped, and how to go on (the token that was drawn, next random draw).

    The first `skipped` of the `pages` were not sent; what they hold is the receiver's own to know.

    `token_hash` is of all tokens that were prefilled, the prompt and the `answered` tokens behind it; `first_token_id`
    is the answer's token number `answered`, the first of this attempt.
    """

    lease: Lease
    prefill: PeerRef
    token_hash: bytes
    pages: int
    first_token_id: int
    next_draw: int
    checksums: tuple[PageChecksum, ...] = ()
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInspection:
    """Page counts by state, open work, and what `check_integrity()` found ("" = sound)."""

    peer: PeerRef
    pages_total: int
    pages_free: int
    pages_owned: int
    pages_shared: int
    pages_advertised: int
    pages_quarantined: int
    pages_promised: int
    requests: int
    leases: int
    integrity_error: str
    fenced: int
    checksums_equal: int = 0
    checksum_failures: int = 0
    pages_cached: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    step_cost_error: float = 0.0


def hash_token_ids(token_ids: Sequence[int]) -> bytes:
    """SHA-256 over token ids as little-endian unsigned 32-bit integers; 32 bytes."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<u4").tobytes()).digest()
