"""What one worker process starts with."""

from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Assignment, Role
from tandem.settings.worker import WorkerSettings

CPU_STEP_DEADLINE_S, GPU_STEP_DEADLINE_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class WorkerConfig(WorkerSettings):
    """A worker's settings, and what its controller adds: its engine, its role, its identity and its secrets."""

    worker_id: str
    """Its name in the cluster; outlives the process."""
    role: Role
    """The schedulers that take work at first."""
    engine: EngineConfig
    """The engine's model and sizes."""
    model_name: str = ""
    """The name clients use; empty = the model folder's."""
    controller_address: str | None = None
    """host:port of the controller; None = the worker serves without a cluster."""
    token: str = ""
    """The cluster's secret, which components prove by mutual TLS; empty = no authentication and no encryption."""
    host: str = "127.0.0.1"
    """Address the gRPC server listens on."""
    port: int = 0
    """Port of the gRPC server; 0 = any free one, published to the controller."""
    metrics_port: int = 0
    """Port of the metrics' HTTP server; 0 = any free one."""
    metrics_key: str = ""
    """The key of its metrics, beside the one derived from `token`; empty = on loopback none is required."""
    gather_s: float = 0.0
    """The seconds that an idle worker waits after a first prompt for others that can share its step."""
    outlive_s: float = 0.0
    """The seconds without a controller after which the worker ends."""

    @property
    def step_deadline(self) -> float:
        """The effective `step_deadline_s` on this device."""
        default = CPU_STEP_DEADLINE_S if self.engine.device == "cpu" else GPU_STEP_DEADLINE_S
        return default if self.step_deadline_s is None else self.step_deadline_s

    @property
    def assignment(self) -> Assignment:
        """The first assignment; the controller may change it while the worker runs (`assignment.py`)."""
        return Assignment(self.role, self.step_policy, self.step_budget, self.itl_target_s)
