"""`tandem doctor`: checks if this machine is ready, and says what to do if it is not."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.plain_errors import FAILED, plain_errors
from tandem.settings.router import RouterSettings

if TYPE_CHECKING:
    from tandem.cli.diagnosis.checks import Check

_DEFAULTS = RouterSettings()
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@plain_errors
def doctor(
    *,
    host: Annotated[str, typer.Option("--host", help="Address that the router would listen on.")] = _DEFAULTS.host,
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="Port to look at.")] = _DEFAULTS.grpc_port,
    http_port: Annotated[int, typer.Option("--http-port", help="Port to look at.")] = _DEFAULTS.http_port,
    api_key_file: Annotated[str, typer.Option("--api-key-file", help="File with API keys to check.")] = "",
    tls_certificate: Annotated[str, typer.Option("--tls-certificate", help="Certificate to check.")] = "",
    tls_key: Annotated[str, typer.Option("--tls-key", help="Its key.")] = "",
    tls_client_ca: Annotated[str, typer.Option("--tls-client-ca", help="Authorities of clients to check.")] = "",
) -> None:
    """Check this machine; fails if `tandem up` would.

    Checks Python, import names, PyTorch, GPUs, Ray, NIXL, RDMA, ports, /dev/shm and cores, and names the ports of
    running workers by which others can write into their memory. Checks files with API keys and certificates if given.
    """
    from rich.console import Console

    from tandem.cli.connection.state import running
    from tandem.cli.diagnosis.access_checks import check_certificate, check_key_file
    from tandem.cli.diagnosis.checks import Level, all_checks
    from tandem.cli.diagnosis.kv_port_checks import check_running_clusters, check_ucx_environment
    from tandem.settings.cluster import ClusterSettings

    ClusterSettings.of(Path(), grpc_port=grpc_port, http_port=http_port)  # raises for an invalid port
    clusters = running()
    ours = {int(listener.rpartition(":")[2]): one.pid for one in clusters for listener in (one.grpc, one.http)}
    groups = all_checks(host, grpc_port, http_port, ours)
    groups += [lambda: check_key_file(api_key_file), lambda: check_certificate(tls_certificate, tls_key, tls_client_ca)]
    groups += [lambda: [check_ucx_environment()], lambda: check_running_clusters(clusters)]
    console, failed = Console(soft_wrap=True, highlight=False), False
    for group in groups:
        for check in group():
            console.print(line(check))
            failed |= check.level is Level.FAIL
    if failed:
        raise typer.Exit(FAILED)


def line(check: "Check") -> str:
    """Return a check as one line with rich's colour markup."""
    from rich.markup import escape

    colour = COLOURS[check.level.value]
    advice = f" [dim]→ {escape(check.advice)}[/]" if check.advice else ""
    return f"[{colour}]{check.level.value:<4}[/] [bold]{escape(check.name)}[/]: {escape(check.found)}{advice}"
