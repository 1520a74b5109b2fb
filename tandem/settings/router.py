"""Settings of the router: listeners, access, API behaviour and limits."""

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tandem.protocol.mode import Mode
from tandem.settings.invalid import refuse
from tandem.settings.listeners import DEFAULT_LIMITS, ListenerLimits
from tandem.settings.parsing import absolute, check_key, check_port
from tandem.settings.setting import AUTO, NameOf, Settings, Topic, field_name, setting
from tandem.settings.slo import BEST_EFFORT, DEFAULT_CLASSES, SloClass, classes_by_name, parse_classes
from tandem.settings.tls import TlsFiles

CPU_CHUNKS_PER_S, GPU_CHUNKS_PER_S = 320.0, 5000.0
"""The default `chunks_per_s` beside engines on CPUs and on GPUs; fewer chunks leave more CPU time to the engines."""


def check_endpoint(name: str, endpoint: str) -> None:
    """Raise InvalidArgument for a malformed OTLP endpoint; an empty endpoint disables the export."""
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        usable = False
    if not usable:
        refuse(name, f"{endpoint!r} must be http://HOST:PORT or https://HOST:PORT")


def _check_zmq(name: str, endpoint: str) -> None:
    """Raise InvalidArgument for a malformed ZeroMQ endpoint; an empty endpoint disables the socket."""
    if endpoint and re.fullmatch(r"tcp://[^\s/]+:(\d+|\*)|ipc://\S+", endpoint) is None:
        refuse(name, f"{endpoint!r} must be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")


