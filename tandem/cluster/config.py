"""Settings of one cluster."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from router.observability.otlp import check_endpoint
from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass
from router.slo_options import classes_by_name
from tandem.cluster.joining import DEFAULT_NAME, check_cluster_name, check_ray_address, namespace_of
from tandem.cluster.limits import check_kv_cache_gib, check_ports
from tandem.cluster.liveness import HANG_DEADLINE_S
from tandem.cluster.planner_config import PlannerConfig, PlannerMode
from tandem.cost_model.roofline import Ceilings
from tandem.logging.logs import MAX_MIB, LogConfig, LogFormat
from tandem.net.limits.listener_limits import DEFAULT_LIMITS, ListenerLimits
from tandem.net.security.credentials import check_key
from tandem.net.security.server_tls import TlsFiles
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import Role
from tandem.protocol.mode import Mode
from tandem.protocol.policy_name import PolicyName
from tandem.protocol.speculation_method import SpeculationMethod

GIB = 1 << 30
WORKERS_MAX = 64
"""The largest number of workers of each role."""
CPU_KV_CACHE_BYTES = GIB
GPU_MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory that all of its workers use together."""
CPU_BATCH_REQUESTS, GPU_BATCH_REQUESTS = 64, 256
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8", "fp8")
GENERATION_CONFIGS = ("auto", "none")
QUANTIZATIONS = ("int8", "fp8", "int4")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The model to serve, the number of workers, and the addresses that clients use."""

    model: Path
    """Model folder in Hugging Face layout, already checked."""
    model_name: str = ""
    """The model name that clients use; empty = the folder's name."""
    model_aliases: tuple[str, ...] = ()
    """Other names by which clients may call the model."""
    tokenizer: Path | None = None
    """Folder with the tokenizer, configuration and chat templates that are used instead of the model's."""
    chat_template: str = ""
    """The chat template, in Jinja, that is used instead of the tokenizer's; empty = the tokenizer's."""
    generation_config: str = "auto"
    """`auto`: requests without sampling parameters have those of generation_config.json; `none`: plain sampling."""
    max_model_len: int | None = None
    """The longest context in tokens, prompt and answer together; None = the model's."""
    loras: tuple[tuple[str, Path], ...] = ()
    """Low-rank adapters: the model name by which clients choose each, and its folder."""
    runtime_loras: bool = False
    """True if operators may load and unload adapters while the cluster serves, for which workers keep slots."""
    max_loras: int = 8
    """Most adapters."""
    max_lora_rank: int = 16
    """Highest rank of an adapter."""
    mode: str = Mode.DISAGGREGATED
    """`disaggregated`: `prefill` and `decode` workers; `colocated`: `workers` that do both."""
    prefill: int = 1
    """Prefill workers of a disaggregated cluster, >= 1."""
    decode: int = 1
    """Decode workers of a disaggregated cluster, >= 1."""
    workers: int = 1
    """Workers of a colocated or adaptive cluster, >= 1."""
    step_policy: str = PolicyName.DECODE_PRIORITY
    """The policy that limits prompt tokens in a mixed step: `unchunked`, `chunked` or `decode-priority`.

    `unchunked` takes as many as fit, `chunked` takes `step_budget` less the decode rows, and `decode-priority` applies
    that budget only while a decoding request without a target is in the step. Under every policy a step is no longer
    than the targets of its decoding requests allow.
    """
    step_budget: int | None = None
    """Maximum tokens of a mixed step, decode rows included; None = 512."""
    itl_target_s: float | None = None
    """Maximum inter-token latency of any request, in seconds, above 0.

    None = only the requests' service classes limit it. Batches grow no further than this allows, and prefill uses the
    time that decode leaves.
    """
    random_weights: bool = False
    """True if workers use random weights, for performance runs: the `model` folder then needs none."""
    device: str = "cpu"
    """`cpu`; `cuda`, which spreads workers over all GPUs; or `cuda:N`, which places all workers on that GPU."""
    dtype: str = "auto"
    """Data type of weights and KV: `auto`, `float32`, `bfloat16` or `float16`."""
    kv_cache_dtype: str = "auto"
    """Data type of KV: `auto`, which is that of the weights, `int8`, or on GPUs `fp8`."""
    quantization: str | None = None
    """Quantization of the layers' weights while workers load them: `int8`, `fp8`, `int4`; None = as they are stored."""
    prefill_quantization: str | None = None
    """The same for the prefill workers of a disaggregated cluster; None = `quantization`."""
    decode_quantization: str | None = None
    """The same for its decode workers."""
    page_tokens: int | None = None
    """Tokens per KV page; None = 16 on CPU, 128 on GPUs."""
    kv_cache_bytes: int | None = None
    """Size of each worker's KV page pool, in bytes; None = 1 GiB on CPU, on GPUs what `memory_fraction` leaves."""
    memory_fraction: float | None = None
    """Fraction of its GPU's memory that each worker may use, weights included, 0 to 1.

    None = 0.9, shared equally by the workers of a GPU.
    """
    max_step_tokens: int = 2048
    """Maximum tokens that a worker computes in one step: the chunk size of prefill."""
    max_batch_requests: int | None = None
    """Maximum requests of one decode step; None = 64 on CPU, 256 on GPUs."""
    ceilings: Ceilings | None = None
    """Peak rates of each worker's device, used for utilization; None = measured at each start."""
    threads: int | None = None
    """CPU threads of each worker's engine; None = all cores, for every worker."""
    ray_address: str = ""
    """The Ray cluster to join, host:port or `auto`; empty = a private Ray on this host's loopback.

    `auto` is the cluster that this host belongs to. Workers then run on nodes that offer the resources `prefill` and
    `decode`. Router and controller stay on this host, workers and controller listen on the address of their node, and
    every node has the model in the same folder. With `cuda`, each worker has one GPU of its node exclusively.
    """
    trusted_network: bool = False
    """True if only workers can reach workers over the network, so that KV pages may cross it.

    UCX then listens at each worker and writes into its memory whatever a connection requests. Workers on several hosts
    need it.
    """
    places_timeout_s: float = 0.0
    """Maximum wait for that Ray cluster and for enough node resources, in seconds, 0 or more."""
    workers_outlive_s: float = 0.0
    """Seconds that workers on a joined Ray outlive their controller while they wait for another one; then they exit.

    The other controller has the same `cluster_name` and `token`. 0 = they end with the process that started them.
    """
    cluster_name: str = DEFAULT_NAME
    """The name that identifies workers that outlive their controller; it separates several clusters on one Ray."""
    controller_port: int = 0
    """Port of the controller's gRPC server, at which workers register and operators ask; 0 = any free one."""
    token: str = field(default="", repr=False)
    """The cluster's secret, required at all listeners but the router's; empty = a fresh one."""
    host: str = "127.0.0.1"
    """Address that the router listens on; beyond loopback it requires API keys or `insecure`."""
    insecure: bool = False
    """True if every client that reaches `host` may use the cluster without an API key."""
    grpc_port: int = 50051
    """Port of the router's gRPC server; 0 = any free one."""
    http_port: int = 8000
    """Port of the router's HTTP server; 0 = any free one."""
    tls: TlsFiles | None = None
    """The certificate of the router's ports for clients; None = their connections are not encrypted."""
    operations_port: int = 0
    """Port of probes, metrics and traces of the router over plain HTTP, with `tls` only; 0 = any free one."""
    listeners: ListenerLimits = DEFAULT_LIMITS
    """Limits of connections and calls at both ports."""
    max_messages: int = 4096
    """Maximum messages of a conversation."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the router's HTTP port (CORS), `*` = all; none = no other page."""
    tool_call_parser: str = "auto"
    """The parser of tool calls, by vLLM's names; `auto` = by the chat template, `none` = tools are refused."""
    reasoning_parser: str = "auto"
    """The parser of reasoning, by vLLM's names; `auto` = by the chat template, `none` = it is content."""
    strict_requests: bool = False
    """True if HTTP requests with unknown fields are rejected; otherwise such fields are ignored."""
    metrics_port: int = 0
    """Port of the cluster-wide metrics, on the controller's address; 0 = any free one.

    The router's own metrics are on its HTTP port, the workers' on ports that the controller lists at `/sd`.
    """
    otlp_endpoint: str = ""
    """OTLP/gRPC endpoint for request spans, http://HOST:PORT or https://HOST:PORT; empty = none."""
    metrics_key: str = ""
    """The key that opens all metrics; empty = no key is required on loopback while there are no API keys.

    Otherwise an empty key closes the metrics to all but the cluster itself.
    """
    slo_classes: tuple[SloClass, ...] = DEFAULT_CLASSES
    """Service classes that requests may name as their `slo_class`: targets, and the action when they cannot be met."""
    default_slo_class: str = BEST_EFFORT.name
    """The service class of requests that name none."""
    default_max_tokens: int | None = None
    """Maximum output tokens of requests that set no limit, at least 1; None = what the context leaves."""
    api_keys: tuple[str, ...] = ()
    """API keys of tenants without quotas."""
    api_key_file: Path | None = None
    """A file with more API keys, their roles and quotas; without keys and without a file, no key is required."""
    audit_log: Path | None = None
    """The file to which the router writes one line for each call of a client; None = no audit log."""
    log_folder: Path | None = None
    """Folder with one log file per process, created on each host that lacks it; None = Ray's own files.

    Ray's own files are removed with its cluster.
    """
    log_format: str = LogFormat.PRETTY
    """Log format: `pretty`, for people, or `json`, one object per line."""
    log_max_mib: int = MAX_MIB
    """Size at which a log file is rotated, in MiB, at least 1; the last few files are kept.

    It also limits each log file of a private Ray.
    """
    step_deadline_s: float | None = None
    """Maximum duration of one worker step before the engine counts as stuck and the worker is restarted, in seconds.

    None = 60 on GPUs, 600 on CPUs.
    """
    hang_deadline_s: float = HANG_DEADLINE_S
    """Seconds without a sign of life after which a process is killed and restarted; 0 = never.

    It applies to workers, router and controller. While a process starts the deadline is at least 120 s. A step may take
    longer, up to `step_deadline_s`. A debugger that stops processes needs 0.
    """
    worker_silence_s: float = 4.0
    """Seconds without a response after which a worker's requests move to others; 0 = when its process has ended.

    See `RouterConfig.worker_silence_s`.
    """
    recovery_timeout_s: float = 180.0
    """Longest time for which requests wait while the only worker of a role is replaced, in seconds; 0 = they fail."""
    prefix_cache: bool = True
    """True if workers keep full KV pages for prefix reuse while memory allows."""
    speculate: str = "auto"
    """Speculative decoding: `auto`, `off`, `ngram`, `suffix` or `draft`; it changes the speed of answers, no token."""
    draft: Path | None = None
    """Folder of the model or heads that propose the drafts of `draft`; None with the other methods."""
    kv_checksum_rate: float = 0.05
    """Fraction of each transfer's KV pages whose checksums are compared, 0 to 1, at least one page; 0 = none."""
    kv_lease_s: float = 5.0
    """Lease of a decode worker's reservation for a request whose router is silent, in seconds, 1 to 600."""
    kv_transfer_deadline_s: float = 30.0
    """Deadline of a KV page write, after which the prompt is computed again, in seconds, 1 to 600."""
    kv_quarantine_share: float = 0.5
    """Fraction of a worker's KV pages in quarantine above which it accepts no new requests, 0 to 1."""
    planner: PlannerConfig = field(default_factory=PlannerConfig)
    """Settings of the planner, which adapts roles and the number of workers to the load."""
    start_timeout_s: float = 180.0
    """Maximum duration of the first start of all workers, in seconds."""
    stop_grace_s: float = 0.5
    """Seconds that calls in flight may continue when the cluster stops; new calls are rejected."""

    def __post_init__(self) -> None:
        """Validates all settings; InvalidArgument names the option and its limit."""
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
            ("--max-model-len", 1 if self.max_model_len is None else self.max_model_len),
            ("--max-loras", self.max_loras),
            ("--max-lora-rank", self.max_lora_rank),
        ):
            if number < 1:
                raise InvalidArgument(option, f"{number} is less than 1")
        if self.default_slo_class not in (names := classes_by_name(self.slo_classes)):
            raise InvalidArgument("--default-slo-class", f"{self.default_slo_class!r} is none of {', '.join(names)}")
        check_ports(self.grpc_port, self.http_port, self.metrics_port, self.controller_port, self.operations_port)
        self._check_quantization()
        self._check_draft()
        self._check_ray_address()
        self._check_timeouts()
        check_endpoint(self.otlp_endpoint)
        self._check_keys()
        if self.planner.mode is PlannerMode.ON and self.planner.limits.workers is None and not self._disaggregated:
            raise InvalidArgument(
                "--planner", f"has nothing to change in mode {self.mode}; give --planner-workers, too"
            )

    def _check_quantization(self) -> None:
        by_role = {
            "--prefill-quantization": self.prefill_quantization,
            "--decode-quantization": self.decode_quantization,
        }
        for option, name in ({"--quantization": self.quantization} | by_role).items():
            if name is not None and name not in QUANTIZATIONS:
                raise InvalidArgument(option, f"{name!r} is none of {', '.join(QUANTIZATIONS)}")
        for option, name in by_role.items():
            if name is not None and not self._disaggregated:
                raise InvalidArgument(option, f"is for --mode {Mode.DISAGGREGATED}; give --quantization")
            if name is not None and self.planner.mode is PlannerMode.ON:
                raise InvalidArgument(option, "excludes --planner on: workers change roles, and keep their weights")

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
            ("--worker-silence", self.worker_silence_s),
            ("--recovery-timeout", self.recovery_timeout_s),
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
            ("--kv-cache-dtype", self.kv_cache_dtype, KV_DTYPES),
            ("--speculate", self.speculate, SpeculationMethod),
            ("--log-format", self.log_format, LogFormat),
            ("--generation-config", self.generation_config, GENERATION_CONFIGS),
        ):
            if name not in list(known):
                raise InvalidArgument(option, f"{name!r} is none of {', '.join(known)}")

    def _check_draft(self) -> None:
        if self.speculate == SpeculationMethod.DRAFT and self.draft is None:
            raise InvalidArgument("--speculate", "draft needs --draft PATH, the folder of a small model or of heads")
        if self.speculate != SpeculationMethod.DRAFT and self.draft is not None:
            raise InvalidArgument("--draft", f"is for --speculate draft, not for --speculate {self.speculate}")

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
                "--workers-outlive",
                "the controller that takes the workers over needs their secret; give both the same --token",
            )

    @property
    def guarded(self) -> bool:
        """True if clients need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None

    def log_file(self, name: str) -> Path | None:
        """The log file of the process called `name`; None without a log folder."""
        return None if self.log_folder is None else self.log_folder / f"{name}.log"

    def log_of(self, name: str) -> LogConfig:
        """The log configuration of the process called `name`."""
        return LogConfig(self.log_file(name), LogFormat(self.log_format), self.log_max_mib << 20)

    @property
    def ray_namespace(self) -> str | None:
        """The Ray namespace in which workers and controllers of this cluster are found; None = a private one."""
        return namespace_of(self.cluster_name) if self.workers_outlive_s else None

    @property
    def worker_count(self) -> int:
        """The number of workers of all roles."""
        return self.prefill + self.decode if self.mode == Mode.DISAGGREGATED else self.workers

    def quantization_of(self, role: Role) -> str | None:
        """The effective quantization of workers of this role."""
        by_role = {Role.PREFILL: self.prefill_quantization, Role.DECODE: self.decode_quantization}
        return by_role.get(role) or self.quantization

    @property
    def _disaggregated(self) -> bool:
        return self.mode == Mode.DISAGGREGATED

    @property
    def on_cpu(self) -> bool:
        """True if workers compute on the CPU."""
        return self.device == "cpu"

    @property
    def worker_kv_cache_bytes(self) -> int | None:
        """The effective `kv_cache_bytes` on this device; None = each worker measures what its GPU has left."""
        return CPU_KV_CACHE_BYTES if self.kv_cache_bytes is None and self.on_cpu else self.kv_cache_bytes

    @property
    def batch_requests(self) -> int:
        """The effective `max_batch_requests` on this device."""
        default = CPU_BATCH_REQUESTS if self.on_cpu else GPU_BATCH_REQUESTS
        return default if self.max_batch_requests is None else self.max_batch_requests
