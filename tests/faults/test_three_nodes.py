"""Nodes and workers of a real Ray come and go under load: every answer is complete and right, and nothing hangs."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak import soak

from .conftest import VOCAB
from .streams import Client, Load, Question, Stream, undisturbed
from .three_nodes import HEAD, LOOK_S, SECOND, THIRD, ThreeNodes, three_nodes

ANSWER_TOKENS = 200
SHORT_PROMPTS = (20, 33, 64, 90)
LONG_ONES, LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS = 2, 1500, 20
CLIENTS = 2
TRIES_S = 60.0
HANDED_BACK = "others go on with the request"
"""A part of the error that a worker sends to the router when it drains or changes its role."""


def some_questions() -> list[Question]:
    """Short prompts, and at last some of many chunks."""
    rng = random.Random(11)
    lengths = [
        *((length, ANSWER_TOKENS) for length in SHORT_PROMPTS),
        *[(LONG_PROMPT_TOKENS, LONG_ANSWER_TOKENS)] * LONG_ONES,
    ]
    return [Question(tuple(rng.randrange(3, VOCAB) for _ in range(length)), tokens) for length, tokens in lengths]


class Scenario:
    """The steps of the test, on one cluster."""

    def __init__(self, nodes: ThreeNodes, report_line: Callable[[str], None]) -> None:
        self._nodes = nodes
        self._report_line = report_line
        self._questions = some_questions()
        self._right: list[list[int]] = []

    async def ask_quietly(self) -> None:
        assert self._nodes.places == {"prefill-0": HEAD, "decode-0": SECOND}
        self._right = await undisturbed(self._nodes.router_address, self._questions)

    async def add_a_node(self) -> None:
        """Requests more workers than the nodes can hold; then a node with free resources joins."""
        growing = asyncio.ensure_future(self._nodes.controller.resize(decode=2))
        began = time.monotonic()
        await self._nodes.add(THIRD)
        up = time.monotonic()
        infos, _ = await growing
        self._report_line(
            f"the node was up after {up - began:.1f} s, its workers served {time.monotonic() - up:.1f} s later"
        )
        assert len(infos) == 3
        await self._nodes.look()
        expected = {"prefill-0": HEAD, "decode-0": SECOND, "decode-1": THIRD}
        assert self._nodes.places == expected
        await self._ask_all()

    async def kill_a_node(self) -> None:
        """Streams in decode or transfer on the killed node continue, and its worker restarts on another node."""
        before = self._nodes.workers["decode-0"].peer.incarnation
        async with Client(self._nodes.router_address) as client:
            streams = await self._ask_until_busy(client, "decode-0")
            self._nodes.kill(SECOND)
            killed = time.monotonic()
            await asyncio.gather(*(stream.task for stream in streams))
            self._report_line(
                f"answers that the dead node was part of were whole {time.monotonic() - killed:.1f} s later"
            )
        self._check(streams)
        assert self._failed_attempts(), "the node had no part in any"
        await self._nodes.until(lambda: self._nodes.places.get("decode-0") == THIRD)
        self._report_line(f"its worker served elsewhere {time.monotonic() - killed:.1f} s after the death")
        assert self._nodes.workers["decode-0"].peer.incarnation > before
        assert self._killed()
        await self._ask_all()

    async def replace_every_worker(self) -> None:
        before = {name: worker.peer.incarnation for name, worker in self._nodes.workers.items()}
        failed = self._failed_attempts()
        async with Client(self._nodes.router_address) as client:
            load = Load(client, self._questions, self._right, CLIENTS)
            for name in before:
                await self._nodes.controller.drain_worker(name, restart=True)
            await load.stop()
        self._report_line(f"{load.right} answers while every worker was replaced")
        assert not load.refused
        assert load.right >= CLIENTS
        assert self._failed_attempts() == failed, "somebody was killed, not drained"
        await self._nodes.look()
        assert all(self._nodes.workers[name].peer.incarnation > old for name, old in before.items())

    async def shrink_amid_transfers(self) -> None:
        """Shrinks the cluster without a grace period; requests are retried, but no worker is killed.

        The router may learn that the worker left before it receives the request that the worker gives up; it retries it
        either way; only the controller's log shows whether a worker was killed.
        """
        killed = self._killed()
        async with Client(self._nodes.router_address) as client:
            load = Load(client, self._questions, self._right)
            await self._until_busy("decode-1", lambda one: one.pages_advertised)
            infos, _ = await self._nodes.controller.resize(decode=1, grace_s=0.0)
            await load.stop()
        assert {info.peer.worker_id for info in infos} == {"prefill-0", "decode-0"}
        assert not load.refused
        assert self._killed() == killed, "somebody was killed, not drained"
        await self._nodes.look()
        await self._nodes.idle_and_sound()
        await self._ask_all()

    def _failed_attempts(self) -> list[str]:
        """Returns the failed attempts in the router's log, without those that a worker gave up while it drained."""
        log = (self._nodes.logs / "router.log").read_text()
        return [line for line in log.splitlines() if "failed, retrying: " in line and HANDED_BACK not in line]

    def _killed(self) -> list[str]:
        """Returns the log lines of workers that were killed before they had drained, or that died."""
        log = (self._nodes.logs / "controller.log").read_text()
        return [line for line in log.splitlines() if "did not drain: " in line or " is gone (" in line]

    async def _ask_all(self) -> None:
        assert await undisturbed(self._nodes.router_address, self._questions) == self._right

    async def _ask_until_busy(self, client: Client, name: str) -> list[Stream]:
        """Asks all questions, again whenever all are answered, until the worker `name` has a request.

        Short answers can begin and end between two looks at the worker.
        """
        deadline_s = time.monotonic() + TRIES_S
        streams = [client.ask(question) for question in self._questions]
        while not (await self._nodes.inspect(name)).requests:
            assert time.monotonic() < deadline_s, f"{name} has nothing to do"
            if all(stream.task.done() for stream in streams):
                self._check(streams)
                streams = [client.ask(question) for question in self._questions]
            await asyncio.sleep(LOOK_S)
        return streams

    def _check(self, streams: list[Stream]) -> None:
        for stream, right in zip(streams, self._right, strict=True):
            stream.check(right)

    async def _until_busy(self, name: str, measure: Callable[..., int]) -> None:
        deadline_s = time.monotonic() + TRIES_S
        while not measure(await self._nodes.inspect(name)):
            assert time.monotonic() < deadline_s, f"{name} has nothing to do"
            await asyncio.sleep(LOOK_S)


async def play(model: Path, report_line: Callable[[str], None]) -> None:
    began = time.monotonic()
    async with three_nodes(model) as nodes:
        scenario = Scenario(nodes, report_line)
        report_line(f"start {time.monotonic() - began:.1f} s")
        for step in (
            scenario.ask_quietly,
            scenario.add_a_node,
            scenario.kill_a_node,
            scenario.replace_every_worker,
            scenario.shrink_amid_transfers,
        ):
            began = time.monotonic()
            await step()
            report_line(f"{step.__name__} {time.monotonic() - began:.1f} s")


@soak
@pytest.mark.timeout(1200)
def test_nodes_and_workers_come_and_go(small_model: Path, report_line: Callable[[str], None]) -> None:
    asyncio.run(play(small_model, report_line))
