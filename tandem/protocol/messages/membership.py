"""The cluster's membership: workers and their model."""

from dataclasses import dataclass

from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages.assignment import Assignment, Role
from tandem.protocol.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """A loaded adapter: the name that clients use, the hash of its files, and its folder, for display only."""

    name: str
    identity: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the loaded model; `max_context` is the limit of prompt and answer, in tokens.

    `kv_windows` has the window of each group of layers that share KV pages, `kv_step_tokens` the most prompt tokens of
    a step that the engine runs, whatever the assignment: by both a request's pages are forecast
    (`tandem/protocol/kv_pages.py`).
    """

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    summary: tuple[str, ...] = ()
    """Parameters, KV cache, attention and experts, a line each, for display only."""
    kv_windows: tuple[int | None, ...] = (None,)
    adapters: tuple[AdapterFacts, ...] = ()
    """The adapters that requests may name."""
    kv_step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A serving worker as it registers with the controller.

    `role` has the halves that are open or still finish their requests; `max_step_tokens` is the most prompt tokens of a
    step under its assignment.
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
    """The reason why it accepts no new requests for now; empty = it is ready."""
    warnings: tuple[str, ...] = ()
    """Warnings about its configuration."""
    assignment: Assignment | None = None
    """Its latest assignment; None = unknown."""
    closing: Role | None = None
    """The halves in `role` that accept nothing new and finish their requests."""
    started_unix_nanos: int = 0
    """Start time of its process by its host's clock, for display only; 0 = unknown."""
    kv_ports: tuple[str, ...] = ()
    """The host:port of each TCP socket of its KV transport. Every process that reaches one can write to its memory."""

    @property
    def kv_pages(self) -> KvPages:
        """The KV pages of its requests."""
        return KvPages(self.page_tokens, self.model.kv_windows, self.model.kv_step_tokens)

    @property
    def open(self) -> Role | None:
        """The halves that take new work; None = it drains."""
        return self.role if self.closing is None else self.role.without(self.closing)

    @property
    def assigned_role(self) -> Role:
        """The role of its latest assignment, even if other halves still finish requests."""
        return self.role if self.assignment is None else self.assignment.role

    @property
    def takes_prompts(self) -> bool:
        """True if it takes new prefill work."""
        return self.open is not None and self.open.prefills

    @property
    def takes_answers(self) -> bool:
        """True if it takes new decode work."""
        return self.open is not None and self.open.decodes


@dataclass(frozen=True, slots=True)
class Absence:
    """A requested worker that does not serve; `coming` is true if it will serve without intervention."""

    worker_id: str
    reason: str
    coming: bool


@dataclass(frozen=True, slots=True)
class ExpectedWorker:
    """A worker that does not serve now and will without intervention, with the role with which it starts."""

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Membership:
    """All serving workers; `revision` grows with each change, `mode` "" = the mode of the router's own settings."""

    revision: int
    workers: tuple[WorkerInfo, ...]
    mode: str = ""
    adapters: tuple[AdapterFacts, ...] | None = None
    """The adapters of the cluster where they change while it serves; None = those that its workers started with."""
    expected: tuple[ExpectedWorker, ...] = ()
    """The workers that do not serve now and will without intervention."""
