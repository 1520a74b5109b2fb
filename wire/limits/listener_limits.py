"""What a server that strangers reach grants to connections and calls, before anything is known of them."""

import resource
from dataclasses import dataclass, fields

_FILES_SHARE = 3
"""A server's connections may take one in so many of its process's files: there are two servers, and other things."""


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Limits of each server, HTTP or gRPC, of a process. All times in seconds."""

    max_request_bytes: int = 4 << 20
    """Largest request, in bytes."""
    max_connections: int = 16_384
    """Most connections that are open at once, as far as the process may have files. Where one more comes over HTTP,
    the one goes that has waited longest for a request."""
    max_calls: int = 8_192
    """Most calls in progress at once; calls that ask for health are counted apart."""
    header_timeout_s: float = 10.0
    """A connection's longest time to its first request, and each request's for the rest of its header."""
    body_timeout_s: float = 60.0
    """Each request's longest time for its body, or a gRPC call's for its message."""
    idle_timeout_s: float = 75.0
    """Longest time between two requests of a connection."""
    unread_timeout_s: float = 60.0
    """Longest time that a client may leave what was written for it unread, while its buffers are full."""
    keepalive_s: float = 20.0
    """A silent client is asked every so many seconds whether it is there; one that does not answer for as long is
    gone, and its answers are aborted."""

    def __post_init__(self) -> None:
        """InvalidArgument names the setting and what is wrong with it."""
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0:
                from wire.errors import InvalidArgument  # brings gRPC, which `tandem --help` does without

                raise InvalidArgument(each.name, f"is {value:g}, it must be above 0")

    @property
    def connections(self) -> int:
        """`max_connections`, as far as this process may open files."""
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.max_connections
        return min(self.max_connections, files // _FILES_SHARE)


DEFAULT_LIMITS = ListenerLimits()
