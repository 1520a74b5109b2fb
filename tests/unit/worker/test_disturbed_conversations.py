"""Conversations on two workers with tiers and pulls, while bytes are damaged, roles change and workers are killed."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kv_transfer.in_memory_fabric import InMemoryFabric
from tandem.engine.cache.tiers.disk import DiskTier
from tandem.engine.cache.tiers.host import HostTier
from tandem.protocol.errors import ResourceExhausted, TandemError
from tandem.protocol.kv_pages import STATE, KvPages
from tandem.protocol.messages import (
    Assignment,
    Destination,
    PrefillTask,
    PrefixSource,
    RequestRef,
    Reservation,
    Role,
    SamplingParams,
)
from tests.fake_engine import PAGE_TOKENS, FakeEngine, answer_to
from tests.soak import SOAKING
from tests.worker_pair import ROUTER, End, RequestOutput, until

HYBRID = (None, 2 * PAGE_TOKENS, STATE)
CONVERSATIONS, TURNS = (500, 6) if SOAKING else (8, 4)
TURNS_PER_FAULT = 3
SAMPLING = SamplingParams(max_tokens=6)
PAGE_BYTES = PAGE_TOKENS * 2 * 4


@pytest.fixture(autouse=True)
def _load_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV is loaded whenever it is possible, so that timing decides nothing."""
    monkeypatch.setattr(
        "tandem.cost_model.prefix_reload.saved_seconds", lambda _cost, _context, tokens, *_: tokens / 1e3
    )


class Fleet:
    """Two workers, which tests disturb; the test acts as their router."""

    def __init__(self, rng: random.Random, pages: int, changes: dict[str, Any]) -> None:
        self.rng, self._pages, self._changes = rng, pages, changes
        self.fabric = InMemoryFabric()
        self.ends: list[End] = []
        self.dead: set[End] = set()
        self.outputs: dict[str, RequestOutput] = {}
        self.cached = self.corrupt = self.pulled = 0
        self._readers: dict[End, asyncio.Task[None]] = {}
        self._changing = asyncio.Lock()

    async def start(self, worker_id: str, incarnation: int = 1) -> None:
        end = End(worker_id, Role.BOTH, self.fabric, self._pages, dict(self._changes), incarnation=incarnation)
        await end.start()
        self._readers[end] = asyncio.create_task(self._read(end))
        self.ends.append(end)

    async def _read(self, end: End) -> None:
        async for step in end.worker.attach(ROUTER).messages():
            for event in step.each():
                self.outputs[event.ref.request_id].take(event)

    async def stop(self, end: End) -> None:
        self._readers[end].cancel()
        tiers = end.worker.tiers
        counts = [end.worker.admission.pull_counts, *([] if tiers is None else [tier.counts for tier in tiers.tiers])]
        self.pulled += counts[0].loaded_pages
        self.corrupt += sum(count.corrupt_pages for count in counts)
        await end.stop()

    # ---- requests ----

    async def answer(self, name: str, prompt: Sequence[int]) -> list[int]:
        """Return the answer to a prompt, of as many attempts as it takes."""
        async with asyncio.timeout(240):
            for attempt in range(1, 10_000):
                request = f"{name}/{attempt}"
                try:
                    output = await self._attempt(request, tuple(prompt))
                except TandemError as error:
                    await asyncio.sleep(0.002 if isinstance(error, ResourceExhausted) else 0.001)
                    output = None
                if output is not None and not output.error and output.finish:
                    self.cached += output.cached_tokens
                    assert output.tokens == answer_to(list(prompt), SAMPLING), request
                    return output.tokens
                for end in self.ends:
                    end.worker.abort(ROUTER, [RequestRef(request, 1)])
        raise AssertionError("unreachable")

    async def _attempt(self, name: str, prompt: tuple[int, ...]) -> RequestOutput:
        """Send a request to random workers, one of which may pull the prefix from the other."""
        prefill, decode = self.rng.choice(self.ends), self.rng.choice(self.ends)
        other = next((end for end in self.ends if end is not prefill), None)
        source = None if other is None else PrefixSource(other.me, other.address, len(prompt))
        output = self.outputs[name] = RequestOutput()
        ref, local = RequestRef(name, 1), prefill is decode
        reservation = Reservation(ROUTER, ref, prompt, SAMPLING, prefill.me, source=source if local else None)
        await decode.worker.reload(reservation)
        lease = decode.worker.reserve(reservation).lease
        there = Destination(decode.me, decode.address, lease)
        task = PrefillTask(ROUTER, ref, prompt, SAMPLING, there, source=None if local else source)
        await prefill.worker.reload(task)
        prefill.worker.prefill(task)
        await until(lambda: output.finish or output.preempted_at >= 0 or self.dead & {prefill, decode}, 200)
        if output.finish and not local and not output.error:
            await until(lambda: output.pages or self.dead & {prefill, decode})
        return output

    # ---- faults ----

    async def disturb(self) -> None:
        async with self._changing:
            await self.rng.choice([self.damage, self.change_roles, self.kill])()

    async def damage(self) -> None:
        """Change a byte of a page in a tier."""
        for end in self.ends:
            for tier in [] if end.worker.tiers is None else end.worker.tiers.tiers:
                locations = list(tier._pages.values())
                if not locations:
                    continue
                place = self.rng.choice(locations)
                if isinstance(tier, HostTier):
                    tier._memory[place[0], self.rng.randrange(PAGE_BYTES)] ^= 1
                elif isinstance(tier, DiskTier):
                    damaged = bytearray(place.read_bytes())
                    damaged[self.rng.randrange(PAGE_BYTES)] ^= 1
                    place.write_bytes(damaged)

    async def change_roles(self) -> None:
        roles = self.rng.choice([(Role.BOTH, Role.BOTH), (Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)])
        for end, role in zip(self.ends, roles, strict=True):
            end.worker.assume(end.me, Assignment(role), 0.05)

    async def kill(self) -> None:
        """End a worker in the middle of what it does, and start its next incarnation with the same disk."""
        victim = self.rng.choice(self.ends)
        self.fabric.kill(victim.me)
        self.dead.add(victim)
        self.ends.remove(victim)
        (other,) = self.ends
        other.worker.peer_gone(victim.me)
        await self.stop(victim)
        await self.start(victim.me.worker_id, victim.me.incarnation + 1)
        # With the other one's role, prompts and answers might have no worker.
        for end in self.ends:
            end.worker.assume(end.me, Assignment(Role.BOTH), 0.05)


