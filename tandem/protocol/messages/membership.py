"""The members of the cluster: its workers, their model and its adapters."""

from dataclasses import dataclass

from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages.assignment import Assignment, Role
from tandem.protocol.messages.references import PeerRef


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """A loaded adapter: its name for clients, the hash of its files, and its folder, which is for display only."""

    name: str
    identity: str
    path: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about the loaded model; `max_context` is the maximum length of prompt and answer in tokens.

    `kv_windows` has the window of each group of layers that share KV pages (`KvPages.windows`). `kv_step_tokens` is the
    maximum number of prompt tokens of a step under any assignment. Both determine how many pages are reserved for a
    request (`tandem/protocol/kv_pages.py`).
    """

    name: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    summary: tuple[str, ...] = ()
    """Parameters, KV cache, attention and experts, one line each; for display only."""
    kv_windows: tuple[int | None, ...] = (None,)
    adapters: tuple[AdapterFacts, ...] = ()
    """The adapters that requests may name as their model."""
    kv_step_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The registration of a serving worker.

    `role` includes the schedulers that accept work and those that only finish their requests; `max_step_tokens` is the
    maximum number of prompt tokens of a step under the worker's assignment.
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
    """The reason why the worker accepts no new requests at present; empty if it accepts them."""
    warnings: tuple[str, ...] = ()
    """Warnings about the worker's configuration."""
    assignment: Assignment | None = None
    """The worker's latest assignment; None = unknown."""
    closing: Role | None = None
    """The part of `role` whose schedulers accept no new work and only finish their requests; None = no part."""
    started_unix_nanos: int = 0
    """Start time of the worker's process by the clock of its host; for display only, 0 = unknown."""
    kv_ports: tuple[str, ...] = ()
    """The host:port of each TCP socket of the worker's KV transport.

    Every process that can connect to such a socket can write to the worker's memory.
    """
    kv_tiers: tuple[str, ...] = ()
    """The tiers of the prefix cache with their sizes as text, such as `host 64 GiB`, the fastest first."""
    kv_tier_pages: int = 0
    """Number of KV pages for which the tiers have room."""

    @property
    def kv_pages(self) -> KvPages:
        """The page geometry of the worker's requests."""
        return KvPages(self.page_tokens, self.model.kv_windows, self.model.kv_step_tokens)

    @property
    def open(self) -> Role | None:
        """The role that includes the schedulers that accept new work; None = the worker drains."""
        return self.role if self.closing is None else self.role.without(self.closing)

    @property
    def assigned_role(self) -> Role:
        """The role of the worker's latest assignment, or `role` if the assignment is unknown.

        `role` may also include schedulers that the assignment closes and that still finish their requests.
        """
        return self.role if self.assignment is None else self.assignment.role

    @property
    def takes_prompts(self) -> bool:
        """True if the worker accepts new prefill work."""
        return self.open is not None and self.open.prefills

    @property
    def takes_answers(self) -> bool:
        """True if the worker accepts new decode work."""
        return self.open is not None and self.open.decodes


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker that should serve but does not; `coming` is True if it will serve without an operator's action."""

    worker_id: str
    reason: str
    coming: bool


@dataclass(frozen=True, slots=True)
class ExpectedWorker:
    """A worker that does not serve now but will without an operator's action.

    `role` is the role with which it starts.
    """

    worker_id: str
    role: Role


@dataclass(frozen=True, slots=True)
class Membership:
    """All serving workers of the cluster; `revision` increases with each change.

    `mode` is the cluster's placement mode, "" = the mode in the router's own settings.
    """

    revision: int
    workers: tuple[WorkerInfo, ...]
    mode: str = ""
    adapters: tuple[AdapterFacts, ...] | None = None
    """The adapters, if they can change while the cluster serves; None = those with which the workers were started."""
    expected: tuple[ExpectedWorker, ...] = ()
    """The workers that do not serve now but will without an operator's action."""
