"""Settings of one cluster on one host."""

from dataclasses import dataclass
from pathlib import Path

from wire.errors import InvalidArgument

PORT_MAX = 65535
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What to serve, with how many workers, and where clients find it."""

    model: Path
    """Folder in Hugging Face layout, already checked."""
    model_name: str = ""
    """The name clients use; empty = the folder's name."""
    prefill: int = 1
    """Prefill workers, >= 1."""
    decode: int = 1
    """Decode workers, >= 1."""
    device: str = "cpu"
    """`cpu`, or `cuda`: then workers spread over the GPUs that are there."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`, of weights and KV."""
    page_tokens: int | None = None
    """Tokens a KV page holds; None = 16 on CPU, 128 on GPUs."""
    kv_cache_bytes: int = 1 << 30
    """KV page pool of each worker, in bytes."""
    max_step_tokens: int = 2048
    """Most tokens a worker computes in one step: the chunk size of prefill."""
    max_batch_requests: int = 64
    """Most requests of one decode step."""
    threads: int | None = None
    """CPU threads of each worker's engine; None = all cores, for every worker."""
    host: str = "127.0.0.1"
    """Address the router listens on; workers and the controller always stay on loopback."""
    grpc_port: int = 50051
    """Port of the router's gRPC server; 0 = any free one."""
    http_port: int = 8000
    """Port of the router's HTTP server; 0 = any free one."""
    api_keys: tuple[str, ...] = ()
    """Keys clients may present; none = no key is asked for."""
    start_timeout_s: float = 180.0
    """How long the first start of all workers may take, in seconds."""

    def __post_init__(self) -> None:
        """InvalidArgument names the option and its limit."""
        for option, value in (("--prefill", self.prefill), ("--decode", self.decode)):
            if not 1 <= value <= 64:
                raise InvalidArgument(option, f"{value} is not between 1 and 64")
        if self.page_tokens is not None and not 1 <= self.page_tokens <= 1024:
            raise InvalidArgument("--page-tokens", f"{self.page_tokens} is not between 1 and 1024")
        if self.kv_cache_bytes < 1 << 20:
            raise InvalidArgument("--kv-cache-gib", f"{self.kv_cache_bytes / (1 << 30):g} is less than 0.001 GiB")
        for option, number in (
            ("--max-step-tokens", self.max_step_tokens),
            ("--max-batch-requests", self.max_batch_requests),
            ("--threads", 1 if self.threads is None else self.threads),
        ):
            if number < 1:
                raise InvalidArgument(option, f"{number} is less than 1")
        for option, port in (("--grpc-port", self.grpc_port), ("--http-port", self.http_port)):
            if not 0 <= port <= PORT_MAX:
                raise InvalidArgument(option, f"{port} is not a port (0 to {PORT_MAX})")
        if self.device.split(":")[0] not in ("cpu", "cuda"):
            raise InvalidArgument("--device", f"{self.device!r} is neither cpu nor cuda")
        if self.dtype not in DTYPES:
            raise InvalidArgument("--dtype", f"{self.dtype!r} is none of {', '.join(DTYPES)}")
