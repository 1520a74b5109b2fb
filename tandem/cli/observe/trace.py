"""`tandem trace`: one request's timeline, or the recent and slow requests that the router remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.connection.options import MetricsKey, MetricsKeyFile
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from tandem.protocol.lifecycle.request_trace import RequestTrace


@plain_errors
def trace(
    request_id: Annotated[
        str, typer.Argument(help="Id of the request or of its trace; default: list the newest requests.")
    ] = "",
    *,
    slow: Annotated[bool, typer.Option("--slow", help="List the slowest remembered requests.")] = False,
    router: Annotated[
        str,
        typer.Option(
            "--router", envvar="TANDEM_HTTP", help="The router's HTTP host:port; default: the running cluster's."
        ),
    ] = "",
    metrics_key: MetricsKey = "",
    metrics_key_file: MetricsKeyFile = "",
) -> None:
    """Show the phases of a request and their durations."""
    import asyncio
    import sys

    from rich.console import Console

    from tandem.cli.connection.secret_files import one_key
    from tandem.cli.observe.status import WIDE
    from tandem.cli.observe.trace_view import drawn, listed
    from tandem.protocol.errors import InvalidArgument, NotFound

    if slow and request_id:
        raise InvalidArgument("--slow", "lists requests; leave out the id, or the option")
    key = one_key("--metrics-key-file", metrics_key, metrics_key_file)
    found, kept = asyncio.run(_ask(request_id, slow, router, key))
    if request_id and not found:
        remembered = f"the router remembers the {kept} newest that have ended, and slow ones"
        raise NotFound(f"no request or trace {request_id!r} is known; {remembered}")
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    if not request_id:
        console.print(listed(found))
        return
    for each in found:
        console.print(drawn(each))


async def _ask(request_id: str, slow: bool, router: str, key: str) -> tuple[list[RequestTrace], int]:
    from urllib.parse import quote

    from tandem.cli.connection.state import newest
    from tandem.metrics.metrics_server import TRACES_PATH, fetch
    from tandem.protocol.conversion import traces_from_json

    if not router:
        running = newest()
        router, key = running.operations or running.http.removeprefix("http://"), key or running.metrics_key
    query = f"?id={quote(request_id, safe='')}" if request_id else "?slow" if slow else ""
    return traces_from_json(await fetch(router, TRACES_PATH + query, key, timeout_s=5.0))
