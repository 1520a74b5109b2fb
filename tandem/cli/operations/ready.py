"""`tandem ready`: a readiness probe for the nodes of a cluster."""

from typing import Annotated

import typer

from tandem.cli.connection.options import ControllerOptions
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors


@plain_errors
@option_groups
def ready(
    *,
    node: Annotated[str, typer.Option("--node", help="The address of the node.")],
    controller: ControllerOptions,
) -> None:
    """Check that a worker at this address serves, or that no worker of the cluster is starting; exit with 1 if not.

    A node is therefore not ready while its workers start, but ready if no worker needs it.
    """
    import asyncio

    from tandem.protocol.errors import FailedPrecondition

    client = controller.client()
    workers = asyncio.run(client.workers())
    if any(info.open is not None and info.address.rpartition(":")[0] == node for info in workers):
        print(f"a worker serves at {node}")
        return
    coming = [absence for absence in asyncio.run(client.absent()) if absence.coming]
    if coming:
        message = f"no worker serves at {node}, and {coming[0].worker_id} is starting: {coming[0].reason}"
        raise FailedPrecondition(message)
    print(f"no worker serves at {node}, and none is starting")
