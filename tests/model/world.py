"""A whole cluster in one thread: two prefill workers, two decode workers and a router, all driven by the test.

Real parts: the workers (both schedulers, admission, lease table, page pool, handoffs, output streams, servicer), the
router without its listeners (dispatcher, placement, request tasks, links, lease keepers, event stream) and the protobuf
messages between them. Simulated parts: gRPC (`calls.py`), the transfer (`kv_transfer/in_memory_fabric.py`), the engine
(the KV of a token is the token), the threads, the controller and the clock.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from kv_transfer.in_memory_fabric import InFlightWrite, InMemoryFabric, PendingNotice
from prefill_worker.request import PrefillRequest
from tandem.protocol.messages import Assignment, PeerRef, Role, SamplingParams, WorkerInfo
from tests.model.checks import Alarms, Broken, Holder, holder_of
from tests.model.network import Key, Network
from tests.model.patches import patch_product
from tests.model.processes import ProcessLoop
from tests.model.router import RouterProcess, finish_reason
from tests.model.workers import (
    QUARANTINE_S,
    WINDOW_S,
    Addresses,
    Controller,
    Parts,
    WorkerProcess,
    pool_pages,
)

LATE_S = 0.9 * QUARANTINE_S
"""The maximum delay of late writes in seconds; quarantines are longer.

