"""The root of the settings tree: the model, the workers and their hardware, and checks across branches."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.logging.logs import MAX_MIB, LogConfig, LogFormat
from tandem.protocol.mode import Mode
from tandem.protocol.speculation_method import SpeculationMethod
from tandem.settings.engine import QUANTIZATIONS, RANKS_MAX, EngineSettings
from tandem.settings.invalid import refuse
from tandem.settings.model import ModelSettings
from tandem.settings.options import option_of
from tandem.settings.parsing import check_port
from tandem.settings.planner import PlannerMode, PlannerSettings
from tandem.settings.router import RouterSettings
from tandem.settings.secrets import Secrets
from tandem.settings.setting import NameOf, Settings, Topic, field_name, setting
from tandem.settings.worker import WorkerSettings

if TYPE_CHECKING:
    from tandem.protocol.messages import Role

WORKERS_MAX = 64
"""The maximum number of workers of each role."""
DEFAULT_NAME = "tandem"
HANG_DEADLINE_S = 30.0
"""Default of `hang_deadline_s`.

If two cores run a whole cluster, a process may wait seconds for a core, and a restart costs a worker its weights and
its requests. The default is far longer than such waits and shorter than client timeouts.
"""


def check_ray_address(name: str, address: str) -> None:
    """Raise InvalidArgument unless the address is empty, `auto` or HOST:PORT."""
    if address and re.fullmatch(r"auto|[^\s/]+:[0-9]+", address) is None:
        refuse(name, f"{address!r} is neither auto nor HOST:PORT of a Ray cluster")


def check_cluster_name(name: str, cluster_name: str) -> None:
    """Raise InvalidArgument unless the cluster's name can be part of a Ray namespace."""
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", cluster_name) is None:
        refuse(name, f"{cluster_name!r} is not made of letters, digits and . _ -")


