"""Mutants that random moves take too long to detect, each with a scripted story that detects it.

In most stories a worker is taken for dead during a hand-over but is alive (`World.disown`). Each story must succeed
with the unmodified code, and fail with its mutant. In the docstrings, P is the prefill worker and D the decode worker
of a hand-over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.fence import OutstandingWrites, process_unknown
from kv_transfer.lease import LeaseTable
from prefill_worker.write_window import WriteWindow
from tandem.engine.cache.page_checksums import HostChecksums
from tandem.protocol.messages import SamplingParams
from tandem.worker.peers.peers import Peers
from tests.fake_engine import PAGE_TOKENS
from tests.model.checks import TOKEN_BYTES
from tests.model.mutants import Mutant, a_release_is_never_in_doubt
from tests.model.workers import QUARANTINE_S, WINDOW_S
from tests.model.world import World

PROMPT = list(range(40, 54))
"""A prompt of three prefill chunks, of which the first fills a page."""
Story = Callable[[World], None]


def begun(world: World) -> tuple[str, str]:
    """Return (decode worker, prefill worker) of a hand-over whose first chunk is being written."""
    for _ in range(20):
        world.calm()
    world.router.ask(PROMPT, SamplingParams(6))
    for _ in range(40):
        if handing_over := world.handing_over():
            return handing_over[0]
        known = [request for one in world.workers.values() for _, request in one.worker._schedulers.prefill.registry]
        computed = any(request.progress.computed_tokens for request in known)
        world.calm(frozenset({"writes", "engines"} if computed else {"writes"}))
    raise AssertionError("no prompt is handed over")


def cut_off(world: World, apart_s: float) -> None:
    """Play: D takes P for dead, nothing arrives for `apart_s` seconds, and then P computes its next chunk."""
    decode, prefill = begun(world)
    while world.fabric.writes:
        world.land(world.fabric.writes[0])
    world.disown(decode, prefill, back_after_s=10.0)
    world.loop.advance(apart_s)
    world.workers[prefill].turn()
    while world.fabric.writes:
        world.land(world.fabric.writes[0])
    world.check()
    world.end()


def cut_off_while_it_may_write(world: World) -> None:
    """The time apart exceeds the grace period, but P's write window is still open."""
    cut_off(world, 1.2 * QUARANTINE_S)


def cut_off_for_long(world: World) -> None:
    """Write window and grace period have ended, and D's pages are free."""
    cut_off(world, WINDOW_S + 1.3 * QUARANTINE_S)


def cut_off_but_renewals_arrive(world: World) -> None:
    """Only D takes P for dead, and P's renewals of its write window still arrive at D."""
    decode, prefill = begun(world)
    while world.fabric.writes:
        world.land(world.fabric.writes[0])
    world.disown(decode, prefill, back_after_s=20.0)
    for _ in range(30):
        world.loop.advance((WINDOW_S + 1.3 * QUARANTINE_S) / 20)
        for message in world.network.waiting():
            if "RenewPermissions" in message.key:
                world.network.deliver(message)
    world.workers[prefill].turn()
    while world.fabric.writes:
        world.land(world.fabric.writes[0])
    world.check()
    world.end()


def a_scale_is_damaged(world: World) -> None:
    """A byte of the scale of a page's first token changes after the page has arrived."""
    begun(world)
    write = world.fabric.writes[0]
    world.land(write, 1)
    world.corrupt(write, PAGE_TOKENS * TOKEN_BYTES + 1)
    world.check()
    world.end()


def stopped_amid_its_write(world: World) -> None:
    """P is suspended for longer than write window and grace period while D takes it for dead; then P continues."""
    world.one_host = True
    decode, prefill = begun(world)
    world.disown(decode, prefill, back_after_s=10.0)
    world.loop.advance(WINDOW_S + 1.3 * QUARANTINE_S)
    assert world.fabric.writes
    while world.fabric.writes:
        world.land(world.fabric.writes[0])
    world.check()
    world.end()


def disowned_by_its_writer(world: World) -> None:
    """P takes D for dead and abandons the hand-over; D is alive, and waits for P's message."""
    decode, prefill = begun(world)
    world.disown(prefill, decode, back_after_s=1.0)
    world.end()


def a_connection_breaks_amid_a_write(world: World) -> None:
    """P abandons its write at once; the bytes that are still in flight arrive later."""
    decode, _ = begun(world)
    late = world.fabric.writes[0]
    world.fail(late, after_notice=False)
    for _ in range(10):
        if not world.workers[decode].worker.admission.refs():
            break
        world.calm()
    assert late in world.fabric.writes
    world.land(late)
    world.check()
    world.end()


def a_permission_is_no_bound(patch: pytest.MonkeyPatch) -> None:
    """Pages of a writer that is believed dead are free after the grace period, although it may still start writes."""
    make = LeaseTable.__init__

    def hasty(self: LeaseTable, *args: Any) -> None:
        make(self, *args)
        self._fence = replace(self._fence, window_s=0.0)

    patch.setattr(LeaseTable, "__init__", hasty)


def a_permission_has_no_end(patch: pytest.MonkeyPatch) -> None:
    """The prefill worker requests a write window once, and then writes for as long as it takes."""

    async def ensure_open(self: WriteWindow) -> float:
        return math.inf

    patch.setattr(WriteWindow, "ensure_open", ensure_open)
    patch.setattr(WriteWindow, "closes_at", lambda self: math.inf)


def renewals_are_never_refused(patch: pytest.MonkeyPatch) -> None:
    """A decode worker that has given up a lease still renews the write window of its writer."""
    patch.setattr(LeaseTable, "prolong", lambda *_: ())


def liveness_of_writers_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Only the time since the writer's last sign of life counts, not whether its process is alive."""
    is_safe = OutstandingWrites.is_safe
    patch.setattr(OutstandingWrites, "is_safe", lambda self, now, _: is_safe(self, now, process_unknown))


def leases_of_dead_peers_are_never_released(patch: pytest.MonkeyPatch) -> None:
    """A decode worker that was taken for dead is never told that its leases are released."""
    patch.setattr(Peers, "_add_pending_release", lambda *_: None)


def scales_are_not_checked(patch: pytest.MonkeyPatch) -> None:
    """Checksums cover the codes only, not the scales."""
    part = HostChecksums._part

    def codes_only(self: HostChecksums, page: int, chosen: slice) -> int:
        return 0 if chosen.start is not None else part(self, page, chosen)

    patch.setattr(HostChecksums, "_part", codes_only)


STORIES: dict[Story, tuple[Mutant, str]] = {
    cut_off_while_it_may_write: (a_permission_is_no_bound, "lands in a page"),
    cut_off_for_long: (a_permission_has_no_end, "lands in a page"),
    cut_off_but_renewals_arrive: (renewals_are_never_refused, "lands in a page"),
    stopped_amid_its_write: (liveness_of_writers_is_ignored, "lands in a page"),
    a_connection_breaks_amid_a_write: (a_release_is_never_in_doubt, "lands in a page"),
    a_scale_is_damaged: (scales_are_not_checked, "reads KV of another prefix"),
    disowned_by_its_writer: (leases_of_dead_peers_are_never_released, "left for ever"),
}
"""Each story, with the mutant that it detects and the error that the model must then report."""