def _check_keys(name: str, keys: tuple[str, ...]) -> None:
    for key in keys:
        check_key(name, key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings(Settings):
    """The settings of a router: its listeners, its access control, its API and its limits."""

    mode: Mode = setting(
        Mode.DISAGGREGATED,
        help="disaggregated: --prefill and --decode workers; colocated: --workers that do both; adaptive: --workers,"
        " and for each request one of them or two; auto: disaggregated on a CPU or with --prefill or --decode, else"
        " adaptive.",
        topic=Topic.FIRST,
        automatic=AUTO,
        choices=Mode,
    )
    """The initial placement mode; the controller reports the cluster's current mode."""
    host: str = setting(
        "127.0.0.1",
        help="Address the router listens on; beyond this host it needs API keys, or --insecure.",
        topic=Topic.FIRST,
        position=2,
    )
    http_port: int = setting(
        8000,
        help="Port for OpenAI clients; 0 = any free one.",
        topic=Topic.FIRST,
        position=2,
        aliases=("--port",),
        check=check_port,
    )
    grpc_port: int = setting(
        50051, help="Port for gRPC clients; 0 = any free one.", topic=Topic.LISTENERS, check=check_port
    )
    operations_port: int = setting(
        0,
        help="With TLS: port of the router's probes, metrics and traces over plain HTTP; 0 = any free one.",
        topic=Topic.LISTENERS,
        check=check_port,
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        metavar="ORIGIN",
        help="Origin of web pages whose scripts may call the HTTP port, e.g. https://chat.example.com, or * for all"
        " (CORS); repeatable; default: none.",
        topic=Topic.LISTENERS,
    )
    api_keys: tuple[str, ...] = setting(
        (),
        help="Key that clients must present; repeatable.",
        metavar="KEY",
        topic=Topic.FIRST,
        position=2,
        option="api-key",
        check=_check_keys,
    )
    """The API keys of tenants without quotas."""
    api_key_file: Path | None = setting(
        None,
        help="File with more of them, read again when it changes. A line has KEY or sha256:HEX, then name=NAME,"
        " role=tenant, operator or reader, requests_per_minute=N and tokens_per_minute=N where wanted; from # on it is"
        " a comment.",
        topic=Topic.ACCESS,
        parse=absolute,
    )
    insecure: bool = setting(
        False, help="Let every client that reaches --host use the cluster without an API key.", topic=Topic.ACCESS
    )
    tls: TlsFiles | None = None
    """The certificate of the client ports; None = plaintext connections."""
    audit_log: Path | None = setting(
        None,
        help="File for a line of JSON about each call of a client: who, what, when, and how many tokens.",
        topic=Topic.ACCESS,
        parse=absolute,
    )
    chat_template: str = setting(
        "",
        help="Jinja file, or name of one of the model's templates (tool_use, …) or of Tandem's (smollm2); default: the"
        " model's own.",
        topic=Topic.MODEL,
    )
    """Jinja template: `tandem up` replaces the file or name by its text; empty = the tokenizer's own template."""
    generation_config: str = setting(
        "auto",
        help="Sampling of requests that name none: auto = as the model's generation_config.json; none = plain sampling,"
        " temperature 1.",
        topic=Topic.MODEL,
        choices=("auto", "none"),
    )
    tool_call_parser: str = setting(
        "auto",
        help="Form of the model's tool calls: hermes, llama3_json, mistral, deepseek_v3, deepseek_v32, kimi_k2,"
        " qwen3_coder, minimax_m2, glm45, gemma4 or openai; auto: by its chat template; none: tools are rejected unless"
        " a call is required.",
        topic=Topic.REQUESTS,
    )
    reasoning_parser: str = setting(
        "auto",
        help="Form of the model's reasoning: qwen3, deepseek_r1, mistral, gemma4 or openai_gptoss; auto: by its chat"
        " template; none: it stays in the content.",
        topic=Topic.REQUESTS,
    )
    strict_requests: bool = setting(
        False,
        help="Reject HTTP requests with unknown fields; otherwise such fields are ignored, and the header"
        " X-Tandem-Ignored names them.",
        topic=Topic.REQUESTS,
    )
    slo_classes: tuple[SloClass, ...] = setting(
        DEFAULT_CLASSES,
        metavar="NAME:TTFT_MS:ITL_MS[:PERCENT[:WORST_GAP_MS]][:reject|degrade]",
        help="Targets that requests may name, in addition to or instead of strict, balanced, quick and best_effort, and"
        " the action when they cannot be met; repeatable.",
        topic=Topic.REQUESTS,
        option="slo-class",
        parse=parse_classes,
    )
    default_slo_class: str = setting(
        BEST_EFFORT.name, help="The class of requests that name none.", topic=Topic.REQUESTS
    )
    default_max_tokens: int | None = setting(
        None,
        help="Maximum output tokens of requests that set no limit; default: the context's.",
        topic=Topic.REQUESTS,
        least=1,
    )
    listeners: ListenerLimits = DEFAULT_LIMITS
    max_messages: int = setting(4096, help="Maximum messages of a conversation.", topic=Topic.LIMITS, least=1)
    worker_silence_s: float = setting(
        4.0,
        help="Seconds without a response after which the router moves a worker's requests to others; 0 = when its"
        " process has ended.",
        topic=Topic.FAILURES,
        least=0,
    )
    """A worker responds even while it computes a step.

    A process waits less than the default for a core on a busy two-core host. The default plus the heartbeat interval is
    at most 5 s. If a silent worker proves to be alive, each request that was moved away from it has cost one additional
    prefill.
    """
    recovery_timeout_s: float = setting(
        180.0,
        help="Seconds that requests may wait while the only worker of a role is replaced; 0 = they fail at once.",
        topic=Topic.FAILURES,
        least=0,
    )
    """The default is the time that the start of a worker may take. This wait is not counted as time in the queue."""
    otlp_endpoint: str = setting(
        "",
        help="OTLP/gRPC endpoint for request spans, http://HOST:PORT; needs tandem-serving[otlp].",
        topic=Topic.OBSERVABILITY,
        check=check_endpoint,
    )
    open_picker_metrics: bool = setting(
        False,
        help="Show the cluster's load at /metrics/endpoint-picker without a key, for an endpoint picker of Kubernetes'"
        " Gateway API, which sends none.",
        topic=Topic.OBSERVABILITY,
    )
    kv_events_endpoint: str = setting(
        "",
        help="ZeroMQ endpoint for KV events in vLLM's format, which tell other routers what is cached here: tcp://*:5557"
        " listens, tcp://HOST:PORT connects. Without encryption and keys: who receives them can read all prompts."
        " Needs tandem-serving[kv-events].",
        topic=Topic.OBSERVABILITY,
        check=_check_zmq,
    )
    kv_events_replay_endpoint: str = setting(
        "",
        help="ZeroMQ endpoint at which subscribers request KV events again, e.g. tcp://*:5558.",
        topic=Topic.OBSERVABILITY,
        check=_check_zmq,
    )
    kv_events_topic: str = setting(
        "",
        help="Topic of KV events; llm-d expects kv@POD_IP:PORT@MODEL; default: kv@router@MODEL.",
        topic=Topic.OBSERVABILITY,
    )

    max_request_items: int = setting(1 << 18, above=0)
    """The maximum number of fields, strings and list entries of a request, counted before it is parsed.

    In a JSON body, at most a quarter of this number may be strings, lists and objects. A prompt that is a list of token
    ids may have as many ids as the model's context.
    """
    max_tokenizing_bytes: int = setting(32 << 20, above=0)
    """The maximum number of bytes of prompts that wait for parsing and tokenization (about one second per MiB).

    Above the limit, the router rejects the newest request of the tenant with the most waiting bytes.
    """
    max_queued_requests: int = 1024
    """The maximum number of requests that wait for a worker; further ones are rejected at once."""
    max_queued_per_tenant: int | None = setting(None, least=1)
    """The maximum number of waiting requests per API key.

    None = half of `max_queued_requests` if there are several keys, otherwise all of them.
    """
    goodput_window_s: float = setting(60.0, above=0)
    """The length of the sliding window over which goodput is measured, in seconds."""
    traces_kept: int = setting(512, above=0)
    """The number of most recently ended requests whose timelines are kept, in addition to the slowest requests."""
    slow_window_s: float = setting(60.0, above=0)
    """The length of the window in which the router keeps the slowest request of each latency bucket, in seconds."""
    max_deferral_s: float = setting(30.0, above=0)
    """The maximum time for which requests with a TTFT target may overtake a request without a target, in seconds."""
    max_choices: int = 16
    """The maximum number of answers to one request (`n`); each answer counts as a separate request."""
    max_stop_strings: int = 16
    """The maximum number of stop strings of a request."""
    max_stop_chars: int = 256
    """The maximum length of a stop string, in characters."""
    max_stop_token_ids: int = 64
    """The maximum number of stop token ids of a request."""
    max_template_kwargs_bytes: int = 16 << 10
    """The maximum size of a request's `chat_template_kwargs`, in bytes of JSON."""
    sse_comment_s: float = setting(10.0, above=0)
    """Seconds without an event after which the router sends a comment, so that proxies keep the connection open."""
    max_attempts: int = 3
    """The maximum number of failed attempts of a request before its error is returned to the client."""
    retry_after_s: float = 1.0
    """The retry hint (Retry-After), in seconds, of errors that report a full queue or a missing worker."""
    rpc_timeout_s: float = 10.0
    """The deadline of a call to a worker, in seconds."""
    queue_timeout_s: float = 120.0
    """The maximum time of a request in the queue, in seconds."""
    stall_timeout_s: float = 120.0
    """The maximum time without an event from the workers of a placed request, in seconds."""
    chunks_per_s: float | None = None
    """Chunks per second, over all answers, above which the router puts several tokens into each chunk.

    None = `CPU_CHUNKS_PER_S` or `GPU_CHUNKS_PER_S`. A chunk costs about 100 µs in the router and as much at the client,
    on a CPU that the engine may need. First and last tokens are never delayed, nor are tokens whose ITL target the
    delay would violate.
    """
    chunk_delay_max_s: float = 0.025
    """The maximum time in seconds for which a token is held back to share a chunk with later tokens."""
    tokenizer_threads: int = setting(2, above=0)
    """The number of threads that parse large requests and encode prompts."""

    def check(self, name_of: NameOf = field_name) -> None:
        """Check the settings; see `Settings.check`."""
        Settings.check(self, name_of)
        names = classes_by_name(self.slo_classes)
        if self.default_slo_class not in names:
            name = name_of(self.__dataclass_fields__["default_slo_class"])
            refuse(name, f"{self.default_slo_class!r} is not one of the classes {', '.join(names)}")

    @property
    def guarded(self) -> bool:
        """True if clients need an API key."""
        return bool(self.api_keys) or self.api_key_file is not None