@dataclass(frozen=True, slots=True)
class ClusterSettings(Settings):
    """The settings of a whole cluster, the root of the tree.

    `tandem up` builds the object from options and hardware, and the controller derives each process's configuration
    from it.
    """

    served: ModelSettings
    prefill: int = setting(
        1, help="Prefill workers; default: 1.", topic=Topic.FIRST, position=1, automatic=None, least=1, most=WORKERS_MAX
    )
    decode: int = setting(
        1, help="Decode workers; default: 1.", topic=Topic.FIRST, position=1, automatic=None, least=1, most=WORKERS_MAX
    )
    workers: int = setting(
        1,
        help="Workers that do both; default: one for each GPU, or for each --tensor-parallel-size of them.",
        topic=Topic.FIRST,
        position=1,
        automatic=None,
        least=1,
        most=WORKERS_MAX,
    )
    prefill_quantization: str | None = setting(
        None,
        help="The same for prefill workers alone; default: --quantization.",
        topic=Topic.ENGINE,
        choices=QUANTIZATIONS,
    )
    decode_quantization: str | None = setting(
        None,
        help="The same for decode workers alone; default: --quantization.",
        topic=Topic.ENGINE,
        choices=QUANTIZATIONS,
    )
    prefill_tensor_parallel_size: int | None = setting(
        None,
        help="GPUs of each prefill worker; default: --tensor-parallel-size.",
        topic=Topic.ENGINE,
        least=1,
        most=RANKS_MAX,
    )
    decode_tensor_parallel_size: int | None = setting(
        None,
        help="GPUs of each decode worker; default: --tensor-parallel-size.",
        topic=Topic.ENGINE,
        least=1,
        most=RANKS_MAX,
    )
    metrics_port: int = setting(
        0,
        help="Port of the whole cluster's metrics and of /sd, which lists all processes; 0 = any.",
        topic=Topic.LISTENERS,
        check=check_port,
    )
    """The controller opens this port on its own address. The router also serves its own metrics on its HTTP port."""
    controller_port: int = setting(
        0,
        help="Port of the controller, for workers and operators; 0 = any free one.",
        topic=Topic.LISTENERS,
        check=check_port,
    )
    secrets: Secrets = field(default_factory=Secrets)
    ray_address: str = setting(
        "",
        help="Join a Ray cluster, HOST:PORT or auto, whose nodes offer `prefill` and `decode`; default: a Ray of its"
        " own on this host.",
        topic=Topic.HOSTS,
        option="address",
        variable="TANDEM_RAY_ADDRESS",
        check=check_ray_address,
    )
    """`auto` is the Ray cluster that this host belongs to.

    Workers run on the nodes that offer their role; with `cuda` each worker takes GPUs of its node, one for each rank.
    Every node must have the model in the same folder. Router and controller stay on this host; workers and controller
    listen on the address of their node.
    """
    places_timeout_s: float = setting(
        0.0,
        help="Seconds to wait for that Ray cluster and for nodes that offer enough.",
        topic=Topic.HOSTS,
        least=0,
    )
    cluster_name: str = setting(
        DEFAULT_NAME,
        help="The name that identifies those workers.",
        topic=Topic.HOSTS,
        position=1,
        check=check_cluster_name,
    )
    """The name distinguishes several Tandem clusters in one Ray cluster."""
    start_timeout_s: float = setting(
        180.0, help="Seconds that all workers may take to load and serve.", topic=Topic.FAILURES, least=0
    )
    stop_grace_s: float = setting(
        0.5,
        help="Seconds that requests in flight may continue when the cluster is stopped.",
        topic=Topic.FAILURES,
        least=0,
    )
    hang_deadline_s: float = setting(
        HANG_DEADLINE_S,
        help="Seconds without a sign of life after which a process is killed and restarted; 0 = never, for debuggers"
        " that stop it.",
        topic=Topic.FAILURES,
        least=0,
    )
    """While a process starts, the deadline is at least 120 s. A single step may take up to `step_deadline_s`."""
    log_format: LogFormat = setting(
        LogFormat.PRETTY, help="pretty, or json: an object a line.", topic=Topic.OBSERVABILITY, choices=LogFormat
    )
    log_max_mib: int = setting(
        MAX_MIB,
        help="Size in MiB at which a log file is rotated; the last four are kept.",
        topic=Topic.OBSERVABILITY,
        least=1,
    )
    """The limit also applies to each log file of a private Ray instance."""
    log_folder: Path | None = None
    """Folder with one log file per process, created on each host that lacks it; None = Ray's own log files."""
    planner: PlannerSettings = field(default_factory=PlannerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    @classmethod
    def of(cls, model: Path, **fields: Any) -> "ClusterSettings":
        """Return the settings for a model: the given fields, and defaults for all others; see `with_fields`."""
        return cls(ModelSettings(model)).with_fields(**fields)

    def __post_init__(self) -> None:
        """Check the whole tree. Raises InvalidArgument, which names the option and its limit."""
        self.check(option_of)

    def check(self, name_of: NameOf = field_name) -> None:
        """Check each setting, then the combinations of settings; see `Settings.check`."""
        Settings.check(self, name_of)
        self._check_ports()
        self._check_roles()
        self._check_draft()
        self._check_tiers()
        self._check_hosts()
        self._check_stages()
        self._check_context_ranks()
        if self.planner.actions is PlannerMode.ON and self.planner.limits.workers is None and not self._disaggregated:
            refuse("--planner", f"has nothing to change in mode {self.router.mode}; give --planner-workers, too")

    def _check_ports(self) -> None:
        taken: dict[int, str] = {}
        for option, port in (
            ("--grpc-port", self.router.grpc_port),
            ("--http-port", self.router.http_port),
            ("--metrics-port", self.metrics_port),
            ("--controller-port", self.controller_port),
            ("--operations-port", self.router.operations_port),
        ):
            if port and port in taken:
                refuse(option, f"{port} is {taken[port]} too; each listener needs a port of its own")
            taken[port] = option

    def _check_roles(self) -> None:
        for name in ("quantization", "tensor_parallel_size"):
            for role in ("prefill", "decode"):
                if getattr(self, f"{role}_{name}") is None:
                    continue
                option = name.replace("_", "-")
                if not self._disaggregated:
                    refuse(f"--{role}-{option}", f"is for --mode {Mode.DISAGGREGATED}; give --{option}")
                if self.planner.actions is PlannerMode.ON:
                    refuse(f"--{role}-{option}", "excludes --planner on: workers change roles, and keep their weights")

    def _check_stages(self) -> None:
        if self.engine.pipeline_parallel_size == 1:
            return
        option = "--prefill-pipeline-size"
        if not self._disaggregated:
            refuse(option, f"is for prefill workers; give --mode {Mode.DISAGGREGATED}")
        if self.planner.actions is PlannerMode.ON:
            refuse(option, "excludes --planner on: workers change roles, and only prefill workers have stages")
        self._refuse_draft_weights(option)
        if self.engine.has_loras:
            refuse("--lora", f"excludes {option}; leave one of them out")

    def _check_context_ranks(self) -> None:
        if self.engine.context_parallel_size == 1:
            return
        option = "--prefill-context-parallel-size"
        if not self._disaggregated:
            refuse(option, f"is for prefill workers; give --mode {Mode.DISAGGREGATED}")
        if self.planner.actions is PlannerMode.ON:
            refuse(option, "excludes --planner on: workers change roles, and only prefill workers divide tokens")
        tensor_ranks = self.prefill_tensor_parallel_size or self.engine.tensor_parallel_size
        if tensor_ranks > 1 or self.engine.pipeline_parallel_size > 1:
            refuse(option, "excludes prefill workers that divide the model; give them tensor and pipeline sizes of 1")
        self._refuse_draft_weights(option)

    def _refuse_draft_weights(self, option: str) -> None:
        """Refuse weights that propose drafts, which exclude `option`."""
        if self.engine.draft is not None:
            refuse("--draft", f"excludes {option}; leave one of them out")
        if self.worker.speculate is SpeculationMethod.MTP:
            refuse("--speculate", f"mtp excludes {option}; choose another method, or leave {option} out")

    def _check_draft(self) -> None:
        method, draft = self.worker.speculate, self.engine.draft
        if method is SpeculationMethod.DRAFT and draft is None:
            refuse("--speculate", "draft needs --draft PATH, the folder of a small model or of heads")
        if method is not SpeculationMethod.DRAFT and draft is not None:
            refuse("--draft", f"is for --speculate draft, not for --speculate {method}")

    def _check_tiers(self) -> None:
        if self.worker.kv_disk_bytes and self.worker.kv_disk_path is None:
            refuse("--kv-disk-gib", "needs --kv-disk-path PATH, a folder on a local disk")
        if self.worker.kv_disk_path is not None and not self.worker.kv_disk_bytes:
            refuse("--kv-disk-path", "needs --kv-disk-gib, the size of the files in it")

    def _check_hosts(self) -> None:
        if self.ray_address and self.engine.device not in {"cpu", "cuda"}:
            refuse("--device", f"{self.engine.device}: where Ray has several nodes it chooses; give cuda")
        if not self.worker.outlive_s:
            if self.cluster_name != DEFAULT_NAME:
                refuse("--cluster-name", "is for workers that outlive it; add --workers-outlive")
            return
        if not self.ray_address:
            refuse("--workers-outlive", "a Ray of its own ends with it; join one with --address")
        if not self.secrets.token:
            refuse(
                "--workers-outlive",
                "the controller that takes the workers over needs their secret; give both the same --token",
            )

    def log_of(self, process: str) -> LogConfig:
        """The log configuration of the process named `process`."""
        file = None if self.log_folder is None else self.log_folder / f"{process}.log"
        return LogConfig(file, self.log_format, self.log_max_mib << 20)

    @property
    def ray_namespace(self) -> str | None:
        """The Ray namespace of workers and controllers; None if workers do not outlive the cluster."""
        return namespace_of(self.cluster_name) if self.worker.outlive_s else None

    @property
    def worker_count(self) -> int:
        """The number of workers of all roles."""
        return self.prefill + self.decode if self._disaggregated else self.workers

    def worker_counts(self) -> "dict[Role, int]":
        """The number of workers of each role in the cluster's mode."""
        from tandem.protocol.messages import Role

        if self._disaggregated:
            return {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        return {Role.BOTH: self.workers}

    def quantization_of(self, role: "Role") -> str | None:
        """The quantization of workers of this role: the role's own setting, or that of all workers."""
        by_role = {"prefill": self.prefill_quantization, "decode": self.decode_quantization}
        return by_role.get(role.value) or self.engine.quantization

    def stages_of(self, role: "Role") -> int:
        """The number of pipeline stages of workers of this role; only prefill workers have several."""
        return self.engine.pipeline_parallel_size if role.value == "prefill" else 1

    def context_ranks_of(self, role: "Role") -> int:
        """The number of ranks that divide the tokens of prompts on workers of this role; only prefill has several."""
        return self.engine.context_parallel_size if role.value == "prefill" else 1

    def step_tokens_of(self, role: "Role") -> int:
        """The maximum number of tokens of a step of workers of this role; each rank that divides tokens has a part."""
        return self.engine.max_step_tokens * self.context_ranks_of(role)

    @property
    def prefill_only_option(self) -> str:
        """The option with which prefill workers cannot decode: several stages, or ranks that divide tokens; or ""."""
        if self.engine.context_parallel_size > 1:
            return "--prefill-context-parallel-size"
        return "--prefill-pipeline-size" if self.engine.pipeline_parallel_size > 1 else ""

    def tensor_ranks_of(self, role: "Role") -> int:
        """The number of ranks of each stage of workers of this role: the role's own setting, or that of all workers."""
        by_role = {"prefill": self.prefill_tensor_parallel_size, "decode": self.decode_tensor_parallel_size}
        return by_role.get(role.value) or self.engine.tensor_parallel_size

    def ranks_of(self, role: "Role") -> int:
        """The number of ranks of workers of this role, in all stages."""
        return self.tensor_ranks_of(role) * self.stages_of(role) * self.context_ranks_of(role)

    @property
    def _disaggregated(self) -> bool:
        return self.router.mode is Mode.DISAGGREGATED


def namespace_of(cluster_name: str) -> str:
    """Return the Ray namespace of the workers and controllers of the cluster named `cluster_name`."""
    return f"tandem-{cluster_name}"
