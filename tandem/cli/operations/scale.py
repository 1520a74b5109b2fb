"""`tandem scale`: changes the number of workers in a running cluster."""

from typing import Annotated

import typer

from tandem.cli.connection.options import ControllerOptions, Grace, checked_grace
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors


@plain_errors
@option_groups
def scale(
    *,
    prefill: Annotated[int | None, typer.Option(help="Prefill workers when disaggregated; default: unchanged.")] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers when disaggregated; default: unchanged.")] = None,
    workers: Annotated[int | None, typer.Option(help="Workers when colocated or adaptive.")] = None,
    grace: Grace = 30.0,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for new workers; later ones start when a node has capacity.")
    ] = 180.0,
    controller: ControllerOptions,
) -> None:
    """Start more workers, or drain surplus ones, while requests run."""
    import asyncio

    from tandem.protocol.errors import InvalidArgument

    counts = {"prefill": prefill, "decode": decode, "workers": workers}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InvalidArgument(f"--{name}", f"{count} is less than 1")
    if all(count is None for count in counts.values()):
        raise InvalidArgument("--workers", "say how many: --prefill, --decode or --workers")
    if not wait >= 0:
        raise InvalidArgument("--wait", f"{wait:g} is below 0")
    asked = {name: count or 0 for name, count in counts.items()}
    client = controller.client()
    infos, seconds = asyncio.run(client.resize(**asked, grace_s=checked_grace(grace), wait_s=wait))
    for info in infos:
        print(f"{info.peer.worker_id}: {info.role}")
    print(f"{len(infos)} workers serve, after {seconds:.1f} s")
