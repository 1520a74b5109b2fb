"""The benchmark of step costs, with runners whose steps take a known time."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from benchmarks.step_costs import Size, Timed, figures, fitted, main, measure, sizes
from tandem.cost_model.step_cost import CostParameters, StepCost
from tandem.engine.graph_use import GraphUse
from tandem.engine.steps.batch import StepBatch
from tandem.protocol.kv_pages import KvPages

TRUE = CostParameters(base_s=4e-3, prompt_base_s=2e-3, token_s=2e-5, pair_s=1e-9, row_s=2e-5, context_s=3e-8)


@dataclass
class Runner:
    """Counts launches ahead of reads; each step ends a millisecond after the one before it."""

    asynchronous: bool
    graphs: bool = True
    kv_pages: KvPages = field(default_factory=lambda: KvPages(16))
    graph_use: GraphUse = field(default_factory=GraphUse)
    ahead: list[int] = field(default_factory=list)
    running: int = 0

    def launch(self, batch: StepBatch) -> Callable[[], None]:
        self.running += 1
        self.ahead.append(self.running)
        self.graph_use.hits += self.graphs
        return self._read

    def _read(self) -> None:
        self.running -= 1
        time.sleep(1e-3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_run_as_in_a_worker(asynchronous: bool) -> None:
    runner = Runner(asynchronous)
    found = measure(cast(Any, runner), Size(2, 30, 16, 20), steps=5)
    assert len(runner.ahead) == 7
    assert max(runner.ahead) == (2 if asynchronous else 1)
    assert runner.running == 0
    assert found.seconds >= 1e-3
    assert found.graph
    assert not measure(cast(Any, Runner(asynchronous, graphs=False)), Size(2, 30, 16, 20), steps=5).graph


def test_rows_have_pages_of_their_own() -> None:
    batch = Size(3, 30, 16, 20).batch(KvPages(16))
    pages = [page for row in batch.rows for page in row.page_ids]
    assert len(pages) == len(set(pages)) == 3 * 2 + 3
    assert [row.start for row in batch.rows] == [20, 20, 20, 16]
    assert len(Size(3, 0, 0, 20).batch(KvPages(16))) == 3


def test_each_size_once_and_none_that_is_empty() -> None:
    found = sizes([0, 4], [0, 32], [0, 100], 50)
    assert found == [
        Size(0, 32, 0, 50),
        Size(0, 32, 100, 50),
        Size(4, 0, 0, 50),
        Size(4, 32, 0, 50),
        Size(4, 32, 100, 50),
    ]


def test_a_size_that_the_model_has_no_form_for_is_seen() -> None:
    cost = StepCost(TRUE)
    odd = Size(16, 500, 0, 1500)
    timed = [
        Timed(size, cost.seconds(size.work) * (2.0 if size == odd else 1.0), graph=size != odd)
        for size in sizes([0, 4, 16, 40], [0, 32, 100, 500, 1000, 2000], [0, 2000], 1500)
    ]
    found = figures(timed, fitted(CostParameters(), timed, rounds=40))
    assert found["graphs_over_predicted_least"] > 0.93
    assert found["graphs_over_predicted_most"] < 1.07
    assert found["launched_over_predicted_most"] > 1.7


def test_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--answers", "0,2", "--tokens", "0,8", "--contexts", "0,20", "--answer-context", "30", "--steps", "2"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    result = json.loads(last)
    assert result["fitted"]["observed"] > 0
    assert result["launched_over_predicted_most"] >= result["launched_over_predicted_least"] > 0
