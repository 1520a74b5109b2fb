"""`tandem down`: stops the running cluster or ends orphaned workers, and returns when their processes have ended."""

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.plain_errors import plain_errors
from tandem.settings.cluster import DEFAULT_NAME

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tandem.cli.connection.state import RunningCluster

LOOK_S = 0.05


@plain_errors
def down(
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for its end, in addition to its --stop-grace.")
    ] = 30.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Stop every cluster of this user, not just the newest.")
    ] = False,
    address: Annotated[
        str,
        typer.Option(
            "--address",
            help="End, at once, the workers that wait on the Ray cluster at HOST:PORT or auto for another `tandem up`; "
            "from a host that belongs to it.",
        ),
    ] = "",
    cluster_name: Annotated[
        str, typer.Option("--cluster-name", help="The --cluster-name of those workers.")
    ] = DEFAULT_NAME,
) -> None:
    """Stop the cluster that `tandem up` started, or, with --address, end workers that have outlived theirs."""
    if address:
        _clear(address, cluster_name, everything=everything)
    else:
        _stop_those_here(timeout, cluster_name, everything=everything)


def _clear(address: str, name: str, *, everything: bool) -> None:
    from tandem.cluster.leadership.orphan_cleanup import clear_ray
    from tandem.protocol.errors import InvalidArgument

    if everything:
        raise InvalidArgument("--all", "is for clusters of this host; leave it out where --address is given")
    cleared = clear_ray(address, name)
    workers, groups = (", ".join(names) for names in (cleared.workers, cleared.groups))
    print(f"ended {workers or 'no worker'}; released the resources of {groups or 'no worker'}")


def _stop_those_here(timeout: float, name: str, *, everything: bool) -> None:
    from tandem.cli.connection.state import running
    from tandem.cluster.ray_processes.temp_folder import remove_abandoned
    from tandem.protocol.errors import InvalidArgument

    if name != DEFAULT_NAME:
        raise InvalidArgument("--cluster-name", "is for workers on a Ray that was joined; add its --address")
    clusters = running()
    cleared = remove_abandoned()
    if cleared:
        print(f"cleaned up after {len(cleared)} killed cluster{'s' * (len(cleared) > 1)}")
    elif not clusters:
        print("no cluster is running; nothing to stop")
    _stop(clusters if everything else clusters[:1], timeout)
    if not everything and len(clusters) > 1:
        print(f"{len(clusters) - 1} more still running; `tandem down --all` stops them too")


def _stop(clusters: "Sequence[RunningCluster]", timeout: float) -> None:
    """Send SIGINT to each cluster and wait for its end. Raises DeadlineExceeded, which names those that still run.

    SIGINT is sent rather than SIGTERM, because with SIGTERM the workers may be left running.
    """
    import signal
    import time

    import psutil

    from tandem.protocol.errors import DeadlineExceeded

    for cluster in clusters:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(cluster.pid).send_signal(signal.SIGINT)
    began, late = time.monotonic(), []
    for cluster in clusters:
        within = timeout + cluster.stop_grace_s
        while cluster.alive and time.monotonic() < began + within:
            time.sleep(LOOK_S)
        if cluster.alive:
            late.append((cluster.pid, f"process {cluster.pid} did not end within {within:g} s"))
        else:
            print(f"stopped the cluster that served {cluster.model} (process {cluster.pid})")
    if late:
        pids = " ".join(str(pid) for pid, _ in late)
        raise DeadlineExceeded(f"{', '.join(text for _, text in late)}; stop with `kill -9 {pids}`")
