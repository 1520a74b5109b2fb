"""What a simulated worker is: the settings of a real one, and what its device takes for a step."""

from dataclasses import dataclass

from costs.step_cost import CostParameters
from wire.messages import ModelFacts, PeerRef, WorkerInfo
from worker.assignment import decode_batch, prompt_step_tokens
from worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class Device:
    """`truth` is what steps take, `told` what workers say and everybody predicts with."""

    truth: CostParameters
    told: CostParameters
    pages: int
    page_tokens: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker."""

    config: WorkerConfig
    device: Device
    model: ModelFacts

    @property
    def peer(self) -> PeerRef:
        return PeerRef(self.config.worker_id, 1)

    @property
    def info(self) -> WorkerInfo:
        """As it would register."""
        config, device = self.config, self.device
        return WorkerInfo(
            peer=self.peer,
            role=config.role,
            address="",
            model=self.model,
            pages_total=device.pages,
            page_tokens=device.page_tokens,
            max_batch_requests=decode_batch(config.role, config.engine),
            max_step_tokens=prompt_step_tokens(config.assignment, config.engine),
            device="virtual",
            transport="virtual",
            assignment=config.assignment,
        )
