"""The settings of one router."""

from dataclasses import dataclass
from pathlib import Path

from router.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass
from router.slo_options import classes_by_name
from tandem.net.address import is_loopback
from tandem.net.limits.listener_limits import DEFAULT_LIMITS, ListenerLimits
from tandem.net.security.api_keys import KeySource, read_keys
from tandem.net.security.credentials import check_guarded, reading_keys
from tandem.net.security.server_tls import TlsFiles
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.mode import Mode


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The settings of one router: the model, its listeners, and its limits."""

    router_id: str
    """The router's id on workers; unique in the cluster."""
    model: Path
    """The model folder: tokenizer.json, tokenizer_config.json, config.json, generation_config.json."""
    model_name: str
    """The model name that clients use."""
    controller_address: str
    """host:port of the controller's gRPC server."""
    token: str = ""
    """The cluster's secret, which components prove by mutual TLS; empty = no authentication and no encryption."""
    name: str = "router"
    """The router's name in metrics; the same after a restart."""
    api_keys: tuple[str, ...] = ()
    """API keys of tenants without quotas, accepted by both listeners."""
    api_key_file: Path | None = None
    """A file with more API keys, their roles and quotas; without keys and without a file, no key is required."""
    audit_log: Path | None = None
    """The file that gets one line for each call of a client; None = no audit log."""
    host: str = "127.0.0.1"
    """The address that gRPC and HTTP listen on; other than loopback it needs API keys or `insecure`."""
    insecure: bool = False
    """True if requests need no API key even if `host` is not loopback."""
    grpc_port: int = 50051
    """Port of the gRPC listener; 0 = any free one."""
    http_port: int = 8000
    """Port of the HTTP listener; 0 = any free one."""
    tls: TlsFiles | None = None
    """The certificate of both listeners; None = connections of clients are not encrypted."""
    operations_port: int = 0
    """Port of a third listener, which exists with `tls` only: probes, metrics and traces over plain HTTP."""
    listeners: ListenerLimits = DEFAULT_LIMITS
    """The limits of each listener."""
    max_messages: int = 4096
    """Most messages of a conversation."""
    max_request_items: int = 1 << 18
    """Most fields, strings and list entries of a request, counted before it is parsed.

    A quarter of those of a JSON body may be strings, lists and objects. A prompt that is a list of token ids may have
    as many ids as the model's context.
    """
    max_tokenizing_bytes: int = 32 << 20
    """Most bytes of prompts that wait to be parsed and tokenized, which takes about a second per MiB.

    Above it the newest request of the tenant with the most waiting bytes is rejected.
    """
    max_queued_requests: int = 1024
    """Most requests that wait for a worker; further ones are rejected at once."""
    max_queued_per_tenant: int | None = None
    """Most waiting requests of one API key; None = half of `max_queued_requests` with several keys, else all."""
    mode: Mode = Mode.ADAPTIVE
    """The placement mode: prefill on prefill workers, on the worker that decodes, or by predicted cost."""
    slo_classes: tuple[SloClass, ...] = DEFAULT_CLASSES
    """The SLO classes that requests may name as `slo_class`."""
    default_slo_class: str = BEST_EFFORT.name
    """The SLO class of requests that name none."""
    goodput_window_s: float = 60.0
    """The length of goodput's sliding window, in seconds."""
    metrics_key: str = ""
    """The key for `/metrics`.

    Empty = the key derived from `token` if API keys are required or `host` is not loopback, else no key.
    """
    traces_kept: int = 512
    """Number of the newest ended requests whose timelines are kept, in addition to the slow ones."""
    slow_window_s: float = 60.0
    """The window in which the slowest request of each latency bucket is kept, in seconds."""
    otlp_endpoint: str = ""
    """The OTLP/gRPC endpoint for spans of requests, http://host:port or https://host:port; empty = none."""
    max_deferral_s: float = 30.0
    """Longest time for which requests with a TTFT target go before those without, in seconds."""
    max_choices: int = 16
    """Most answers to one request (n); each counts as a separate request."""
    default_max_tokens: int | None = None
    """Most tokens of an answer whose client gives no limit, at least 1; None = the rest of context and KV cache."""
    max_stop_strings: int = 16
    """Most stop strings of a request."""
    max_stop_chars: int = 256
    """Longest stop string, in characters."""
    max_stop_token_ids: int = 64
    """Most stop token ids of a request."""
    max_template_kwargs_bytes: int = 16 << 10
    """Largest `chat_template_kwargs` of a request, in bytes of JSON."""
    model_aliases: tuple[str, ...] = ()
    """Other names by which clients may call the model; answers have `model_name`."""
    tokenizer: Path | None = None
    """A folder with the tokenizer, its configuration and chat templates; None = `model`."""
    chat_template: str = ""
    """The chat template, in Jinja, that is used instead of the tokenizer's; "" = the tokenizer's."""
    generation_config: str = "auto"
    """`auto`: requests without sampling parameters have those of generation_config.json; `none`: plain sampling."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the HTTP listener (CORS), e.g. "https://chat.example.com"; "*" = all."""
    tool_call_parser: str = "auto"
    """The parser of tool calls (`router/text/answer_syntax/formats.py`); `auto` = by the chat template, or `none`."""
    reasoning_parser: str = "auto"
    """The parser of reasoning, with the same special names."""
    strict_requests: bool = False
    """True if HTTP requests with unknown fields are rejected; otherwise such fields are ignored."""
    sse_comment_s: float = 10.0
    """Seconds without an event after which a stream gets a comment, so that proxies keep the connection."""
    max_attempts: int = 3
    """Most failed attempts of a request before its error is returned to the client."""
    retry_after_s: float = 1.0
    """The retry hint of errors about a full queue or a missing worker, in seconds."""
    rpc_timeout_s: float = 10.0
    """Deadline of one call to a worker, in seconds."""
    queue_timeout_s: float = 120.0
    """Longest wait in the queue, in seconds."""
    recovery_timeout_s: float = 180.0
    """Longest time for which requests wait while the only worker of a role is replaced, in seconds; 0 = they fail.

    It is as long as a start of a worker may take. Waits of this kind do not count as waits in the queue.
    """
    worker_silence_s: float = 4.0
    """Seconds without a response after which a worker's requests move to others; 0 = when its process has ended.

    A worker responds while a step computes. With the interval between heartbeats this is at most 5 s, and longer than
    the waits for a core on a busy host of two; if the worker does respond later, its requests cost a prefill each.
    """
    stall_timeout_s: float = 120.0
    """Longest time without an event of a placed request from its workers, in seconds."""
    chunks_per_s: float = 5000.0
    """Most chunks per second, over all answers, before each chunk carries several tokens.

    A chunk costs about 100 µs in the router and as much at the client, on a CPU that the engine may need. First and
    last tokens never wait, nor do tokens whose ITL target the delay would break.
    """
    chunk_delay_max_s: float = 0.025
    """Longest time a token waits to be batched with later ones, in seconds."""
    tokenizer_threads: int = 2
    """Number of threads that parse large requests and encode prompts."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument with the name of a wrong setting."""
        check_guarded("host", self.host, guarded=self.guarded, insecure=self.insecure)
        names = classes_by_name(self.slo_classes)
        if self.default_slo_class not in names:
            message = f"{self.default_slo_class!r} is none of the classes {', '.join(names)}"
            raise InvalidArgument("default_slo_class", message)
        for setting, value in _positive(self):
            if value <= 0:
                raise InvalidArgument(setting, f"is {value:g}, it must be above 0")
        for setting in ("recovery_timeout_s", "worker_silence_s"):
            if getattr(self, setting) < 0:
                raise InvalidArgument(setting, f"is {getattr(self, setting):g}, it must be at least 0")
        if self.max_queued_per_tenant is not None and self.max_queued_per_tenant < 1:
            raise InvalidArgument("max_queued_per_tenant", f"is {self.max_queued_per_tenant}, it must be at least 1")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise InvalidArgument("default_max_tokens", f"is {self.default_max_tokens}, it must be at least 1")

    @property
    def tokenizer_folder(self) -> Path:
        """The folder of the tokenizer, with the default of `tokenizer` applied."""
        return self.tokenizer or self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names of the model, the one of answers first."""
        return self.model_name, *self.model_aliases

    @property
    def guarded(self) -> bool:
        """True if requests need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def key_source(self) -> KeySource:
        """The origin of all accepted keys."""
        loopback = is_loopback(self.host)
        readers = reading_keys(self.metrics_key, self.token, guarded=self.guarded, loopback=loopback)
        return KeySource(self.api_keys, self.api_key_file, readers)

    @property
    def tenant_queue_limit(self) -> int:
        """Most waiting requests of one tenant, with the default of `max_queued_per_tenant` applied."""
        if self.max_queued_per_tenant is not None:
            return self.max_queued_per_tenant
        in_file = read_keys("api_key_file", self.api_key_file) if self.api_key_file else ()
        several = len(self.api_keys) + len(in_file) > 1
        return max(1, self.max_queued_requests // 2) if several else self.max_queued_requests


def _positive(config: RouterConfig) -> tuple[tuple[str, float], ...]:
    """Return the settings that must be above 0, with their values."""
    names = (
        "max_messages",
        "max_request_items",
        "max_tokenizing_bytes",
        "tokenizer_threads",
        "max_deferral_s",
        "sse_comment_s",
        "goodput_window_s",
        "slow_window_s",
        "traces_kept",
    )
    return tuple((name, getattr(config, name)) for name in names)
