"""The planner in the controller: the operator executes its decisions, and metrics and logs show them."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.cluster.planning import Planning
from tandem.cluster.supervision.modes import ModeChange
from tandem.cluster.supervision.size import SizeChange
from tandem.metrics import families as f
from tandem.metrics.exposition import Exposition, merge
from tandem.metrics.registry import Registry
from tandem.metrics.scrape import Scrape
from tandem.protocol.cost_parameters import CostParameters
from tandem.protocol.errors import DeadlineExceeded, InvalidArgument
from tandem.protocol.messages import Assignment, Membership, ModelFacts, PeerRef, Role, WorkerInfo
from tandem.protocol.mode import Mode
from tandem.settings.cluster import ClusterSettings
from tandem.settings.options import read_options
from tandem.settings.planner import Limits, PlannerMode, PlannerSettings, Range
from tandem.settings.slo import DEFAULT_CLASSES
from tandem.worker.reporting.metrics import step_costs

COST = CostParameters(1e-2, 0.0, 1e-4, 0.0, 1e-4, 0.0, 0, 0.01, 99)
FACTS = ModelFacts("m", 10, 4096, (), "float32")
WINDOW_S = 10.0


class Hand:
    """An operator that completes changes at once, unless it is late."""

    def __init__(self) -> None:
        self.asked: list[ModeChange | SizeChange] = []
        self.late = False
        self.coming = 0

    async def set_mode(self, change: ModeChange) -> tuple[WorkerInfo, ...]:
        return await self.resize(change)

    async def resize(self, change: ModeChange | SizeChange) -> tuple[WorkerInfo, ...]:
        self.asked.append(change)
        if self.late:
            raise DeadlineExceeded("decode-0 still finishes what it had")
        return ()


class Scene:
    """A cluster whose metrics a test sets."""

    def __init__(self, config: PlannerSettings, roles: list[Role]) -> None:
        self.hand, self.now, self.requests = Hand(), 0.0, 0.0
        self.workers = [
            WorkerInfo(
                PeerRef(f"w-{n}", 1),
                role,
                "a:1",
                FACTS,
                10**6,
                16,
                1000,
                900,
                "cpu",
                "fake",
                assignment=Assignment(role),
            )
            for n, role in enumerate(roles)
        ]
        self.router = Registry({"model": "m", "role": "router", "worker": "router"})
        self.boards = [self.router, *(self._registry(info) for info in self.workers)]
        self.own = Registry({"model": "m", "worker": "controller"})
        self.planning = Planning(
            config,
            DEFAULT_CLASSES,
            self.hand,
            membership=lambda: Membership(1, tuple(self.workers)),
            scrape=self._scrape,
            clock=lambda: self.now,
        )
        self.planning.export_to(self.own)

    def _registry(self, info: WorkerInfo) -> Registry:
        registry = Registry({"model": "m", "worker": info.peer.worker_id})
        registry.read(lambda: step_costs(COST))
        return registry

    async def _scrape(self) -> str:
        return merge([Exposition(registry).render()[0].decode() for registry in self.boards])

    async def poll(self, per_s: float, prompt: int = 900, answer: float = 10.0, times: int = 1) -> None:
        for _ in range(times):
            self.now += WINDOW_S
            count = per_s * WINDOW_S
            self.router.counter(f.OFFERED_REQUESTS).add(count)
            self.router.counter(f.OFFERED_PROMPT_TOKENS).add(count * prompt)
            self.router.counter(f.OFFERED_ANSWER_TOKENS).add(count * answer)
            await self.planning.poll()

    def scrape(self) -> Scrape:
        return Scrape(Exposition(self.own).render()[0].decode(), self.now)


APART = [Role.PREFILL] * 4 + [Role.DECODE] * 4
ON = PlannerSettings(PlannerMode.ON, WINDOW_S)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "tandem.cluster.planning"):
        yield caplog


async def test_roles_change_and_metrics_and_logs_say_why(said: pytest.LogCaptureFixture) -> None:
    scene = Scene(ON, APART)
    await scene.poll(45.0, times=4)
    (change,) = scene.hand.asked
    assert isinstance(change, ModeChange)
    assert (change.mode, change.prefill, change.decode) == (Mode.DISAGGREGATED, 7, 0)
    metrics = scene.scrape()
    assert metrics.total(f.PLANNER_CHANGES, direction="to_prefill") == 1
    assert metrics.total(f.PLANNER_WANTED, role="prefill") == 7
    assert metrics.total(f.PLANNER_LOAD_RATIO, role="prefill") > 1 > metrics.total(f.PLANNER_LOAD_RATIO, role="decode")
    assert "from 4:4 to 7:1: 45 requests/s of 900 computed" in said.text


async def test_a_dry_run_decides_and_changes_nothing(said: pytest.LogCaptureFixture) -> None:
    scene = Scene(PlannerSettings(PlannerMode.DRY_RUN, WINDOW_S), APART)
    await scene.poll(45.0, times=4)
    assert scene.hand.asked == []
    assert scene.scrape().total(f.PLANNER_CHANGES, direction="to_prefill") == 1
    assert "planner, dry run: from 4:4 to 7:1" in said.text


async def test_the_number_of_workers_follows_where_it_may() -> None:
    limits = Limits(workers=Range(4, 16))
    scene = Scene(PlannerSettings(PlannerMode.ON, WINDOW_S, limits), [Role.BOTH] * 4)
    await scene.poll(45.0, answer=450.0, times=4)
    (change,) = scene.hand.asked
    assert isinstance(change, SizeChange)
    assert change.prefill == change.decode == 0
    assert 4 < change.workers <= 16


async def test_serving_workers_change_their_roles_while_others_wait_for_a_node() -> None:
    limits = Limits(workers=Range(4, 16))
    scene = Scene(PlannerSettings(PlannerMode.ON, WINDOW_S, limits), [Role.PREFILL] + [Role.DECODE] * 3)
    scene.hand.late = True
    with pytest.raises(DeadlineExceeded):
        await scene.poll(45.0, times=4)
    (grown,) = scene.hand.asked
    assert isinstance(grown, SizeChange)
    scene.hand.coming, scene.hand.late = grown.prefill + grown.decode - 4, False
    await scene.poll(45.0, times=8)
    assert isinstance(scene.hand.asked[1], ModeChange)
    assert scene.hand.asked[1].prefill == 3
    scene.hand.coming = 0
    await scene.poll(45.0, times=8)
    assert isinstance(scene.hand.asked[-1], SizeChange), "nobody is on the way any more"


async def test_a_look_that_fails_is_not_the_last(said: pytest.LogCaptureFixture) -> None:
    scene = Scene(PlannerSettings(PlannerMode.ON, 1e-3), APART)
    looks = 0

    async def poll() -> None:
        nonlocal looks
        looks += 1
        raise ValueError("no figure") if looks == 1 else asyncio.CancelledError

    scene.planning.poll = poll  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await scene.planning.run()
    assert looks == 2
    assert "the planner failed to process a window" in said.text


async def test_what_is_late_is_an_error_and_the_next_look_begins_anew() -> None:
    scene = Scene(ON, APART)
    scene.hand.late = True
    with pytest.raises(DeadlineExceeded):
        await scene.poll(45.0, times=4)
    scene.hand.late = False
    scene.now += 1e6  # however long that took: it is of no window
    await scene.poll(45.0, times=3)
    wanted = scene.scrape().total(f.PLANNER_WANTED, role="prefill")
    assert wanted == 7


def test_settings_come_from_the_command_line() -> None:
    ranges = {"planner_workers": "2:8", "planner_prefill": "1:4", "planner_decode": "1:6"}
    config = read_options(PlannerSettings, {"planner": "on", "planner_window": 5.0, **ranges})
    assert config == PlannerSettings(PlannerMode.ON, 5.0, Limits(Range(1, 4), Range(1, 6), Range(2, 8)))
    assert read_options(PlannerSettings, {"planner": "off", "planner_window": 15.0}) == PlannerSettings()


@pytest.mark.parametrize(
    ("settings", "option"),
    [
        ({"planner": "maybe"}, "--planner"),
        ({"planner_window": 0.0}, "--planner-window"),
        ({"planner_workers": "8"}, "--planner-workers"),
        ({"planner_prefill": "4:2"}, "--planner-prefill"),
        ({"planner_decode": "0:2"}, "--planner-decode"),
        ({"planner": "off", "planner_workers": "2:8"}, "--planner-workers"),
        ({"planner": "off", "planner_decode": "1:2"}, "--planner-decode"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], option: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        read_options(ClusterSettings, {"model": "m", "planner": "on"} | settings)
    assert error.value.field == option


def test_a_cluster_that_shares_needs_a_range_of_workers() -> None:
    with pytest.raises(InvalidArgument, match="--planner-workers"):
        ClusterSettings.of(Path("m"), mode=Mode.ADAPTIVE, planner=ON)
    ClusterSettings.of(
        Path("m"), mode=Mode.ADAPTIVE, planner=PlannerSettings(PlannerMode.ON, 5.0, Limits(workers=Range(1, 2)))
    )
