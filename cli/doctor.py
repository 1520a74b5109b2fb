"""`tandem doctor`: is this machine ready, and if not, what to do."""

from typing import TYPE_CHECKING, Annotated

import typer

from cli.plain_errors import FAILED, plain_errors

if TYPE_CHECKING:
    from cli.checks import Check

COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@plain_errors
def doctor(
    host: Annotated[str, typer.Option("--host", help="Address the router would listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="Port to look at.")] = 50051,
    http_port: Annotated[int, typer.Option("--http-port", help="Port to look at.")] = 8000,
) -> None:
    """Check Python, PyTorch, GPUs, Ray, NIXL, RDMA, ports, /dev/shm and cores; fails if a start would."""
    from rich.console import Console

    from cli.checks import Level, all_checks
    from cli.state import running
    from cluster.limits import check_ports

    check_ports(grpc_port, http_port)
    ours = {int(door.rpartition(":")[2]): one.pid for one in running() for door in (one.grpc, one.http)}
    console, failed = Console(soft_wrap=True, highlight=False), False
    for group in all_checks(host, grpc_port, http_port, ours):
        for check in group():
            console.print(line(check))
            failed |= check.level is Level.FAIL
    if failed:
        raise typer.Exit(FAILED)


def line(check: "Check") -> str:
    """A check as one line with rich's colours."""
    from rich.markup import escape

    colour = COLOURS[check.level.value]
    advice = f" [dim]→ {escape(check.advice)}[/]" if check.advice else ""
    return f"[{colour}]{check.level.value:<4}[/] [bold]{escape(check.name)}[/]: {escape(check.found)}{advice}"