@asynccontextmanager
async def fleet(rng: random.Random, pages: int, **changes: Any) -> AsyncIterator[Fleet]:
    made = Fleet(rng, pages, changes)
    for worker_id in ("w0", "w1"):
        await made.start(worker_id)
    try:
        yield made
    finally:
        for end in made.ends:
            await made.stop(end)
        made.fabric.close()


@pytest.mark.parametrize("windows", [(None,), HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("share", [1.1, 2.0, 10.0])
async def test_no_answer_changes(
    windows: tuple[int | None, ...], share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools are 1.1, 2 and 10 times too small for the conversations."""
    monkeypatch.setattr(FakeEngine, "windows", windows)
    rng = random.Random(f"{windows}{share}")
    kv = KvPages(PAGE_TOKENS, windows, 16)
    needed = CONVERSATIONS * kv.held(11 + TURNS * 9)
    pages = max(int(needed / share / 2), 2 * kv.held(11 + TURNS * 9 + 8) + 4)
    tiers: dict[str, Any] = {
        "kv_host_bytes": needed // 3 * PAGE_BYTES,
        "kv_disk_bytes": 2 * needed * (PAGE_BYTES + 28),
        "kv_disk_path": tmp_path,
        # The longest wait for a pull from a worker that has ended: `_load_always` predicts no shorter one.
        "rpc_timeout_s": 5.0,
    }
    chats = [[3 + number % 900, *rng.choices(range(3, 900), k=10)] for number in range(CONVERSATIONS)]
    order = [number for number in range(CONVERSATIONS) for _ in range(TURNS)]
    rng.shuffle(order)
    busy, running = [asyncio.Lock() for _ in chats], asyncio.Semaphore(2)
    async with fleet(rng, pages, **tiers) as at:

        async def turn(place: int, number: int) -> None:
            async with running, busy[number]:
                chats[number] += await at.answer(f"{number}/{place}", chats[number])
                chats[number] += rng.choices(range(3, 900), k=3)
            if place % TURNS_PER_FAULT == 0:
                await at.disturb()

        await asyncio.gather(*(turn(place, number) for place, number in enumerate(order)))
        for end in at.ends:
            end.worker.assume(end.me, Assignment(Role.BOTH), 0.05)
        for end in at.ends:
            await end.empty()
        assert at.cached > 0
    if SOAKING:
        assert at.pulled > 0
        assert at.corrupt > 0
