"""A kept process that is a Ray actor: its death shows on a call that stays pending for its whole life."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from cluster.supervision.process_supervisor import Process
from kv_transfer.nixl_backend import processes

PID_TIMEOUT_S = 120.0


def actor_class(plain: type) -> Any:
    """`plain` as a Ray actor class, to be given `options` and created."""
    import ray

    return ray.remote(plain)


def on_this_node() -> Any:
    """Where this process is: the node for actors that must not be anywhere else."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def node_address() -> str:
    """The address at which all other nodes reach this one; loopback where there are none."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


async def node_is_up(address: str) -> bool:
    """Whether a node of this address is in the cluster."""
    import ray

    nodes = await asyncio.to_thread(ray.nodes)
    return any(node["Alive"] and node["NodeManagerAddress"] == address for node in nodes)


async def at_once() -> None:
    """For an actor whose node is there."""


class RayProcess(Process):
    """An actor with `pid()`, `identity()` (see `kv_transfer.nixl_backend.processes`), `start()`, `progress()`,
    `works()` (answers as long as its event loops do), `run()` (pending until it stops) and `stop()`. Owns the actor.

    `on_start` is called with what `start()` returned; `placed` waits until the actor has a node. One that has started
    before has a `start` of its own, which makes it this process's.
    """

    def __init__(
        self,
        actor: Any,
        on_start: Callable[[Any], None] = lambda _: None,
        placed: Callable[[], Awaitable[None]] = at_once,
        start: Callable[[], Any] | None = None,
    ) -> None:
        self._actor = actor
        self._begin = start or actor.start.remote
        self._on_start = on_start
        self._placed = placed
        self._pid, self._identity = 0, ""
        self._life = actor.run.remote()

    async def placed(self) -> None:
        await self._placed()

    async def pid(self) -> int:
        async with asyncio.timeout(PID_TIMEOUT_S):
            self._identity = str(await self._actor.identity.remote())
            self._pid = int(await self._actor.pid.remote())
            return self._pid

    async def start(self) -> None:
        self._on_start(await plainly(self._begin()))

    async def progress(self) -> tuple[str, float]:
        stage, fraction = await self._actor.progress.remote()
        return str(stage), float(fraction)

    async def ended(self) -> str:
        from ray.exceptions import RayActorError

        try:
            await self._life
        except RayActorError:
            return "the process died"
        except Exception as error:
            return str(_cause(error))
        return "the process stopped by itself"

    async def works(self) -> None:
        await self._actor.works.remote()

    async def kill(self) -> None:
        import ray

        # Here, where it can be seen, it is gone at once, with its ports and its memory. Elsewhere the node's Ray does
        # it, which gives every process some seconds to end by itself.
        if self._identity and processes.lives(self._identity):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        ray.kill(self._actor, no_restart=True)

    async def end(self, grace_s: float) -> None:
        import ray

        # Dead, stuck or too slow: the kill settles all three.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(grace_s):
                await self._actor.stop.remote()
        ray.kill(self._actor, no_restart=True)


async def plainly(reply: Any) -> Any:
    """A call's result, or the error the actor raised without Ray's traceback around it."""
    try:
        return await reply
    except Exception as error:
        cause = _cause(error)
        if cause is error:
            raise
        raise cause from None


def _cause(error: Exception) -> Exception:
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
