"""A supervised process that is a Ray actor; its end is detected by a pending call of the actor's `run`."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from kv_transfer.nixl_backend import processes
from tandem.cluster.supervision.process_supervisor import Process
from tandem.protocol.errors import DeadlineExceeded

PID_TIMEOUT_S = 120.0
_SHARE_OF_NODE = 0.001
"""Fraction of a node's `node:<address>` resource that a placement group requests: a node offers 1; 0 is not allowed."""


def actor_class(plain: type) -> Any:
    """Return the Ray actor class of the plain class `plain`; the caller sets `options` and creates the actor."""
    import ray

    return ray.remote(plain)


def on_this_node() -> Any:
    """Return a scheduling strategy for actors that must run on this process's node."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def place_here() -> Any:
    """Return a placement group on this process's node, for actors that end with this process.

    Ray ends the actors of a placement group when the job that created the group ends. A detached actor in the group,
    such as a router, therefore outlives the controller that created the actor, but not the job.
    """
    import ray
    from ray.util.placement_group import placement_group

    me = ray.get_runtime_context().get_node_id()
    address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == me)
    return placement_group([{f"node:{address}": _SHARE_OF_NODE}])


def in_group(group: Any) -> Any:
    """Return a scheduling strategy for actors in this placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return PlacementGroupSchedulingStrategy(group)


def node_address() -> str:
    """Return the address at which all other nodes reach this node; loopback if there are no other nodes."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


async def node_is_up(address: str) -> bool:
    """Return True if a node of this address is in the cluster."""
    import ray

    nodes = await asyncio.to_thread(ray.nodes)
    return any(node["Alive"] and node["NodeManagerAddress"] == address for node in nodes)


async def at_once() -> None:
    """Return immediately: the default of `RayProcess.placed`, for an actor whose node is known."""


class RayProcess(Process):
    """A supervised process that is a Ray actor; this object owns the actor.

    The actor has `pid()`, `identity()` (see `kv_transfer.nixl_backend.processes`), `start()`, `progress()`, `works()`
    (responds as long as its event loops do), `run()` (pending until the actor stops) and `stop()`. `on_start` is called
    with the result of the actor's start; `placed` waits until the actor has a node. `start` is called instead of the
    actor's `start()`, e.g. for an actor that runs already and only has to register with this controller.
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
        """Wait until the actor has a node."""
        await self._placed()

    async def pid(self) -> int:
        """Return the actor's process id, and remember the process's identity for `kill`.

        Raises DeadlineExceeded if the process does not respond in time.
        """
        try:
            async with asyncio.timeout(PID_TIMEOUT_S):
                self._identity = str(await self._actor.identity.remote())
                self._pid = int(await self._actor.pid.remote())
                return self._pid
        except TimeoutError:
            raise DeadlineExceeded(
                f"its process did not respond within {PID_TIMEOUT_S:g} s; its host may be overloaded or short of"
                " memory: stop other programs there, and start it again"
            ) from None

    async def start(self) -> None:
        """Start the actor; return when it serves."""
        self._on_start(await plainly(self._begin()))

    async def progress(self) -> tuple[str, float]:
        """Return the current activity of the start and the fraction of it that is done."""
        stage, fraction = await self._actor.progress.remote()
        return str(stage), float(fraction)

    async def ended(self) -> str:
        """Wait until the actor is gone, and return the reason."""
        from ray.exceptions import RayActorError

        try:
            await self._life
        except RayActorError:
            return "the process died"
        except Exception as error:
            return str(_cause(error))
        return "the process stopped by itself"

    async def works(self) -> None:
        """Return once the actor's event loops have responded."""
        await self._actor.works.remote()

    async def kill(self) -> None:
        """Kill the actor's process at once."""
        import ray

        # A process on this host is killed directly: it is gone at once, with its ports and its memory. On other hosts
        # the node's Ray kills the process, after some seconds in which it may end by itself.
        if self._identity and processes.process_alive(self._identity):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)
        ray.kill(self._actor, no_restart=True)

    async def end(self, grace_s: float) -> None:
        """Stop the actor, and kill it after `grace_s` seconds."""
        import ray

        # The kill below covers an actor that is dead, hangs or is too slow.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(grace_s):
                await self._actor.stop.remote()
        ray.kill(self._actor, no_restart=True)


async def plainly(reply: Any) -> Any:
    """Return a call's result, or raise the actor's error without Ray's traceback around it."""
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