It applies to writes of a dead process, to failed writes from their failure on, and to writes of a process that is taken
for dead, from the start of each write.
"""
CALM_STEP_S = 0.02
END_WITHIN_S = 60.0
"""Maximum seconds from the last fault to the end; longer than the sum of all deadlines of the cluster."""


def is_warm_up(posted: InFlightWrite) -> bool:
    """Return True if the write only tests a connection: it reads and writes pages that no request owns."""
    return posted.write.local_pages == posted.write.remote_pages == (pool_pages(),)


class World:
    """All processes of the cluster; the caller must call `close` in every case."""

    def __init__(
        self, roles: dict[str, Role], *, asynchronous: bool, one_host: bool = False, window_s: float = WINDOW_S
    ) -> None:
        """Start the cluster; with `one_host`, workers can see whether each other's processes are alive."""
        self.one_host = one_host
        self.loop = ProcessLoop()
        self.failures: list[str] = []
        self.network = Network(self.loop, self.failures.append)
        self.fabric = InMemoryFabric(self.loop.time, schedule=self._posted, on_page=self._check_page)
        self.writers: dict[InFlightWrite, PrefillRequest] = {}
        """The prompt of each write in flight."""
        self._disowned: set[tuple[PeerRef, PeerRef]] = set()
        self.roles = dict(roles)
        self.workers: dict[str, WorkerProcess] = {}
        self.graveyard: list[WorkerProcess] = []
        self._parts = Parts(self.loop, self.fabric, asynchronous, window_s)
        self._addresses = Addresses()
        self.seen: Counter[str] = Counter()
        """The number of events of each kind, with which tests verify that the model covers them."""
        self._alarms = Alarms()
        logging.getLogger().addHandler(self._alarms)
        self._patches = patch_product(self.network, self._process_alive)
        self.controller = Controller(self.loop, self.roles)
        self.network.listen(Controller.ADDRESS, self.controller.process, self.controller)
        for worker_id in roles:
            self._start(worker_id, 1, reuse=False)
        self.router = RouterProcess(self.loop)

    def close(self) -> None:
        """End every task, without further checks."""
        for one in [*self.workers.values(), *self.graveyard]:
            self.seen += one.engine.seen
            self.seen["tokens from the cache"] += one.worker._cache.hit_tokens
        logging.getLogger().removeHandler(self._alarms)
        self.loop.close()
        self._patches.undo()

    def kill(self, worker_id: str, *, noticed: bool = False) -> None:
        """Kill the worker. Messages that it has sent still arrive.

        Its peers are notified later or, if `noticed`, now.
        """
        self.seen["killed"] += 1
        dead = self.workers.pop(worker_id)
        dead.process.alive = False
        self.graveyard.append(dead)
        self.fabric.kill(dead.me)
        self.loop.call_later(LATE_S, self.fabric.remove_dead, dead.me)
        self.network.remove_dead(dead.process)
        if noticed:
            self.controller.process.run(self.controller.expel, dead.me)
            for other in self.workers.values():
                other.process.run(other.worker.peer_gone, dead.me)
        else:
            self._news(("controller", dead.process.name, "died"), lambda: self._report_death(dead.me))

    def restart(self, worker_id: str, *, reuse: bool) -> None:
        """Start the next incarnation of a dead worker, at a new address or, with `reuse`, at that of a dead process."""
        incarnation = 1 + sum(dead.me.worker_id == worker_id for dead in self.graveyard)
        self._start(worker_id, incarnation, reuse=reuse)

    def disown(self, believer: str, victim: str, back_after_s: float) -> None:
        """Notify a worker that a live one is dead, and after `back_after_s` seconds that it serves.

        `believer` is the notified worker, `victim` the live one. With `one_host`, the believer sees that the process is
        alive, so the victim's writes may take any time.
        """
        self.seen["taken for dead"] += 1
        one, other = self.workers[believer], self.workers[victim]
        pair = (other.me, one.me)
        self._disowned.add(pair)
        one.process.run(one.worker.peer_gone, other.me)
        for write in [write for write in self.fabric.writes if (write.sender, write.write.peer) == pair]:
            self._bound(write)
        self.loop.call_later(back_after_s, self._own_again, one, other)

    def flip(self, worker_id: str, role: Role, grace_s: float) -> None:
        """Change the worker's role, also for its next incarnations; the router is notified later."""
        self.seen["flipped"] += 1
        self.roles[worker_id] = role
        one = self.workers[worker_id]
        one.process.run(one.worker.assume, one.me, Assignment(role), grace_s)

    def _changed(self, one: WorkerProcess) -> None:
        self.seen["changes reported"] += 1
        key = ("controller", one.process.name, "changed", self.seen["changes reported"])
        self._news(key, partial(self._report_change, one))

    def _report_change(self, one: WorkerProcess) -> None:
        member = self.controller.members.get(one.me.worker_id)
        if one.process.alive and member is not None and member.peer == one.me:
            self.controller.process.run(self.controller.admit, one.info())

    def handing_over(self) -> list[tuple[str, str]]:
        """Return (decode worker, prefill worker) of prompts that are partly written but not completely computed."""
        pairs = [
            (request.task.destination.peer.worker_id, one.me.worker_id)
            for one in self.workers.values()
            for _, request in one.worker._schedulers.prefill.registry
            if request.task.destination is not None and not request.progress.released
            if any(request is writer for writer in self.writers.values())
        ]
        return [(there, here) for there, here in pairs if there in self.workers and there != here]

    def _own_again(self, one: WorkerProcess, other: WorkerProcess) -> None:
        self._disowned.discard((other.me, one.me))
        if one.process.alive and other.process.alive:
            one.process.run(one.worker.peer_joined, other.info())

    def _posted(self, posted: InFlightWrite) -> None:
        if is_warm_up(posted):
            return
        self.writers[posted] = self._writer_of(posted)
        if (posted.sender, posted.write.peer) in self._disowned:
            self._bound(posted)

    def _bound(self, posted: InFlightWrite) -> None:
        """Limit the duration of a write by a process that its peer takes for dead.

        The write must end within the quarantine of its pages.
        """
        # On one host the peer sees that the process is alive, and keeps the pages quarantined for as long as the write
        # takes.
        if not self.one_host:
            self.loop.call_later(LATE_S, lambda: posted in self.fabric.writes and self.fabric.rest(posted))

    def _process_alive(self, peer: PeerRef) -> bool | None:
        worker = self.workers.get(peer.worker_id)
        return (worker is not None and worker.me == peer) if self.one_host else None

    def dead(self) -> list[str]:
        return [worker_id for worker_id in self.roles if worker_id not in self.workers]

    def _start(self, worker_id: str, incarnation: int, *, reuse: bool) -> None:
        me = PeerRef(worker_id, incarnation)
        address = self._addresses.take(again=lambda known: reuse and self.network.listener(known) is None)
        made = WorkerProcess(self._parts, me, self.roles[worker_id], address)
        self.workers[worker_id] = made
        made.worker.assignment.on_change = partial(self._changed, made)
        self.network.listen(address, made.process, made.servicer)
        if incarnation == 1:
            self._report_start(made)
        else:
            self._news(("controller", made.process.name, "up"), lambda: self._report_start(made))

    def _report_death(self, peer: PeerRef) -> None:
        self.controller.process.run(self.controller.expel, peer)
        self._mark_dead(peer)

    def _report_start(self, started: WorkerProcess) -> None:
        """Publish a started worker, and report its predecessor dead."""
        if not started.process.alive:
            return
        info = started.info()
        self.controller.process.run(self.controller.admit, info)
        self._mark_dead(PeerRef(info.peer.worker_id, info.peer.incarnation - 1))
        for one, joined in [(one, info) for one in self.workers.values()] + [
            (started, other.info()) for other in self.workers.values()
        ]:
            if one.me != joined.peer:
                key = (one.process.name, "joined", joined.peer.worker_id, joined.peer.incarnation)
                self._news(key, partial(self._report_peer, one, joined))

    def _report_peer(self, one: WorkerProcess, joined: WorkerInfo) -> None:
        """Notify a worker of a peer, unless the peer has died or been replaced since."""
        worker = self.workers.get(joined.peer.worker_id)
        if worker is not None and worker.me == joined.peer:
            self._disowned.discard((joined.peer, one.me))
            one.process.run(one.worker.peer_joined, joined)

    def _mark_dead(self, gone: PeerRef) -> None:
        for other in self.workers.values():
            if other.me.worker_id != gone.worker_id:
                key = (other.process.name, "gone", gone.worker_id, gone.incarnation)
                self._news(key, partial(other.process.run, other.worker.peer_gone, gone))

    def _news(self, key: Key, arrive: Callable[[], None]) -> None:
        """Send an update that may be late or out of order but is never lost, because the membership is resent."""
        self.network.send(key, arrive)

    def check(self) -> None:
        """Check the invariants that hold after every step. Raises `Broken`, or `Internal` from a page pool."""
        for one in self.workers.values():
            one.check()
        for client in self.router.clients:
            client.check()
        errors = [*self.failures, *self.loop.failures, *self._alarms.errors]
        if errors:
            raise Broken("; ".join(errors))

    def _check_page(self, posted: InFlightWrite, local: int, remote: int) -> None:
        """Check one page of a write that is about to arrive."""
        if is_warm_up(posted):
            return
        writer = self.writers[posted]
        ref = writer.task.ref
        completed = posted.future.done()
        # The sender may reuse its pages once the write has ended for it, so only the target of such a write is checked.
        source = None if completed else self._holder(posted.sender, local)
        target = self._holder(posted.write.peer, remote)
        if source is not None and (local not in writer.pages or source not in (Holder("owned", ref), Holder("shared"))):
            raise Broken(f"a write of {ref} reads a page that is {source} now")
        if target is None or target.ref != ref or target.state not in ("advertised", "quarantined"):
            raise Broken(f"a write of {ref} lands in a page that is {target} now")
        self.seen[target.state] += 1
        self.seen["after a failure"] += completed
        self.seen["from the dead"] += source is None and not completed
        self.seen["from shared pages"] += source == Holder("shared")

    def _writer_of(self, posted: InFlightWrite) -> PrefillRequest:
        """Return the prompt of a write that is being posted."""
        scheduler = self.workers[posted.sender.worker_id].worker._schedulers.prefill
        write, known = posted.write, [*scheduler.registry._requests.values(), *scheduler.registry._replaced]
        writers = [one for one in known if set(write.local_pages) <= set(one.pages)]
        target = self._holder(write.peer, write.remote_pages[0])
        if not writers:
            raise Broken(f"a write reads a page of {write.local_pages}, which are no prompt's")
        # Several prompts may read these pages. The destination tells which prompt this is, or that something is wrong.
        return next((one for one in writers if target is not None and one.task.ref == target.ref), writers[0])

    def _holder(self, peer: PeerRef, page: int) -> Holder | None:
        """Return the holder of a page of this process; None = the process is dead."""
        worker = self.workers.get(peer.worker_id)
        return holder_of(worker.engine.pool, page) if worker is not None and worker.me == peer else None

    def lose_notice(self, notice: PendingNotice) -> None:
        """Lose a notice, which its sender takes for delivered and reports as such later."""
        self.fabric.lose_notice(notice)

    def calm(self, held: frozenset[str] = frozenset()) -> None:
        """Run one round without faults: messages arrive, every engine runs a step, a little time passes.

        Of "messages", "writes", "notices" and "engines", those in `held` make no progress. Each write transfers one
        page, but writes of a dead process arrive later or never.
        """
        notices = list(self.fabric.notices)
        if "messages" not in held:
            for message in self.network.waiting():
                self.network.deliver(message)
        if "writes" not in held:
            for posted in list(self.fabric.writes):
                if posted in self.fabric.writes and posted.orphan is None:
                    self.land(posted, 1)
        if "notices" not in held:
            for notice in notices:
                self.deliver_notice(notice)
        if "engines" not in held:
            for worker in list(self.workers.values()):
                worker.turn()
                while worker.sum_pages():
                    pass
        self.loop.advance(CALM_STEP_S)

    def land(self, posted: InFlightWrite, pages: int | None = None) -> None:
        self.fabric.land(posted, pages)
        self.loop.run_ready()

    def fail(self, posted: InFlightWrite, *, after_notice: bool) -> None:
        """Fail a write; its remaining pages may still arrive for `LATE_S` seconds."""
        self.fabric.fail(posted, after_notice=after_notice)
        if posted in self.fabric.writes:
            self.loop.call_later(LATE_S, lambda: posted in self.fabric.writes and self.fabric.rest(posted))
        self.loop.run_ready()

    def deliver_notice(self, notice: PendingNotice, *, again: bool = False) -> None:
        with self.loop.running():
            self.fabric.deliver(notice, again=again)
        self.loop.run_ready()

    def corrupt(self, posted: InFlightWrite, byte: int) -> None:
        """Flip a byte of a page that has arrived; checksums must detect it."""
        worker = self.workers.get(posted.write.peer.worker_id)
        if posted.landed and worker is not None and worker.me == posted.write.peer:
            self._alarms.expected.add("decode_worker.kv_arrival")
            page = posted.write.remote_pages[byte % posted.landed]
            memory = worker.engine.stored[page].view("u1").reshape(-1)
            memory[byte % len(memory)] ^= 0x40

    def end(self) -> None:
        """Check that, without further faults, every request ends, every page is freed and the cluster serves."""
        for worker_id in self.dead():
            self.restart(worker_id, reuse=False)
        while self.network.waiting() or self._disowned:
            self.calm()
        self._run_until_idle("after the last fault")
        last = self.router.ask([999, 5, 6, 7, 8], SamplingParams(max_tokens=5))
        self._run_until_idle("with one more request")
        if last.ending is None or last.ending.finish_reason is not finish_reason(last):
            raise Broken(f"the cluster serves no more: {last}")
        self.seen["gave way"] += sum(one.worker.admission.requests.preemptions for one in self.workers.values())
        self.seen["prior_output_tokens"] += sum(client.ending is not None for client in self.router.clients)
        if failures := self.loop.unretrieved_failures():
            raise Broken(f"failures that nobody retrieves: {failures}")

    def _run_until_idle(self, when: str) -> None:
        deadline_s = self.loop.time() + END_WITHIN_S
        while left := self._left():
            if self.loop.time() > deadline_s:
                raise Broken(f"{when}, this is left for ever: {left}")
            self.calm()
            self.check()

    def _left(self) -> list[str]:
        """Return the requests that have not ended and the resources that are still held."""
        left = [f"{client}" for client in self.router.clients if not client.over]
        left += [one.left() for one in self.workers.values()]
        unseen = {one.me for one in self.workers.values()} - {view.peer for view in self.router.dispatcher.pool.views()}
        left += [f"{peer} is not connected to the router" for peer in unseen]
        return [problem for problem in [*left, self.router.left()] if problem]
