"""The configuration with which one worker process starts."""

from dataclasses import dataclass, field

from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Assignment, Role
from tandem.settings.secrets import Secrets
from tandem.settings.worker import WorkerSettings

CPU_STEP_DEADLINE_S, GPU_STEP_DEADLINE_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class WorkerConfig(WorkerSettings):
    """A worker's settings, its engine's and secrets, and the worker's role, identity and addresses."""

    worker_id: str
    """The worker's name in the cluster; it outlives the process."""
    role: Role
    """The initial role: the phases that accept requests at the start."""
    engine: EngineConfig
    """The settings of the engine: its model, its device and its limits."""
    controller_address: str | None = None
    """host:port of the controller; None = the worker serves without a cluster."""
    secrets: Secrets = field(default_factory=Secrets)
    """The cluster's secrets; without a token, there is no authentication and no encryption."""
    host: str = "127.0.0.1"
    """The address on which the gRPC server listens."""
    port: int = 0
    """The port of the gRPC server; 0 = any free port, which is reported to the controller."""
    reports_tokens: bool = False
    """True if routers publish KV events, which have the tokens of cached pages."""
    batch_wait_s: float = 0.0
    """Seconds that an idle worker waits after a first prompt for further prompts that can share its step."""

    @property
    def step_deadline(self) -> float:
        """The effective `step_deadline_s` on this device, in seconds."""
        default = CPU_STEP_DEADLINE_S if self.engine.on_cpu else GPU_STEP_DEADLINE_S
        return default if self.step_deadline_s is None else self.step_deadline_s

    @property
    def assignment(self) -> Assignment:
        """The initial assignment; the controller may change it while the worker runs (`assignment.py`)."""
        return Assignment(self.role, self.step_policy, self.step_budget, self.itl_target_s)
