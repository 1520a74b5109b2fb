"""Settings of one router."""

from dataclasses import dataclass
from pathlib import Path

from router.placement import Mode
from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass, classes_by_name
from wire.errors import InvalidArgument
from wire.logs import LogFormat


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """What to serve, where, and how much of it at once."""

    router_id: str
    """Names this router to workers; unique in the cluster."""
    model: Path
    """Folder in Hugging Face layout: tokenizer.json, tokenizer_config.json, config.json, generation_config.json."""
    model_name: str
    """The name clients use."""
    controller_address: str
    """host:port of the controller's gRPC server."""
    token: str = ""
    """The cluster's secret, sent to controller and workers; empty = none."""
    name: str = "router"
    """Names this router in metrics; outlives the process."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients may show at either door; empty = no key is asked for."""
    host: str = "127.0.0.1"
    """Address both doors listen on."""
    grpc_port: int = 50051
    """Port of the gRPC door; 0 = any free one."""
    http_port: int = 8000
    """Port of the HTTP door; 0 = any free one."""
    front_processes: int = 0
    """Processes that hold clients' connections, so that writing to them takes none of this one's time; 0 = it holds
    them itself."""
    log_format: str = LogFormat.PRETTY
    """Of what those processes log."""
    max_request_bytes: int = 4 << 20
    """Largest request either door takes, in bytes."""
    max_queued_requests: int = 1024
    """Most requests that wait for a worker; the next one is turned away at once."""
    max_queued_per_tenant: int | None = None
    """Most of them that come with one API key; None = half of them where there are several keys, else all."""
    mode: Mode = Mode.ADAPTIVE
    """Where prompts are computed: by prefill workers, by the worker that decodes, or wherever it costs least."""
    slo_classes: tuple[SloClass, ...] = DEFAULT_CLASSES
    """What requests may name as their `slo_class`."""
    default_slo_class: str = BEST_EFFORT.name
    """The class of requests that name none."""
    goodput_window_s: float = 60.0
    """How far back goodput looks, in seconds."""
    metrics_key: str = ""
    """The key that opens `/metrics`; empty = where API keys are asked for, or others than this host may call, only the
    cluster's own token does, else nothing is asked."""
    traces_kept: int = 512
    """How many of the newest ended requests have their timelines remembered, beside the slow ones."""
    slow_window_s: float = 60.0
    """Of the requests that took about as long, the slowest of each so many seconds is remembered."""
    otlp_endpoint: str = ""
    """Where spans of requests go by OTLP/gRPC, http://host:port or https://host:port; empty = nowhere."""
    patience_s: float = 30.0
    """How long requests without a target for their first token wait behind others', at most, in seconds."""
    max_choices: int = 16
    """Most answers to one request (n); each counts like a request of its own."""
    default_max_tokens: int = 512
    """Answer length when the client names none, in tokens, clipped to what fits behind the prompt."""
    max_stop_strings: int = 16
    """Most stop strings of a request."""
    max_stop_chars: int = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 64
    """Most stop token ids of a request."""
    max_attempts: int = 3
    """Most times a request is prefilled before its failure reaches the client."""
    retry_after_s: float = 1.0
    """The hint that comes with a full queue or a missing worker, in seconds."""
    rpc_timeout_s: float = 10.0
    """Deadline of one call to a worker, in seconds."""
    queue_timeout_s: float = 120.0
    """Longest wait in the queue, in seconds."""
    stall_timeout_s: float = 120.0
    """Longest silence of the workers about a placed request, in seconds."""
    chunks_per_s: float = 5000.0
    """Most chunks a second that all answers together send before each carries several tokens. A chunk costs about
    100 µs here and as much at the client, on a CPU that the engine may need. First and last tokens never wait, nor do
    those of a class whose target between tokens would be missed by it."""
    chunk_delay_max_s: float = 0.025
    """Longest a token waits for others to travel with, in seconds."""
    tokenizer_threads: int = 2
    """Threads that encode prompts."""

    def __post_init__(self) -> None:
        """InvalidArgument names the setting and what is wrong with it."""
        names = classes_by_name(self.slo_classes)
        if self.default_slo_class not in names:
            message = f"{self.default_slo_class!r} is none of the classes {', '.join(names)}"
            raise InvalidArgument("default_slo_class", message)
        for setting, value in _positive(self):
            if value <= 0:
                raise InvalidArgument(setting, f"is {value:g}, it must be above 0")
        if self.max_queued_per_tenant is not None and self.max_queued_per_tenant < 1:
            raise InvalidArgument("max_queued_per_tenant", f"is {self.max_queued_per_tenant}, it must be at least 1")

    @property
    def tenant_queue_limit(self) -> int:
        """What `max_queued_per_tenant` means."""
        if self.max_queued_per_tenant is not None:
            return self.max_queued_per_tenant
        several = len(self.api_keys) > 1
        return max(1, self.max_queued_requests // 2) if several else self.max_queued_requests


def _positive(config: RouterConfig) -> tuple[tuple[str, float], ...]:
    """Settings that must be above 0."""
    names = ("patience_s", "goodput_window_s", "slow_window_s", "traces_kept")
    return tuple((name, getattr(config, name)) for name in names)
