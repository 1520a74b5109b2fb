"""The moves of the cluster model, among which hypothesis chooses: messages, steps, requests and faults."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.in_memory_fabric import PendingNotice
from tandem.protocol.messages import Role, SamplingParams
from tests.fake_engine import answer_to
from tests.model.network import Message
from tests.model.router import Client
from tests.model.workers import QUARANTINE_S, SHORT_WINDOW_S, WINDOW_S, Controller
from tests.model.world import World

T = TypeVar("T")
ROLES = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
WEIGHTS = {
    # progress
    "calm": 5, "deliver": 3, "deliver_all": 2, "land": 3, "land_all": 1, "deliver_notice": 2, "compute": 3, "wait": 2,
    # load, and kinds of events that are held back
    "ask": 2, "leave": 2, "hold": 2,
    # faults
    "repeat": 2, "lose": 4, "repeat_notice": 3, "fail_write": 1, "flip_byte": 1, "lose_notice": 1,
    "break_connection": 1, "kill": 2, "restart": 2, "disown": 2,
}  # fmt: skip
"""The moves and their weights. A move that is impossible at the time is replaced by a calm one."""
MOVES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
OPEN_MIN, OPEN_MAX = 3, 8
"""The minimum and maximum number of open requests while workers can serve them."""
BACK_AFTER_S = (0.05, 0.2, 1.0, 4.0)
"""Delays in seconds after which a dead process is restarted, if no move restarts it earlier."""
APART_S = (0.0, 0.0, 1.2 * QUARANTINE_S, WINDOW_S + 1.3 * QUARANTINE_S)
"""Durations in seconds of a partition between a worker that another takes for dead and the others."""
GRACES_S = (0.0, 0.3, 5.0)
"""Grace periods, in seconds, for the requests of a scheduler that a role change closes."""
WAITS_S = (0.01, 0.1, 0.4, 1.2)
STANDING = ((), ("writes",), ("notices",), ("messages",), ("engines",), ("writes", "notices"))
"""The kinds of events that are held back together during calm moves."""


class ClusterMachine(RuleBasedStateMachine):
    """A hypothesis state machine over two prefill workers, two decode workers, a router and its clients."""

    seen: ClassVar[Counter[str]] = Counter()
    """The number of events of each kind in all runs; "moves" counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.sound = False
        self.held: frozenset[str] = frozenset()
        self.echoes: list[PendingNotice] = []
        self.since_fault = 0

    @initialize(
        asynchronous=st.booleans(),
        both=st.booleans(),
        one_host=st.booleans(),
        window_s=st.sampled_from([WINDOW_S, SHORT_WINDOW_S]),
        gap=st.sampled_from([2, 6, 12, 30]),
    )
    def begin(self, asynchronous: bool, both: bool, one_host: bool, window_s: float, gap: int) -> None:
        """Create the world.

        With `both`, one decode worker also prefills. `gap` is the minimum number of moves between two faults.
        """
        self.gap = gap
        roles = ROLES | ({"decode-1": Role.BOTH} if both else {})
        self.world = World(roles, asynchronous=asynchronous, one_host=one_host, window_s=window_s)
        for _ in range(4):
            self.world.calm()

    @rule(name=st.sampled_from(MOVES), which=st.integers(0, 63), much=st.integers(0, 63))
    def move(self, name: str, which: int, much: int) -> None:
        """Make one move; `which` selects its object, modulo the number of objects, and `much` depends on the move."""
        self.sound = False
        if not getattr(self, name)(which, much):
            self.calm(which, 1)
        if len(self.open_clients()) < OPEN_MIN and self.at.router.dispatcher.pool.ready:
            self.ask(which, 9 + much % 4)
        self.sound = True

    @invariant()
    def holds(self) -> None:
        if self.world is not None:
            self.sound = False
            self.world.check()
            self.sound = True
            self.since_fault += 1
            self.world.seen["moves"] += 1

    def teardown(self) -> None:
        if self.world is None:
            return
        try:
            if self.sound:
                self.world.end()
        finally:
            self.world.close()
            ClusterMachine.seen += self.world.seen

    @property
    def at(self) -> World:
        assert self.world is not None
        return self.world

    def calm(self, _which: int, much: int) -> bool:
        for _ in range(1 + much % 8):
            self.at.calm(self.held)
        return True

    def deliver(self, which: int, much: int) -> bool:
        """Deliver a few messages."""
        for turn in range(1 + much % 4):
            if waiting := self.at.network.waiting():
                self.at.network.deliver(pick(waiting, which + turn * much))
        return True

    def deliver_all(self, which: int, _much: int) -> bool:
        """Deliver all messages in flight, in any order, and the replies to them."""
        for _ in range(2):
            waiting = self.at.network.waiting()
            Random(which).shuffle(waiting)
            for message in waiting:
                self.at.network.deliver(message)
        return True

    def land(self, which: int, much: int) -> bool:
        """Complete the transfer of some or all pages of one write."""
        writes = self.at.fabric.writes
        if writes:
            self.at.land(pick(writes, which), pick((1, 2, None), much))
        return bool(writes)

    def land_all(self, which: int, _much: int) -> bool:
        """Complete every write, in any order."""
        writes = list(self.at.fabric.writes)
        Random(which).shuffle(writes)
        for posted in writes:
            if posted in self.at.fabric.writes:
                self.at.land(posted)
        return bool(writes)

    def deliver_notice(self, which: int, much: int) -> bool:
        """Deliver a notice, and possibly deliver it again later."""
        notices = self.at.fabric.notices
        if not notices:
            return False
        notice = pick(notices, which)
        self.at.deliver_notice(notice)
        self.echoes += [notice] * (much % 2)
        return True

    def compute(self, which: int, much: int) -> bool:
        """Run steps of one engine, and checksum jobs of its worker."""
        worker = pick(list(self.at.workers.values()), which)
        for _ in range(1 + much % 3):
            worker.turn()
        for _ in range(much // 3 % 3):
            worker.sum_pages()
        return True

    def wait(self, _which: int, much: int) -> bool:
        """Let time pass without any delivery."""
        self.at.loop.advance(pick(WAITS_S, much))
        return True

    def ask(self, which: int, much: int) -> bool:
        """Send a request of a new client, unless too many requests are open.

        `which` selects the answer's length, a prefix shared with other prompts, an early stop, and penalties.
        """
        clients = self.at.router.clients
        if len(self.open_clients()) >= OPEN_MAX:
            return False
        # Every second prompt shares its first pages with others, followed by the same tokens or by different ones.
        first = 7 if which % 2 else 10 + len(clients)
        tokens = [first, *range(500, 500 + much % 13), *([600 + much % 3] if much % 2 else [])]
        sampling = SamplingParams(1 + which % 9, presence_penalty=which // 9 % 2)
        right = answer_to(tokens, sampling)
        if which % 4 == 0:
            sampling = replace(sampling, stop_token_ids=(pick(right, much),))
        self.at.router.ask(tokens, sampling)
        return True

    def leave(self, which: int, _much: int) -> bool:
        """Let a client disconnect."""
        if clients := self.open_clients():
            self.at.router.leave(pick(clients, which))
        return bool(clients)

    def hold(self, _which: int, much: int) -> bool:
        """Hold these kinds of events back in calm moves, until the next `hold`."""
        self.held = frozenset(pick(STANDING, much))
        return True

    def repeat(self, which: int, much: int) -> bool:
        """Deliver a request or a reply now, and once more later."""
        fragile = self.fragile(much)
        if fragile:
            self.at.network.repeat(pick(fragile, which))
        return bool(fragile)

    def lose(self, which: int, much: int) -> bool:
        """Lose a request or a reply, or all messages in flight between the same two processes."""
        if not self.fragile(much):
            return False
        lost = pick(self.fragile(much), which)
        for message in self.at.network.waiting():
            among = {*message.key[:2]} == {*lost.key[:2]} and message.fragile
            if message is lost or (which % 2 and among):
                self.at.network.lose(message)
        return True

    def repeat_notice(self, which: int, much: int) -> bool:
        """Deliver a notice once more, however late; in most cases, a notice of a request that is still running."""
        live = self.at.router.dispatcher._live
        echoes = [echo for echo in self.echoes if echo.notice.lease.request_id in live or much % 8 == 0]
        if echoes:
            self.at.deliver_notice(pick(echoes, which), again=True)
        return bool(echoes)

    def fail_write(self, which: int, much: int) -> bool:
        """Fail a write before or after its notice was sent; if before, its bytes may arrive later."""
        writes = self.at.fabric.writes
        if writes:
            self.at.fail(pick(writes, which), after_notice=much % 2 == 0)
        return bool(writes)

    def flip_byte(self, which: int, much: int) -> bool:
        """Flip a byte of a page that has arrived; checksums must detect it."""
        writes = self.at.fabric.writes
        if writes:
            self.at.corrupt(pick(writes, which), much)
        return bool(writes)

    def lose_notice(self, which: int, _much: int) -> bool:
        notices = self.at.fabric.notices
        if notices:
            self.at.lose_notice(pick(notices, which))
        return bool(notices)

    def break_connection(self, which: int, _much: int) -> bool:
        connections = [
            connection for connection in self.at.network.connections() if connection[1] != Controller.ADDRESS
        ]
        if self.since_fault < self.gap or not connections:
            return False
        self.since_fault = 0
        self.at.network.break_connection(*pick(connections, which))
        return True

    def kill(self, which: int, much: int) -> bool:
        """Kill a worker, often one with a write in progress; the other processes may be notified at once."""
        workers = list(self.at.workers)
        if self.since_fault < self.gap or len(workers) <= 2:
            return False
        self.since_fault = 0
        writers = [posted.sender.worker_id for posted in self.at.fabric.writes if posted.orphan is None]
        dead = pick(writers if writers and much % 4 else workers, which)
        self.at.kill(dead, noticed=much // 4 % 2 == 0)
        self.at.loop.call_later(pick(BACK_AFTER_S, much // 8), self.come_back, dead)
        return True

    def disown(self, which: int, much: int) -> bool:
        """Make one worker believe that another, live one is dead.

        The pair is the writer and the receiver of a hand-over, in either direction, or any two workers. The victim
        continues, at once or after some time without deliveries.
        """
        names = self.at.handing_over() or (list(permutations(self.at.workers, 2)) if which % 4 == 0 else [])
        if self.since_fault < self.gap or not names:
            return False
        self.since_fault = 0
        believer, victim = pick(names, which)[:: 1 if much % 4 else -1]
        self.at.disown(believer, victim, pick(BACK_AFTER_S, much // 4))
        self.at.loop.advance(pick(APART_S, much // 16))
        self.at.workers[victim].turn()
        return True

    def come_back(self, worker_id: str) -> None:
        if worker_id in self.at.dead():
            self.at.restart(worker_id, reuse=False)

    def restart(self, which: int, much: int) -> bool:
        dead = self.at.dead()
        if dead:
            self.at.restart(pick(dead, which), reuse=much % 2 == 0)
        return bool(dead)

    def open_clients(self) -> list[Client]:
        return [client for client in self.at.router.clients if not client.over]

    def fragile(self, which: int) -> list[Message]:
        """Return the messages of one method that may be lost.

        Methods are equally likely, whatever their message counts.
        """
        messages = [message for message in self.at.network.waiting() if message.fragile]
        methods = sorted({str(message.key[2]) for message in messages})
        return [message for message in messages if message.key[2] == pick(methods, which)]


class FlippingMachine(ClusterMachine):
    """A cluster machine in which workers also change roles.

    Role changes replace half of the occurrences of some other moves, so that the moves of `ClusterMachine` stay the
    same for a given seed.
    """

    def repeat(self, which: int, much: int) -> bool:
        return super().repeat(which, much // 2) if much % 2 else self.flip(which, much // 2)

    def disown(self, which: int, much: int) -> bool:
        return super().disown(which, much // 2) if much % 2 else self.flip(which, much // 2)

    def flip(self, which: int, much: int) -> bool:
        """Change the role of a worker, with a long, short or no grace period for its requests.

        Afterwards at least one worker must prefill and one must decode, as the controller ensures.
        """
        worker_id, role = pick(list(self.at.workers), which), pick(list(Role), much)
        roles = [role, *(other for name, other in self.at.roles.items() if name != worker_id)]
        if not (any(role.prefills for role in roles) and any(role.decodes for role in roles)):
            return False
        self.at.flip(worker_id, role, pick(GRACES_S, much // 4))
        return True


def pick(options: Sequence[T], which: int) -> T:
    """Return the element at index `which`, modulo the length."""
    return options[which % len(options)]
