"""`tandem status`: the processes of a cluster and their load."""

import re
from datetime import datetime
from typing import TYPE_CHECKING

from tandem.cli.connection.options import RouterOptions
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from rich.table import Table

    from tandem.cli.connection.router import ServerView
    from tandem.protocol.generated.tandem.v1.inference_pb2 import WorkerStatus

WIDE = 200
"""Width in columns of output to a pipe or a file, where lines need not be wrapped."""


@plain_errors
@option_groups
def status(*, router: RouterOptions) -> None:
    """Show the router, its workers, their roles, pages and transports."""
    import sys

    from rich.console import Console

    from tandem.cli.connection.router import view_of

    address, key, tls = router.find(reads=True)
    view = view_of(address, key, tls)
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(summary(address, view), markup=False)
    console.print(worker_table(view))
    for line in [*remarks(view), *absences(router.address)]:
        console.print(line, markup=False)


def absences(address: str) -> list[str]:
    """Return one line per requested worker that does not serve at present.

    Only the controller of a cluster on this host knows these workers, so the result is empty if `address` is given.
    """
    import asyncio

    from tandem.cli.connection.controller_client import ControllerClient
    from tandem.cli.connection.state import newest
    from tandem.protocol.errors import TandemError

    if address:
        return []
    running = newest()
    if not running.controller:
        return []
    try:
        absent = asyncio.run(ControllerClient(running.controller, running.token).absent())
    except TandemError as error:
        return [f"workers that do not serve are not known: {error.message}"]
    return [f"{absence.worker_id} does not serve: {absence.reason}" for absence in absent]


def summary(address: str, view: "ServerView") -> str:
    """Return the router's summary line and a description of the model."""
    line = (
        f"router {address} serves {view.model.model} ({view.model.dtype}, context {view.model.max_context}), "
        f"{view.info.mode}, {view.loads.running} running, {view.loads.waiting} waiting, Tandem {view.info.version}"
    )
    return "\n  ".join((line, *view.model.summary))


def worker_table(view: "ServerView") -> "Table":
    """Return a table with one row for each worker that the router knows."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    # Only workers with tiers of the prefix cache need the column.
    tiers = ("KV tiers",) if any(worker.kv_tiers for worker in view.info.workers) else ()
    columns = ("worker", "role", "steps", "started", "state", "requests", "KV pages", *tiers, "transport", "device")
    for column in columns:
        table.add_column(column, no_wrap=column != "transport")
    for worker in sorted(view.info.workers, key=_role_and_id):
        table.add_row(
            worker.worker_id,
            worker.role,
            worker.step_policy or "-",
            _time_of(worker.started_unix_nanos),
            _state(worker),
            str(worker.requests),
            f"{worker.pages_used} / {worker.pages_total}",
            *[", ".join(worker.kv_tiers) or "-" for _ in tiers],
            worker.transport,
            worker.device,
        )
    return table


def remarks(view: "ServerView") -> list[str]:
    """Return one line per problem: a degraded cluster, workers that are not ready, and warnings of workers."""
    lines = [f"degraded: {view.info.degraded}"] if view.info.degraded else []
    for worker in sorted(view.info.workers, key=_role_and_id):
        lines += [f"{worker.worker_id} is not ready: {worker.not_ready}"] if worker.not_ready else []
        lines += [f"{worker.worker_id}: {warning}" for warning in worker.warnings]
    return lines


def _state(worker: "WorkerStatus") -> str:
    if not worker.connected:
        return "unreachable"
    if worker.draining:
        return "draining"
    if worker.closing:
        return f"closing {worker.closing}"
    return "not ready" if worker.not_ready else "connected"


def _role_and_id(worker: "WorkerStatus") -> tuple[str, list[str | int]]:
    """Return the key that sorts workers by role, then by id with numbers in numerical order (10 after 9)."""
    return worker.role, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", worker.worker_id)]


def _time_of(unix_nanos: int) -> str:
    """Return the date and time in local time, or "-" for 0."""
    if unix_nanos == 0:
        return "-"
    return datetime.fromtimestamp(unix_nanos / 1e9).strftime("%Y-%m-%d %H:%M:%S")
