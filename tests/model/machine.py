"""What may happen to a cluster, for hypothesis to choose from: which move, to whom, in what order."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from random import Random
from typing import ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_transfer.in_memory_by_hand import LateNotice
from tests.fake_engine import answer_to
from tests.model.network import Message
from tests.model.router import Client
from tests.model.workers import QUARANTINE_S, SHORT_WINDOW_S, WINDOW_S, Controller
from tests.model.world import World
from wire.messages import Role, SamplingParams

T = TypeVar("T")
ROLES = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
WEIGHTS = {
    # progress
    "calm": 5, "deliver": 3, "deliver_all": 2, "land": 3, "land_all": 1, "hear": 2, "compute": 3, "wait": 2,
    # load, and what stands still
    "ask": 2, "leave": 2, "hold": 2,
    # faults
    "repeat": 2, "lose": 4, "hear_again": 3, "fail_write": 1, "flip_byte": 1, "lose_notice": 1,
    "break_connection": 1, "kill": 2, "restart": 2, "disown": 2,
}  # fmt: skip
"""The moves, and how likely each is. A move that is impossible now is a calm one instead."""
MOVES = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
OPEN_MIN, OPEN_MAX = 3, 8
"""Requests that are open while there is somebody to serve them."""
BACK_AFTER_S = (0.05, 0.2, 1.0, 4.0)
"""When a dead process is restarted, if no move restarts it earlier."""
APART_S = (0.0, 0.0, 1.2 * QUARANTINE_S, WINDOW_S + 1.3 * QUARANTINE_S)
"""How long one that is taken for dead and the others hear nothing of each other."""
GRACES_S = (0.0, 0.3, 5.0)
"""How long a half that closes may finish what it has."""
WAITS_S = (0.01, 0.1, 0.4, 1.2)
STANDING = ((), ("writes",), ("notices",), ("messages",), ("engines",), ("writes", "notices"))
"""What stands still while all else is calm."""


class ClusterMachine(RuleBasedStateMachine):
    """Two prefill workers, two decode workers, a router and its clients."""

    seen: ClassVar[Counter[str]] = Counter()
    """What happened in all runs; "moves" counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World | None = None
        self.sound = False
        self.held: frozenset[str] = frozenset()
        self.echoes: list[LateNotice] = []
        self.since_fault = 0

    @initialize(
        asynchronous=st.booleans(),
        both=st.booleans(),
        one_host=st.booleans(),
        window_s=st.sampled_from([WINDOW_S, SHORT_WINDOW_S]),
        gap=st.sampled_from([2, 6, 12, 30]),
    )
    def begin(self, asynchronous: bool, both: bool, one_host: bool, window_s: float, gap: int) -> None:
        """`both`: one decode worker prefills as well. `gap` is how many moves lie between two deaths, at least."""
        self.gap = gap
        roles = ROLES | ({"decode-1": Role.BOTH} if both else {})
        self.world = World(roles, asynchronous=asynchronous, one_host=one_host, window_s=window_s)
        for _ in range(4):
            self.world.calm()

    @rule(name=st.sampled_from(MOVES), which=st.integers(0, 63), much=st.integers(0, 63))
    def move(self, name: str, which: int, much: int) -> None:
        """`which` of those that are there, counted round; `much` means something else in each move."""
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
        """A few messages."""
        for turn in range(1 + much % 4):
            if waiting := self.at.network.waiting():
                self.at.network.deliver(pick(waiting, which + turn * much))
        return True

    def deliver_all(self, which: int, _much: int) -> bool:
        """Everything on its way, in any order, and what is sent in answer."""
        for _ in range(2):
            waiting = self.at.network.waiting()
            Random(which).shuffle(waiting)
            for message in waiting:
                self.at.network.deliver(message)
        return True

    def land(self, which: int, much: int) -> bool:
        """Some pages of one write, or all."""
        flights = self.at.fabric.flights
        if flights:
            self.at.land(pick(flights, which), pick((1, 2, None), much))
        return bool(flights)

    def land_all(self, which: int, _much: int) -> bool:
        """Every write, in any order."""
        flights = list(self.at.fabric.flights)
        Random(which).shuffle(flights)
        for one in flights:
            if one in self.at.fabric.flights:
                self.at.land(one)
        return bool(flights)

    def hear(self, which: int, much: int) -> bool:
        """A notice arrives, and perhaps once more later."""
        notices = self.at.fabric.notices
        if not notices:
            return False
        late = pick(notices, which)
        self.at.hear(late)
        self.echoes += [late] * (much % 2)
        return True

    def compute(self, which: int, much: int) -> bool:
        """One engine, and the checksums of its worker."""
        worker = pick(list(self.at.workers.values()), which)
        for _ in range(1 + much % 3):
            worker.turn()
        for _ in range(much // 3 % 3):
            worker.sum_pages()
        return True

    def wait(self, _which: int, much: int) -> bool:
        """Time passes and nothing arrives."""
        self.at.loop.advance(pick(WAITS_S, much))
        return True

    def ask(self, which: int, much: int) -> bool:
        """A client asks; `which` says how long the answer is, whether it begins as others do, whether it stops early,
        and whether it has penalties.
        """
        clients = self.at.router.clients
        if len(self.open_clients()) >= OPEN_MAX:
            return False
        # Every second client begins as others do: the same pages, in the same words or in others behind them.
        first = 7 if which % 2 else 10 + len(clients)
        tokens = [first, *range(500, 500 + much % 13), *([600 + much % 3] if much % 2 else [])]
        sampling = SamplingParams(1 + which % 9, presence_penalty=which // 9 % 2)
        right = answer_to(tokens, sampling)
        if which % 4 == 0:
            sampling = replace(sampling, stop_token_ids=(pick(right, much),))
        self.at.router.ask(tokens, sampling)
        return True

    def leave(self, which: int, _much: int) -> bool:
        """A client goes away."""
        if clients := self.open_clients():
            self.at.router.leave(pick(clients, which))
        return bool(clients)

    def hold(self, _which: int, much: int) -> bool:
        """Until the next time, this stands still while all else is calm."""
        self.held = frozenset(pick(STANDING, much))
        return True

    def repeat(self, which: int, much: int) -> bool:
        """A request or a reply arrives now, and later once more."""
        fragile = self.fragile(much)
        if fragile:
            self.at.network.repeat(pick(fragile, which))
        return bool(fragile)

    def lose(self, which: int, much: int) -> bool:
        """A request or a reply is lost, or all that are on their way between the same two."""
        if not self.fragile(much):
            return False
        lost = pick(self.fragile(much), which)
        for message in self.at.network.waiting():
            among = {*message.key[:2]} == {*lost.key[:2]} and message.fragile
            if message is lost or (which % 2 and among):
                self.at.network.lose(message)
        return True

    def hear_again(self, which: int, much: int) -> bool:
        """A notice arrives once more, however late; for the most part of a request that still runs."""
        live = self.at.router.dispatcher._live
        echoes = [late for late in self.echoes if late.notice.lease.request_id in live or much % 8 == 0]
        if echoes:
            self.at.hear(pick(echoes, which), again=True)
        return bool(echoes)

    def fail_write(self, which: int, much: int) -> bool:
        """Before or after its notice left; before it, its bytes may come later."""
        flights = self.at.fabric.flights
        if flights:
            self.at.fail(pick(flights, which), after_notice=much % 2 == 0)
        return bool(flights)

    def flip_byte(self, which: int, much: int) -> bool:
        """In a page that has landed; checksums must see it."""
        flights = self.at.fabric.flights
        if flights:
            self.at.corrupt(pick(flights, which), much)
        return bool(flights)

    def lose_notice(self, which: int, _much: int) -> bool:
        notices = self.at.fabric.notices
        if notices:
            self.at.lose_notice(pick(notices, which))
        return bool(notices)

    def break_connection(self, which: int, _much: int) -> bool:
        connections = [each for each in self.at.network.connections() if each[1] != Controller.ADDRESS]
        if self.since_fault < self.gap or not connections:
            return False
        self.since_fault = 0
        self.at.network.break_connection(*pick(connections, which))
        return True

    def kill(self, which: int, much: int) -> bool:
        """Perhaps one that writes, perhaps at once known to all others."""
        workers = list(self.at.workers)
        if self.since_fault < self.gap or len(workers) <= 2:
            return False
        self.since_fault = 0
        writers = [one.flight.sender.worker_id for one in self.at.fabric.flights if one.orphan is None]
        dead = pick(writers if writers and much % 4 else workers, which)
        self.at.kill(dead, noticed=much // 4 % 2 == 0)
        self.at.loop.call_later(pick(BACK_AFTER_S, much // 8), self.come_back, dead)
        return True

    def disown(self, which: int, much: int) -> bool:
        """One that lives is taken for dead: a writer by whom it writes to, the other way round, or anybody. It goes on,
        at once or after some time in which nothing arrives.
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
        """Messages of one method that may be lost; of each as likely, however many there are."""
        found = [message for message in self.at.network.waiting() if message.fragile]
        methods = sorted({str(message.key[2]) for message in found})
        return [message for message in found if message.key[2] == pick(methods, which)]


class FlippingMachine(ClusterMachine):
    """Workers change their roles, too, in the place of half of some other moves: whoever plays without that, and finds
    the mutants, makes the same moves as ever.
    """

    def repeat(self, which: int, much: int) -> bool:
        return super().repeat(which, much // 2) if much % 2 else self.flip(which, much // 2)

    def disown(self, which: int, much: int) -> bool:
        return super().disown(which, much // 2) if much % 2 else self.flip(which, much // 2)

    def flip(self, which: int, much: int) -> bool:
        """One takes another role, with much time for what it has, or little, or none. Somebody prefills and somebody
        decodes afterwards, as the controller sees to.
        """
        worker_id, role = pick(list(self.at.workers), which), pick(list(Role), much)
        roles = [role, *(other for name, other in self.at.roles.items() if name != worker_id)]
        if not (any(each.prefills for each in roles) and any(each.decodes for each in roles)):
            return False
        self.at.flip(worker_id, role, pick(GRACES_S, much // 4))
        return True


def pick(found: Sequence[T], which: int) -> T:
    """One of them, counted round."""
    return found[which % len(found)]
