"""Settings of one router."""

from dataclasses import dataclass
from pathlib import Path

from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass, classes_by_name
from wire.errors import InvalidArgument
from wire.limits.listener_limits import DEFAULT_LIMITS, ListenerLimits
from wire.logging.logs import TO_STDERR, LogConfig
from wire.mode import Mode
from wire.security.credentials import check_guarded


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
    """The cluster's secret, which parts prove to each other by mutual TLS; empty = none, and nothing is encrypted."""
    name: str = "router"
    """Names this router in metrics; outlives the process."""
    api_keys: tuple[str, ...] = ()
    """Keys that clients may show at either listener; empty = no key is asked for."""
    host: str = "127.0.0.1"
    """Address gRPC and HTTP listen on; beyond loopback there have to be `api_keys`, or `insecure`."""
    insecure: bool = False
    """Whether whoever reaches `host` may send requests without an API key."""
    grpc_port: int = 50051
    """Port of the gRPC listener; 0 = any free one."""
    http_port: int = 8000
    """Port of the HTTP listener; 0 = any free one."""
    front_processes: int = 0
    """Processes that hold clients' connections, so that writing to them takes none of this one's time; 0 = it holds
    them itself."""
    log: LogConfig = TO_STDERR
    """Where and how those processes log, to this one's file."""
    listeners: ListenerLimits = DEFAULT_LIMITS
    """What either listener grants to connections and calls."""
    max_messages: int = 4096
    """Most messages of a conversation."""
    max_request_items: int = 1 << 18
    """Most fields, strings and list entries of a request, counted before it is read; one that is a list of token ids
    may have as many as the model's context holds."""
    max_tokenizing_bytes: int = 32 << 20
    """Most bytes of prompts that wait to be read and tokenized, which takes about a second a MiB; of those of the
    tenant that sent most, the newest is turned away."""
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
    key that comes from `token` does, else nothing is asked."""
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
    default_max_tokens: int | None = None
    """Most tokens of an answer whose client names no limit, at least 1; None = what fits behind the prompt in context
    and KV cache."""
    max_stop_strings: int = 16
    """Most stop strings of a request."""
    max_stop_chars: int = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 64
    """Most stop token ids of a request."""
    max_template_kwargs_bytes: int = 16 << 10
    """Largest `chat_template_kwargs` of a request, in bytes of JSON."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call the HTTP listener (CORS), e.g. "https://chat.example.com"; "*" = all."""
    strict_requests: bool = False
    """Whether HTTP requests with fields that this server does not know are refused; else such fields are ignored."""
    sse_comment_s: float = 10.0
    """After so many seconds without an event a comment is sent to the client of a stream, so that proxies do not take
    the connection for dead."""
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
    """Threads that read large requests and encode prompts."""

    def __post_init__(self) -> None:
        """InvalidArgument names the setting and what is wrong with it."""
        check_guarded("host", self.host, self.api_keys, insecure=self.insecure)
        names = classes_by_name(self.slo_classes)
        if self.default_slo_class not in names:
            message = f"{self.default_slo_class!r} is none of the classes {', '.join(names)}"
            raise InvalidArgument("default_slo_class", message)
        for setting, value in _positive(self):
            if value <= 0:
                raise InvalidArgument(setting, f"is {value:g}, it must be above 0")
        if self.max_queued_per_tenant is not None and self.max_queued_per_tenant < 1:
            raise InvalidArgument("max_queued_per_tenant", f"is {self.max_queued_per_tenant}, it must be at least 1")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InvalidArgument("default_max_tokens", f"is {self.default_max_tokens}, it must be at least 1")

    @property
    def tenant_queue_limit(self) -> int:
        """What `max_queued_per_tenant` means."""
        if self.max_queued_per_tenant is not None:
            return self.max_queued_per_tenant
        several = len(self.api_keys) > 1
        return max(1, self.max_queued_requests // 2) if several else self.max_queued_requests


def _positive(config: RouterConfig) -> tuple[tuple[str, float], ...]:
    """Settings that must be above 0."""
    names = (
        "max_messages",
        "max_request_items",
        "max_tokenizing_bytes",
        "tokenizer_threads",
        "patience_s",
        "sse_comment_s",
        "goodput_window_s",
        "slow_window_s",
        "traces_kept",
    )
    return tuple((name, getattr(config, name)) for name in names)
