"""`tandem ready`: whether a node may count among those that serve, for probes."""

from typing import Annotated

import typer

from cli.connection.options import ControllerOptions
from cli.option_groups import option_groups
from cli.plain_errors import plain_errors


@plain_errors
@option_groups
def ready(
    *,
    node: Annotated[str, typer.Option("--node", help="The address of the node.")],
    controller: ControllerOptions,
) -> None:
    """Whether a worker at this address serves, or none is on its way anywhere; exits with 1 if not.

    So a node that waits for its workers is not ready, one that nobody needs is.
    """
    import asyncio

    from wire.errors import FailedPrecondition

    client = controller.client()
    workers = asyncio.run(client.workers())
    if any(info.open is not None and info.address.rpartition(":")[0] == node for info in workers):
        print(f"a worker serves at {node}")
        return
    coming = [each for each in asyncio.run(client.absent()) if each.coming]
    if coming:
        message = f"no worker serves at {node}, and {coming[0].worker_id} is on its way: {coming[0].reason}"
        raise FailedPrecondition(message)
    print(f"no worker serves at {node}, and none is on its way")
