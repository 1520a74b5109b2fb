"""`tandem drain`: drains a worker, or all workers of a node."""

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tandem.cli.connection.options import ControllerOptions, Grace, checked_grace
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from tandem.cli.connection.controller_client import ControllerClient


RETRY_FOR_S = 10.0
"""Seconds for which calls of `tandem drain --node` are retried while another controller takes over."""
AGAIN_S = 0.5

Answer = TypeVar("Answer")


@plain_errors
@option_groups
def drain(
    worker: Annotated[str | None, typer.Argument(help="Its name, as in `tandem status`.")] = None,
    *,
    node: Annotated[
        str,
        typer.Option(
            "--node",
            help="Drain all workers at this address, even the last ones, because the node is about to leave the Ray "
            "cluster; they start elsewhere once it has left.",
        ),
    ] = "",
    restart: Annotated[
        bool,
        typer.Option("--restart", help="Start it again once it has drained; at once if it had before."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Even if no other worker serves.")] = False,
    grace: Grace = 30.0,
    controller: ControllerOptions,
) -> None:
    """Drain a worker: it takes no new requests, finishes those it has, and ends; it stays drained without --restart."""
    import asyncio

    from tandem.protocol.errors import InvalidArgument

    if (worker is None) == (not node):
        raise InvalidArgument("WORKER", "give the name of a worker, or --node ADDRESS for all of a node")
    if node and restart:
        raise InvalidArgument("--restart", "is for a WORKER; those of a --node restart by themselves")
    client = controller.client()
    if worker is None:
        asyncio.run(_drain_node(client, node, checked_grace(grace)))
        return
    seconds = asyncio.run(client.drain_worker(worker, grace_s=checked_grace(grace), restart=restart, force=force))
    print(f"{worker} {'serves again' if restart else 'has drained'}, after {seconds:.1f} s")


async def _with_retries(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Make the call `ask`, and retry it for up to `RETRY_FOR_S` while the controller is unavailable."""
    import asyncio
    import time

    from tandem.protocol.errors import Unavailable

    deadline_s = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            return await ask()
        except Unavailable:
            if time.monotonic() > deadline_s:
                raise
        await asyncio.sleep(AGAIN_S)


async def _drain_node(client: "ControllerClient", node: str, grace_s: float) -> None:
    """Drain all workers of a node concurrently. The first failure is raised after all drains have ended."""
    import asyncio

    workers = await _with_retries(client.workers)
    names = [info.peer.worker_id for info in workers if info.address.rpartition(":")[0] == node]
    if not names:
        print(f"no worker serves at {node}; nothing to drain")
        return
    drains = (client.drain_worker(name, grace_s=grace_s, force=True, node_leaves=True) for name in names)
    results = await asyncio.gather(*drains, return_exceptions=True)
    for name, result in zip(names, results, strict=True):
        if isinstance(result, BaseException):
            raise result
        print(f"{name} has drained, after {result:.1f} s")
