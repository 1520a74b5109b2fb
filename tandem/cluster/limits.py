"""Limits of numbers that describe a cluster, for callers that check some of them before there is a whole config."""

from tandem.protocol.errors import InvalidArgument

_PORT_MAX = 65535
_KV_CACHE_GIB_MIN, _KV_CACHE_GIB_MAX = 1 / 1024, 1024 * 1024


def check_kv_cache_gib(size: float) -> None:
    """Checks a KV cache size in GiB; raises InvalidArgument unless it is 1/1024 to 1048576."""
    if not _KV_CACHE_GIB_MIN <= size <= _KV_CACHE_GIB_MAX:
        limits = f"{_KV_CACHE_GIB_MIN:.3f} and {_KV_CACHE_GIB_MAX}"
        raise InvalidArgument("--kv-cache-gib", f"{size:g} is not between {limits}")


def check_ports(
    grpc_port: int, http_port: int, metrics_port: int = 0, controller_port: int = 0, operations_port: int = 0
) -> None:
    """Checks ports; raises InvalidArgument for a number that is no port, or for one port given to two listeners."""
    taken: dict[int, str] = {}
    listeners = ("--grpc-port", grpc_port), ("--http-port", http_port)
    internal = ("--metrics-port", metrics_port), ("--controller-port", controller_port)
    for option, port in (*listeners, *internal, ("--operations-port", operations_port)):
        if not 0 <= port <= _PORT_MAX:
            raise InvalidArgument(option, f"{port} is not a port (0 to {_PORT_MAX})")
        if port and port in taken:
            raise InvalidArgument(option, f"{port} is {taken[port]} too; each listener needs a port of its own")
        taken[port] = option
