"""Settings of one worker process."""

from dataclasses import dataclass

from decode_worker.config import DecodeConfig
from prefill_worker.config import PrefillConfig
from tandem.cost_model.roofline import Ceilings
from tandem.engine.config import EngineConfig
from tandem.protocol.messages import Assignment, Role
from tandem.protocol.policy_name import PolicyName
from tandem.protocol.speculation_method import SpeculationMethod

CPU_STEP_DEADLINE_S, GPU_STEP_DEADLINE_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of one worker: its model, its first assignment, and its peers."""

    worker_id: str
    """Its name in the cluster; outlives the process."""
    role: Role
    """The halves that take work at first."""
    engine: EngineConfig
    """The engine's model and sizes."""
    model_name: str = ""
    """The name clients use; empty = the model folder's."""
    controller_address: str | None = None
    """host:port of the controller; None = the worker serves without a cluster."""
    token: str = ""
    """The cluster's secret, which parts prove to each other by mutual TLS; empty = none, and nothing is encrypted."""
    host: str = "127.0.0.1"
    """Address the gRPC server listens on."""
    port: int = 0
    """Port of the gRPC server; 0 = any free one, published to the controller."""
    metrics_port: int = 0
    """Port of the metrics' HTTP server; 0 = any free one."""
    metrics_key: str = ""
    """The key that opens them beside the one that comes from `token`; empty = on loopback nobody is asked."""
    lease_s: float = 5.0
    """Life of a lease without a heartbeat from its router, in seconds."""
    quarantine_s: float = 5.0
    """Seconds from the death of a local prefill worker until the pages it might have written are free.

    They count from the end of its permission to write.
    """
    quarantine_far_s: float = 60.0
    """The same where it was on another host, or nobody knows: what it sent may be on the way for long."""
    write_window_s: float = 10.0
    """For how long a prefill worker may write to the pages it was given before it has to ask again, in seconds."""
    transfer_deadline_s: float = 30.0
    """Seconds after which a posted KV write that has not completed counts as failed."""
    quarantine_share_max: float = 0.5
    """Part of a half's pages that may be lost to transfers, 0 to 1.

    Above it the worker says that it is not ready and takes nothing new, until silent prefill workers have given back
    enough of those that its decode half keeps in quarantine, or decode workers have taken enough of those that its
    prefill half still writes.
    """
    kv_checksum_rate: float = 0.05
    """Part of each transfer's pages whose checksums are compared, 0 to 1, at least one page of each prompt; 0 = none.

    The same for all workers of a cluster: the handshake refuses others.
    """
    prefix_cache: bool = True
    """True to keep full KV pages while pages are free, for requests that begin alike."""
    speculate: SpeculationMethod = SpeculationMethod.AUTO
    """How drafts for speculative decoding are proposed."""
    transfer_backend: str = "nixl"
    """The transport of KV pages: `nixl`."""
    trusted_network: bool = False
    """True if only this cluster's workers can reach UCX's listener, so that KV pages may cross a network.

    The same for all workers of a cluster: the handshake refuses others.
    """
    rpc_timeout_s: float = 5.0
    """Deadline of each call to another worker or the controller, in seconds."""
    attach_grace_s: float = 5.0
    """The seconds that requests of a router without an event stream may live."""
    step_deadline_s: float | None = None
    """The seconds of a step after which its engine counts as stuck; None = 60 on GPUs, 600 on CPUs.

    Its requests fail then, and the process has to end. On CPUs a step of many tokens is slow.
    """
    gather_s: float = 0.0
    """The seconds that an idle worker waits after a first prompt for others that can share its step."""
    step_policy: PolicyName = PolicyName.DECODE_PRIORITY
    """Prompt tokens of a step beside requests that decode; see `ClusterConfig.step_policy`."""
    step_budget: int | None = None
    """Most tokens of a step, decode rows included, where the policy has a budget; None = 512."""
    itl_target_s: float | None = None
    """The longest time between two tokens of any request, in seconds; None = only the requests' targets count.

    Where decoding alone is slower the batch does not grow, and prompts are computed in the rest of this time.
    """
    ceilings: Ceilings | None = None
    """The ceilings of its device, for utilization; None = they are measured at the start."""
    outlive_s: float = 0.0
    """The seconds without a controller after which the worker ends by itself."""
    max_prefill_requests: int = 1024
    """Most prompts the prefill half knows at a time."""

    @property
    def step_deadline(self) -> float:
        """Return `step_deadline_s` on this device."""
        default = CPU_STEP_DEADLINE_S if self.engine.device == "cpu" else GPU_STEP_DEADLINE_S
        return default if self.step_deadline_s is None else self.step_deadline_s

    @property
    def assignment(self) -> Assignment:
        """Return the first assignment; the controller may change it while the worker runs (`assignment.py`)."""
        return Assignment(self.role, self.step_policy, self.step_budget, self.itl_target_s)

    @property
    def prefill(self) -> PrefillConfig:
        """The prefill half's part."""
        return PrefillConfig(self.max_prefill_requests, quarantine_share_max=self.quarantine_share_max)

    @property
    def decode(self) -> DecodeConfig:
        """The decode half's part."""
        return DecodeConfig(
            lease_s=self.lease_s,
            quarantine_s=self.quarantine_s,
            quarantine_far_s=self.quarantine_far_s,
            write_window_s=self.write_window_s,
            check_deadline_s=self.transfer_deadline_s,
            quarantine_share_max=self.quarantine_share_max,
        )
