"""The choice of decode steps with a CUDA graph, and of a step's graph. Nothing is captured here."""

from itertools import pairwise
from typing import Any, cast

import pytest

from tandem.engine.cuda.cuda_graphs import DecodeGraphs, graph_sizes
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_buffer import StepSizes
from tandem.protocol.messages import SamplingParams

DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 30, 64, 100, 256, 257, 400, 1000])
def test_the_largest_step_has_a_graph_and_none_is_larger(rows: int) -> None:
    sizes = graph_sizes(rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == rows
    assert sizes[0] == 1


def test_padding_stays_small() -> None:
    sizes = graph_sizes(1000)
    assert all(large <= max(2 * small, small + 64) for small, large in pairwise(sizes))
    assert graph_sizes(600)[-6:] == [320, 384, 448, 512, 576, 600]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Graphs of 1, 4 and 8 rows, in the order in which `capture` leaves them."""
    nothing = cast(Any, None)
    made = DecodeGraphs(nothing, nothing, nothing, nothing, (0, 0))

    def captured(rows: int) -> StepGraph:
        return StepGraph(StepSizes(tokens=rows, rows=rows, width=1, drawn=rows), nothing, nothing, nothing)

    monkeypatch.setattr(made, "_capture", captured)
    made.capture([1, 4, 8])
    return made


def decoding(*starts: int) -> StepBatch:
    return StepBatch([StepRow([5], start, range(9), DRAW) for start in starts])


@pytest.mark.parametrize(("starts", "rows"), [([0], 1), ([3] * 4, 4), ([3] * 5, 8), ([3, 100_000], 4), ([100_000], 1)])
def test_the_smallest_graph_that_holds_all_rows(graphs: DecodeGraphs, starts: list[int], rows: int) -> None:
    graph = graphs.fitting(decoding(*starts))
    assert graph is not None
    assert graph.sizes.rows == rows


def test_a_step_that_no_graph_computes(graphs: DecodeGraphs) -> None:
    assert graphs.fitting(decoding(*range(9))) is None
    assert graphs.fitting(StepBatch([*decoding(3).rows, StepRow([5, 6], 0, range(9), DRAW)])) is None
    assert graphs.fitting(StepBatch([*decoding(3).rows, StepRow([5], 0, range(9), None)])) is None
