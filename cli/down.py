"""`tandem down`: stop the running cluster and wait until it is gone."""

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from cli.state import RunningCluster


@plain_errors
def down(
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for it to end, beside its --stop-grace.")
    ] = 30.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Stop every cluster of this user, not just the newest.")
    ] = False,
) -> None:
    """Stop the cluster that `tandem up` started."""
    from cli.state import running
    from cluster.temp_folder import remove_abandoned

    clusters = running()
    cleared = remove_abandoned()
    if cleared:
        print(f"cleared up after {len(cleared)} killed cluster{'s' * (len(cleared) > 1)}")
    elif not clusters:
        print("no cluster is running; nothing to stop")
    for cluster in clusters if everything else clusters[:1]:
        _stop(cluster, timeout)
    if not everything and len(clusters) > 1:
        print(f"{len(clusters) - 1} more still running; `tandem down --all` stops them too")


def _stop(cluster: "RunningCluster", timeout: float) -> None:
    """Ctrl-C from afar: on SIGTERM workers that may outlive it would. DeadlineExceeded if the process stays."""
    import signal
    import time

    import psutil

    from wire.errors import DeadlineExceeded

    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(cluster.pid).send_signal(signal.SIGINT)
    timeout += cluster.stop_grace_s
    give_up = time.monotonic() + timeout
    while cluster.alive:
        if time.monotonic() > give_up:
            raise DeadlineExceeded(
                f"process {cluster.pid} did not end within {timeout:g} s; stop it with `kill -9 {cluster.pid}`"
            )
        time.sleep(0.05)
    print(f"stopped the cluster that served {cluster.model} (process {cluster.pid})")
