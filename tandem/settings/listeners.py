"""The limits that the public servers apply to connections and to calls before authentication."""

from dataclasses import dataclass

from tandem.settings.setting import Settings, Topic, setting

_FILES_SHARE = 3
"""Each of the two servers (HTTP, gRPC) may use 1 / `_FILES_SHARE` of the file descriptors of the process."""


@dataclass(frozen=True, slots=True)
class ListenerLimits(Settings):
    """The limits of each HTTP or gRPC server of a process. All times are in seconds."""

    max_request_bytes: int = setting(4 << 20, help="Largest request, in bytes.", topic=Topic.LIMITS, above=0)
    max_connections: int = setting(
        16_384,
        help="Maximum connections at each port, within the limit of open files.",
        topic=Topic.LIMITS,
        above=0,
    )
    """At the limit, a new HTTP connection makes the server close the one that has been idle for longest."""
    max_calls: int = setting(
        8_192,
        help="Maximum calls in progress at each port; more are rejected, 429.",
        topic=Topic.LIMITS,
        above=0,
    )
    """Calls of the health service are counted separately."""
    header_timeout_s: float = setting(
        10.0, help="Seconds a client may take for a request's header.", topic=Topic.LIMITS, above=0
    )
    """The timeout also applies from the opening of a connection to its first request.

    For later requests, it runs from the first byte of the header to its end.
    """
    body_timeout_s: float = setting(
        60.0, help="Seconds a client may take for a request's body.", topic=Topic.LIMITS, above=0
    )
    """The same limit applies to the message of a gRPC call."""
    idle_timeout_s: float = setting(
        75.0, help="Seconds that a connection may be open between requests.", topic=Topic.LIMITS, above=0
    )
    unread_timeout_s: float = setting(
        60.0, help="Seconds that a client may leave its answer unread.", topic=Topic.LIMITS, above=0
    )
    keepalive_s: float = setting(
        20.0, help="Seconds between keepalive pings to a silent client.", topic=Topic.LIMITS, above=0
    )
    """If a ping is not answered within the same time, the client's calls are aborted."""

    def __post_init__(self) -> None:
        """Raise InvalidArgument, which names the limit, if a limit is not above 0."""
        self.check()

    @property
    def connections(self) -> int:
        """The maximum number of connections: `max_connections`, or less if the process has few file descriptors."""
        # Windows does not have it; commands there import this module, too.
        import resource

        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files == resource.RLIM_INFINITY:
            return self.max_connections
        return min(self.max_connections, files // _FILES_SHARE)


DEFAULT_LIMITS = ListenerLimits()
