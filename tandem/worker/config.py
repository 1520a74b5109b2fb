"""The configuration with which one worker process starts."""

from dataclasses import dataclass

from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Assignment, Role
from tandem.settings.worker import WorkerSettings

CPU_STEP_DEADLINE_S, GPU_STEP_DEADLINE_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class WorkerConfig(WorkerSettings):
    """A worker's settings, and the values that its controller adds: engine, role, identity and secrets."""

    worker_id: str
    """The worker's name in the cluster; it outlives the process."""
    role: Role
    """The initial role: the phases that accept requests at the start."""
    engine: EngineConfig
    """The settings of the engine: its model, its device and its limits."""
    model_name: str = ""
    """The model name that clients use; empty = the name of the model folder."""
    controller_address: str | None = None
    """host:port of the controller; None = the worker serves without a cluster."""
    token: str = ""
    """The cluster's secret; empty = no authentication and no encryption.

    Components authenticate each other by mutual TLS, with a certificate authority derived from the secret.
    """
    host: str = "127.0.0.1"
    """The address on which the gRPC server listens."""
    port: int = 0
    """The port of the gRPC server; 0 = any free port, which is reported to the controller."""
    metrics_port: int = 0
    """The port of the metrics' HTTP server; 0 = any free port."""
    metrics_key: str = ""
    """A key for the metrics, in addition to the one derived from `token`; empty = none is required on loopback."""
    batch_wait_s: float = 0.0
    """Seconds that an idle worker waits after a first prompt for further prompts that can share its step."""
    outlive_s: float = 0.0
    """Seconds without contact to a controller after which the worker ends; 0 = the worker does not end by itself."""

    @property
    def step_deadline(self) -> float:
        """The effective `step_deadline_s` on this device, in seconds."""
        default = CPU_STEP_DEADLINE_S if self.engine.device == "cpu" else GPU_STEP_DEADLINE_S
        return default if self.step_deadline_s is None else self.step_deadline_s

    @property
    def assignment(self) -> Assignment:
        """The initial assignment; the controller may change it while the worker runs (`assignment.py`)."""
        return Assignment(self.role, self.step_policy, self.step_budget, self.itl_target_s)
