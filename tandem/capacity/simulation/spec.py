"""The specification of a simulated worker: the settings of a real worker, and the step cost of a device."""

from dataclasses import dataclass, replace

from tandem.capacity.simulation.drafts import Drafts
from tandem.cost_model.step_cost import CostParameters
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import ModelFacts, PeerRef, WorkerInfo
from tandem.protocol.prefixes import KvTier
from tandem.worker.assignment import decode_batch, prompt_step_tokens
from tandem.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Device:
    """A simulated device: steps take `actual_cost`; workers report `reported_cost`, with which routers predict."""

    actual_cost: CostParameters
    reported_cost: CostParameters
    pages: int
    page_tokens: int
    page_bytes: int
    links: float = 1.0
    """Number of network links over which a worker sends or receives parts of its pages at the same time."""


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier of the prefix cache: its room in bytes, and the bytes per second at which pages are loaded and saved."""

    tier: KvTier
    capacity_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The specification of one worker."""

    config: WorkerConfig
    device: Device
    model: ModelFacts
    drafts: Drafts | None = None
    """The worker's draft tokens; None = no speculative decoding."""
    tiers: tuple[TierSpec, ...] = ()
    """The tiers of the worker's prefix cache, the fastest first."""

    @property
    def peer(self) -> PeerRef:
        """The reference to the worker's first incarnation."""
        return PeerRef(self.config.worker_id, 1)

    @property
    def kv(self) -> KvPages:
        """The page geometry of the worker's requests."""
        return self.info.kv_pages

    @property
    def info(self) -> WorkerInfo:
        """The registration that the worker sends when it starts."""
        config, device = self.config, self.device
        return WorkerInfo(
            peer=self.peer,
            role=config.role,
            address="",
            model=replace(self.model, kv_step_tokens=config.engine.max_step_tokens),
            pages_total=device.pages,
            page_tokens=device.page_tokens,
            max_batch_requests=decode_batch(config.role, config.engine),
            max_step_tokens=prompt_step_tokens(config.assignment, config.engine),
            device="virtual",
            transport="virtual",
            assignment=config.assignment,
            kv_tier_pages=sum(tier.capacity_bytes // device.page_bytes for tier in self.tiers),
        )
