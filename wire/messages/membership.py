"""Who serves, and with what model."""

from dataclasses import dataclass

from wire.messages.assignment import Assignment, Role
from wire.messages.references import PeerRef


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
    assignment: Assignment | None = None
    """What it was told to do last; None = nobody knows."""
    closing: Role | None = None
    """The halves among `role` that take nothing new and finish what they have."""
    started_unix_nanos: int = 0
    """When its process started by its host's clock, for people; 0 = unknown."""
    kv_ports: tuple[str, ...] = ()
    """host:port of each TCP socket at which its KV transport listens: whoever reaches it can write into its memory."""

    @property
    def open(self) -> Role | None:
        """The halves that take new work; None = neither does, it drains."""
        return self.role if self.closing is None else self.role.without(self.closing)

    @property
    def told(self) -> Role:
        """What it was told to do last, whatever it still finishes."""
        return self.role if self.assignment is None else self.assignment.role

    @property
    def takes_prompts(self) -> bool:
        return self.open is not None and self.open.prefills

    @property
    def takes_answers(self) -> bool:
        return self.open is not None and self.open.decodes


@dataclass(frozen=True, slots=True)
class Absence:
    """A worker that was asked for and does not serve, why, in words, and whether it will without anybody's doing."""

    worker_id: str
    reason: str
    coming: bool


@dataclass(frozen=True, slots=True)
class Membership:
    """All serving workers; `revision` grows with each change, `mode` is the routers', "" = as they were started."""

    revision: int
    workers: tuple[WorkerInfo, ...]
    mode: str = ""
