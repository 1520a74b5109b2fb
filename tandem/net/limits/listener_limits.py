"""The limits of public servers for connections and calls before authentication."""

import resource
from dataclasses import dataclass, fields

_FILES_SHARE = 3
"""Each of two servers may use at most one third of the process's file descriptors for connections."""


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """The limits of each HTTP or gRPC server of a process. All times are in seconds."""

    max_request_bytes: int = 4 << 20
    """Largest request, in bytes."""
    max_connections: int = 16_384
    """Most open connections, within the limit of file descriptors.

    If one more HTTP connection comes, the one that has waited longest for a request is closed.
    """
    max_calls: int = 8_192
    """Most calls in progress; calls of the health service are counted separately."""
    header_timeout_s: float = 10.0
    """Longest time to a connection's first request, and from the first byte to the end of a request's header."""
    body_timeout_s: float = 60.0
    """Longest time for a request's body or a gRPC call's message."""
    idle_timeout_s: float = 75.0
    """Longest time between two requests of a connection."""
    unread_timeout_s: float = 60.0
    """Longest time for which a client with full buffers may read nothing."""
    keepalive_s: float = 20.0
    """Interval of keep-alive probes, and the time without a response after which a client's calls are aborted."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument with the name of a limit that is not above 0."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0:
                from tandem.protocol.errors import InvalidArgument  # brings gRPC, which `tandem --help` does without

                raise InvalidArgument(each.name, f"is {value:g}, it must be above 0")

    @property
    def connections(self) -> int:
        """Most connections, within `max_connections` and the process's limit of file descriptors."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.max_connections
        return min(self.max_connections, files // _FILES_SHARE)


DEFAULT_LIMITS = ListenerLimits()
