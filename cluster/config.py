"""Settings of one cluster."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from cluster.joining import DEFAULT_NAME, check_cluster_name, check_ray_address, namespace_of
from cluster.limits import check_kv_cache_gib, check_ports
from cluster.liveness import HANG_DEADLINE_S
from cluster.planner_config import PlannerConfig, PlannerMode
from costs.roofline import Ceilings
from router.observability.otlp import check_endpoint
from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass, classes_by_name
from wire.errors import InvalidArgument
from wire.limits.listener_limits import DEFAULT_LIMITS, ListenerLimits
from wire.logging.logs import MAX_MIB, LogConfig, LogFormat
from wire.mode import Mode
from wire.policy_name import PolicyName
from wire.security.credentials import check_key

GIB = 1 << 30
WORKERS_MAX = 64
"""Of each role."""
CPU_KV_CACHE_BYTES = GIB
GPU_MEMORY_FRACTION = 0.9
"""Part of a GPU's memory that all of its workers take together."""
CPU_BATCH_REQUESTS, GPU_BATCH_REQUESTS = 64, 256
_MOST_FRONTS = 64
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What to serve, with how many workers, and where clients find it."""

    model: Path
    """Folder in Hugging Face layout, already checked."""
    model_name: str = ""
    """The name clients use; empty = the folder's name."""
    mode: str = Mode.DISAGGREGATED
    """`disaggregated`: `prefill` and `decode` workers; `colocated`: `workers` that do both."""
    prefill: int = 1
    """Prefill workers of a disaggregated cluster, >= 1."""
    decode: int = 1
    """Decode workers of a disaggregated cluster, >= 1."""
    workers: int = 1
    """Workers of a colocated or adaptive cluster, >= 1."""
    step_policy: str = PolicyName.DECODE_PRIORITY
    """Prompt tokens of a step beside requests that decode: `unchunked`, as many as fit; `chunked`, `step_budget` less
    the decode rows; `decode-priority`, the same for the sake of answers without a target. Whatever the policy, no step
    is longer than the targets of its answers allow."""
    step_budget: int | None = None
    """Most tokens of such a step, decode rows included; None = 512."""
    itl_target_s: float | None = None
    """Longest time between two tokens of any answer, in seconds, above 0: batches grow no further, and prompts take
    what decoding leaves of it. None = only the service classes of the answers say."""
    random_weights: bool = False
    """Whether workers draw their weights at random, for performance runs: `model` then needs none."""
    device: str = "cpu"
    """`cpu`, `cuda`: then workers spread over the GPUs that are there, or `cuda:N`: then they share that one."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`, of weights and KV."""
    page_tokens: int | None = None
    """Tokens a KV page holds; None = 16 on CPU, 128 on GPUs."""
    kv_cache_bytes: int | None = None
    """KV page pool of each worker, in bytes; None = 1 GiB on CPU, on GPUs what is left of `memory_fraction`."""
    memory_fraction: float | None = None
    """Part of its GPU's memory each worker may use, weights included, 0 to 1; None = 0.9, shared equally by the
    workers of a GPU."""
    max_step_tokens: int = 2048
    """Most tokens a worker computes in one step: the chunk size of prefill."""
    max_batch_requests: int | None = None
    """Most requests of one decode step; None = 64 on CPU, 256 on GPUs."""
    ceilings: Ceilings | None = None
    """What each worker's device can do at best, which utilization is told by; None = it is measured at each start."""
    threads: int | None = None
    """CPU threads of each worker's engine; None = all cores, for every worker."""
    ray_address: str = ""
    """Empty = a Ray of its own, on this host and its loopback alone; else host:port of a Ray cluster that is there
    already, or `auto` for the one this host belongs to. Then workers go where nodes offer the resources `prefill` and
    `decode`, router and controller stay on this host, workers and controller listen on the address of their node, and
    the model lies in the same folder on each. With `cuda`, each worker has a GPU of its node for itself."""
    trusted_network: bool = False
    """Whether nobody but workers reaches workers over the network, so that KV pages may cross it: UCX then listens at
    each worker and writes what a connection asks for into its memory. Workers on several hosts need it."""
    places_timeout_s: float = 0.0
    """How long to wait for that Ray cluster and for its nodes to offer enough, in seconds, 0 or more."""
    workers_outlive_s: float = 0.0
    """How long workers on a joined Ray wait for another controller of the same `cluster_name` and `token` when theirs
    is gone, in seconds; then they end by themselves. 0 = they end with the process that started them."""
    cluster_name: str = DEFAULT_NAME
    """Which workers those are, where they outlive; clusters of other names on the same Ray are others."""
    controller_port: int = 0
    """Port of the controller's gRPC server, at which workers register and operators ask; 0 = any free one."""
    token: str = field(default="", repr=False)
    """The cluster's secret, which opens all listeners but the router's; empty = a fresh one."""
    host: str = "127.0.0.1"
    """Address the router listens on; beyond loopback there have to be `api_keys`, or `insecure`."""
    insecure: bool = False
    """Whether whoever reaches `host` may use the cluster without an API key."""
    grpc_port: int = 50051
    """Port of the router's gRPC server; 0 = any free one."""
    http_port: int = 8000
    """Port of the router's HTTP server; 0 = any free one."""
    front_processes: int = 0
    """Processes at these ports that hold clients' connections for the router, 0 to 64; 0 = it holds them itself."""
    listeners: ListenerLimits = DEFAULT_LIMITS
    """What both ports grant to connections and calls."""
    max_messages: int = 4096
    """Most messages of a conversation."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the router's HTTP port (CORS), `*` = all; none = no other page."""
    strict_requests: bool = False
    """Whether HTTP requests with fields that are not known are refused; else such fields are ignored."""
    metrics_port: int = 0
    """Port of the whole cluster's metrics, on the controller's address; 0 = any free one. The router's own are on its
    HTTP port, the workers' on ports that the controller tells (`/sd`)."""
    otlp_endpoint: str = ""
    """Where spans of requests go by OTLP/gRPC, http://HOST:PORT or https://HOST:PORT; empty = nowhere."""
    metrics_key: str = ""
    """The key that opens all metrics; empty = none is asked for on loopback, unless API keys are: then, and elsewhere,
    nobody but the cluster itself reads them."""
    slo_classes: tuple[SloClass, ...] = DEFAULT_CLASSES
    """What requests may name as their `slo_class`: targets, and what happens when they cannot be held."""
    default_slo_class: str = BEST_EFFORT.name
    """The class of requests that name none."""
    default_max_tokens: int | None = None
    """Most tokens of an answer whose client names no limit, at least 1; None = what its context leaves."""
    api_keys: tuple[str, ...] = ()
    """Keys clients may present; none = no key is asked for."""
    log_folder: Path | None = None
    """A folder for one log file of each process, made on each host that lacks it; None = Ray's own files, which go with
    its cluster."""
    log_format: str = LogFormat.PRETTY
    """`pretty`, for people, or `json`, an object a line."""
    log_max_mib: int = MAX_MIB
    """Size of a log file from which on another one is begun, in MiB, at least 1; the last few are kept. Of a Ray of its
    own, each of its files, too."""
    step_deadline_s: float | None = None
    """How long one step of a worker may take before its engine counts as stuck and the worker is started again, in
    seconds; None = 60 on GPUs, 600 on CPUs."""
    hang_deadline_s: float = HANG_DEADLINE_S
    """How long a worker, the router or the controller may live without a sign of life before it is killed and started
    again, in seconds; 0 = for ever, as for a debugger that stops them. While one starts, at least 120. A step may take
    longer, up to `step_deadline_s`."""
    prefix_cache: bool = True
    """Whether workers keep full KV pages as long as there is room, for requests that begin alike."""
    kv_checksum_rate: float = 0.05
    """Part of each transfer's KV pages whose checksums are compared, 0 to 1, at least one page a prompt; 0 = none."""
    kv_lease_s: float = 5.0
    """How long a decode worker keeps a place for a request whose router is silent, in seconds, 1 to 600."""
    kv_transfer_deadline_s: float = 30.0
    """How long a write of KV pages may take before the prompt is computed again, in seconds, 1 to 600."""
    kv_quarantine_share: float = 0.5
    """Part of a worker's KV pages that may be lost to transfers before it takes nothing new, 0 to 1."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Whether the number of workers and their roles follow the load, and within which limits."""
    start_timeout_s: float = 180.0
    """How long the first start of all workers may take, in seconds."""
    stop_grace_s: float = 0.5
    """How long calls in flight may still take when the whole cluster stops, in seconds; new ones are refused."""

    def __post_init__(self) -> None:
        """InvalidArgument names the option and its limit."""
        for option, value in (("--prefill", self.prefill), ("--decode", self.decode), ("--workers", self.workers)):
            if not 1 <= value <= WORKERS_MAX:
                raise InvalidArgument(option, f"{value} is not between 1 and {WORKERS_MAX}")
        if self.page_tokens is not None and not 1 <= self.page_tokens <= 1024:
            raise InvalidArgument("--page-tokens", f"{self.page_tokens} is not between 1 and 1024")
        if self.kv_cache_bytes is not None:
            check_kv_cache_gib(self.kv_cache_bytes / GIB)
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            raise InvalidArgument("--memory-fraction", f"{self.memory_fraction:g} is not above 0 and at most 1")
        self._check_transfers()
        self._check_names()
        if self.itl_target_s is not None and not self.itl_target_s > 0:
            raise InvalidArgument("--itl-target-ms", f"{self.itl_target_s * 1e3:g} is not above 0")
        for option, number in (
            ("--max-step-tokens", self.max_step_tokens),
            ("--max-batch-requests", self.batch_requests),
            ("--threads", 1 if self.threads is None else self.threads),
            ("--step-budget", 1 if self.step_budget is None else self.step_budget),
            ("--log-max-mib", self.log_max_mib),
            ("--default-max-tokens", 1 if self.default_max_tokens is None else self.default_max_tokens),
        ):
            if number < 1:
                raise InvalidArgument(option, f"{number} is less than 1")
        if self.default_slo_class not in (names := classes_by_name(self.slo_classes)):
            raise InvalidArgument("--default-slo-class", f"{self.default_slo_class!r} is none of {', '.join(names)}")
        check_ports(self.grpc_port, self.http_port, self.metrics_port, self.controller_port)
        if not 0 <= self.front_processes <= _MOST_FRONTS:
            raise InvalidArgument("--front-processes", f"{self.front_processes} is not 0 to {_MOST_FRONTS}")
        self._check_ray_address()
        self._check_timeouts()
        check_endpoint(self.otlp_endpoint)
        self._check_keys()
        if self.planner.mode is PlannerMode.ON and self.planner.limits.workers is None and not self._disaggregated:
            raise InvalidArgument(
                "--planner", f"has nothing to change in mode {self.mode}; give --planner-workers, too"
            )

    def _check_transfers(self) -> None:
        for option, value, least, most in (
            ("--kv-checksum-rate", self.kv_checksum_rate, 0, 1),
            ("--kv-quarantine-share", self.kv_quarantine_share, 0, 1),
            ("--kv-lease", self.kv_lease_s, 1, 600),
            ("--kv-transfer-deadline", self.kv_transfer_deadline_s, 1, 600),
        ):
            if not least <= value <= most:
                raise InvalidArgument(option, f"{value:g} is not between {least} and {most}")

    def _check_timeouts(self) -> None:
        for option, seconds in (
            ("--places-timeout", self.places_timeout_s),
            ("--start-timeout", self.start_timeout_s),
            ("--stop-grace", self.stop_grace_s),
            ("--workers-outlive", self.workers_outlive_s),
            ("--hang-deadline", self.hang_deadline_s),
        ):
            if not 0 <= seconds < math.inf:
                raise InvalidArgument(option, f"{seconds:g} is no number of seconds")

    def _check_keys(self) -> None:
        for key in self.api_keys:
            check_key("--api-key", key)
        for option, key in (("--metrics-key", self.metrics_key), ("--token", self.token)):
            if key:
                check_key(option, key)

    def _check_names(self) -> None:
        if re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device) is None:
            raise InvalidArgument("--device", f"{self.device!r} is none of cpu, cuda and cuda:N")
        for option, name, known in (
            ("--mode", self.mode, Mode),
            ("--step-policy", self.step_policy, PolicyName),
            ("--dtype", self.dtype, DTYPES),
            ("--log-format", self.log_format, LogFormat),
        ):
            if name not in list(known):
                raise InvalidArgument(option, f"{name!r} is none of {', '.join(known)}")

    def _check_ray_address(self) -> None:
        if self.ray_address:
            check_ray_address(self.ray_address)
        if self.ray_address and self.device not in {"cpu", "cuda"}:
            raise InvalidArgument("--device", f"{self.device}: where Ray has several nodes it chooses; give cuda")
        self._check_outliving()

    def _check_outliving(self) -> None:
        check_cluster_name(self.cluster_name)
        if not self.workers_outlive_s:
            if self.cluster_name != DEFAULT_NAME:
                raise InvalidArgument("--cluster-name", "is for workers that outlive it; add --workers-outlive")
            return
        if not self.ray_address:
            raise InvalidArgument("--workers-outlive", "a Ray of its own ends with it; join one with --address")
        if not self.token:
            raise InvalidArgument(
                "--workers-outlive", "who takes the workers over has to know their secret; give both the same --token"
            )

    def log_file(self, name: str) -> Path | None:
        """Where the process called `name` writes what it has to say."""
        return None if self.log_folder is None else self.log_folder / f"{name}.log"

    def log_of(self, name: str) -> LogConfig:
        """Where and how it does."""
        return LogConfig(self.log_file(name), LogFormat(self.log_format), self.log_max_mib << 20)

    @property
    def ray_namespace(self) -> str | None:
        """Where workers and controllers of this cluster find each other; None = nobody else may."""
        return namespace_of(self.cluster_name) if self.workers_outlive_s else None

    @property
    def worker_count(self) -> int:
        """Workers of all roles."""
        return self.prefill + self.decode if self.mode == Mode.DISAGGREGATED else self.workers

    @property
    def _disaggregated(self) -> bool:
        return self.mode == Mode.DISAGGREGATED

    @property
    def on_cpu(self) -> bool:
        """Whether workers compute on the CPU."""
        return self.device == "cpu"

    @property
    def worker_kv_cache_bytes(self) -> int | None:
        """What `kv_cache_bytes` means on this device; None = a worker measures what its GPU has left."""
        return CPU_KV_CACHE_BYTES if self.kv_cache_bytes is None and self.on_cpu else self.kv_cache_bytes

    @property
    def batch_requests(self) -> int:
        """What `max_batch_requests` means on this device."""
        default = CPU_BATCH_REQUESTS if self.on_cpu else GPU_BATCH_REQUESTS
        return default if self.max_batch_requests is None else self.max_batch_requests
