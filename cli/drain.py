"""`tandem drain`: let a worker finish what it has and end."""

from typing import Annotated

import typer

from cli.options import ClusterToken, ControllerAddress, Grace, checked_grace, controller
from cli.plain_errors import plain_errors


@plain_errors
def drain(
    worker: Annotated[str, typer.Argument(help="Its name, as in `tandem status`.")],
    *,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start it again afterwards; one drained before starts at once.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if no other worker serves.")] = False,
    grace: Grace = 30.0,
    controller_address: ControllerAddress = "",
    token: ClusterToken = "",
) -> None:
    """Take a worker out of the cluster: it takes nothing new, finishes what it has, ends, and stays away."""
    import asyncio

    seconds = asyncio.run(
        controller(controller_address, token).drain_worker(
            worker, grace_s=checked_grace(grace), restart=restart, force=force
        )
    )
    print(f"{worker} {'serves again' if restart else 'has drained'}, after {seconds:.1f} s")
