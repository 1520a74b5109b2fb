"""`tandem doctor`: checks if this machine is ready, and says what to do if it is not."""

import stat
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.diagnosis.checks import Check, Level
from tandem.cli.plain_errors import FAILED, plain_errors
from tandem.net.security.api_keys import KeyRole, read_keys
from tandem.net.security.server_tls import load, tls_files
from tandem.protocol.errors import InvalidArgument

if TYPE_CHECKING:
    from tandem.cli.diagnosis.checks import Check

_SOON = timedelta(days=14)


def check_key_file(file: str) -> list[Check]:
    """Check a router's file of API keys; "" = no file, no checks."""
    if not file:
        return []
    try:
        keys = read_keys("--api-key-file", Path(file))
        mode = Path(file).stat().st_mode
    except (InvalidArgument, OSError) as error:
        return [Check("API keys", Level.FAIL, str(error), "correct the file; `tandem up` would not start with it")]
    roles = Counter(key.role for key in keys)
    found = ", ".join(f"{roles[role]} of role {role}" for role in KeyRole if roles[role])
    if mode & stat.S_IROTH:
        return [Check("API keys", Level.WARN, f"every user of this host may read {file}", f"chmod o-r {file}")]
    return [Check("API keys", Level.OK, found)]


def check_certificate(certificate: str, key: str, client_ca: str, now: datetime | None = None) -> list[Check]:
    """Check the certificate of a router's client ports at the time `now`, by default the present.

    Without files there are no checks.
    """
    try:
        files = tls_files(certificate, key, client_ca)
        if files is None:
            return []
        ends = load(files).expires
    except InvalidArgument as error:
        advice = "correct the file; `tandem up` would not start with it"
        return [Check("certificate", Level.FAIL, error.message, advice)]
    found = f"valid until {ends:%Y-%m-%d %H:%M} UTC"
    if ends - (now or datetime.now(UTC)) < _SOON:
        advice = "renew it; a running router reads the new one from the same files"
        return [Check("certificate", Level.WARN, found, advice)]
    return [Check("certificate", Level.OK, found)]


COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


@plain_errors
def doctor(
    *,
    host: Annotated[str, typer.Option("--host", help="Address that the router would listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option("--grpc-port", help="Port to look at.")] = 50051,
    http_port: Annotated[int, typer.Option("--http-port", help="Port to look at.")] = 8000,
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
