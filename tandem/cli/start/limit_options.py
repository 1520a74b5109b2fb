"""Options of `tandem up` for limits of every client, which apply before its request is read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.net.limits.listener_limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from tandem.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of sizes, counts and durations at the ports for clients; see `tandem.net.limits.listener_limits`."""

    max_request_bytes: Annotated[int, typer.Option(help="Largest request, in bytes.")] = (
        DEFAULT_LIMITS.max_request_bytes
    )
    max_messages: Annotated[int, typer.Option(help="Maximum messages of a conversation.")] = 4096
    max_connections: Annotated[
        int, typer.Option(help="Maximum connections at each port, within the limit of open files.")
    ] = DEFAULT_LIMITS.max_connections
    max_calls: Annotated[int, typer.Option(help="Maximum calls in progress at each port; more are rejected, 429.")] = (
        DEFAULT_LIMITS.max_calls
    )
    header_timeout: Annotated[float, typer.Option(help="Seconds a client may take for a request's header.")] = (
        DEFAULT_LIMITS.header_timeout_s
    )
    body_timeout: Annotated[float, typer.Option(help="Seconds a client may take for a request's body.")] = (
        DEFAULT_LIMITS.body_timeout_s
    )
    idle_timeout: Annotated[float, typer.Option(help="Seconds that a connection may be open between requests.")] = (
        DEFAULT_LIMITS.idle_timeout_s
    )
    unread_timeout: Annotated[float, typer.Option(help="Seconds that a client may leave its answer unread.")] = (
        DEFAULT_LIMITS.unread_timeout_s
    )
    keepalive: Annotated[float, typer.Option(help="Seconds between keepalive pings to a silent client.")] = (
        DEFAULT_LIMITS.keepalive_s
    )

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        from tandem.net.limits.listener_limits import ListenerLimits
        from tandem.protocol.errors import InvalidArgument

        if self.max_messages < 1:
            raise InvalidArgument("--max-messages", f"is {self.max_messages}, it must be above 0")
        values = {each.name: getattr(self, each.name.removesuffix("_s")) for each in fields(ListenerLimits)}
        try:
            listeners = ListenerLimits(**values)
            return replace(config, listeners=listeners, max_messages=self.max_messages)
        except InvalidArgument as error:
            option = f"--{error.field.removesuffix('_s').replace('_', '-')}"
            raise InvalidArgument(option, error.message.partition(": ")[2]) from error
