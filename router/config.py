"""Settings of one router."""

from dataclasses import dataclass
from pathlib import Path


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
    api_keys: tuple[str, ...] = ()
    """Keys that clients may show at either door; empty = no key is asked for."""
    host: str = "127.0.0.1"
    """Address both doors listen on."""
    grpc_port: int = 50051
    """Port of the gRPC door; 0 = any free one."""
    http_port: int = 8000
    """Port of the HTTP door; 0 = any free one."""
    max_request_bytes: int = 4 << 20
    """Largest request either door takes, in bytes."""
    max_queued_requests: int = 1024
    """Most requests that wait for a worker; the next one is turned away at once."""
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
    100 µs here and as much at the client, on a CPU that the engine may need. First and last tokens never wait."""
    chunk_delay_max_s: float = 0.025
    """Longest a token waits for others to travel with, in seconds."""
    tokenizer_threads: int = 2
    """Threads that encode prompts."""
