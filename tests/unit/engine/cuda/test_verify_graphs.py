"""The steps with drafts that get a CUDA graph, and the choice of a step's graph. Nothing is captured here."""

from collections.abc import Sequence
from typing import Any, cast

import pytest

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.cuda.verify_graphs import DRAFTS, MOST_ROWS, VerifyGraphs, VerifySize, most_groups, verify_sizes
from tandem.engine.kernels.base import Kernels
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.draft_groups import groups_needed
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_buffer import StepSizes
from tandem.protocol.messages import SamplingParams

DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
NOTHING = cast(Any, None)


class Grouping:
    """Kernels whose groups have 4 rows, 8 with more than 3 drafts, as for 4 heads of each key head."""

    def draft_group_rows(self, drafts: int) -> int:
        return 4 if drafts <= 3 else 8


def sizes_of(max_requests: int, max_rows: int = 2048, kernels: object = None) -> list[VerifySize]:
    return verify_sizes(cast(Kernels, kernels or Grouping()), max_requests, max_rows)


@pytest.mark.parametrize(("max_requests", "graphs"), [(1, 5), (8, 20), (64, 41), (128, 46), (256, 46), (1000, 46)])
def test_the_number_of_graphs_is_bounded(max_requests: int, graphs: int) -> None:
    sizes = sizes_of(max_requests)
    assert len(sizes) == graphs
    assert sizes == sorted(set(sizes))
    assert {size.rows // size.requests - 1 for size in sizes} == set(DRAFTS)
    assert all(2 * size.requests <= size.rows <= MOST_ROWS for size in sizes)


def test_no_graph_is_larger_than_a_step() -> None:
    assert max(size.rows for size in sizes_of(64, max_rows=40)) <= 40


def test_attention_without_groups_needs_no_graphs() -> None:
    class Single(Grouping):
        def draft_group_rows(self, drafts: int) -> int:
            return 1

    assert sizes_of(64, kernels=Single()) == []
    with_states = verify_sizes(Single(), 64, 1 << 20, states=True)
    assert with_states
    assert all(size.groups is None and size.rows <= 64 for size in with_states)


def test_the_scratch_holds_the_groups_of_every_graph() -> None:
    sizes = sizes_of(128)
    groups = most_groups(sizes)
    assert set(groups) == {4, 8}
    assert all(size.groups.groups <= groups[size.group_rows] for size in sizes)
    assert max(groups.values()) == 128 + 128 // 4


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> VerifyGraphs:
    made = VerifyGraphs(NOTHING, NOTHING, NOTHING, NOTHING, (0, 0))

    def captured(size: VerifySize) -> StepGraph:
        sizes = StepSizes(size.rows, size.rows, width=1, drawn=size.rows)
        return StepGraph(sizes, NOTHING, NOTHING, NOTHING, groups=size.groups)

    monkeypatch.setattr(made, "_capture", captured)
    made.capture(sizes_of(8))
    return made


def drafting(counts: Sequence[int]) -> StepBatch:
    """Returns a step of requests with so many drafts each."""
    newest = [StepRow([5], 3, range(9), DRAW) for _ in counts]
    return StepBatch([], with_drafts(newest, [[0] * count for count in counts]))


@pytest.mark.parametrize(
    ("counts", "rows", "requests"),
    [
        ([1], 2, 1),
        ([4], 6, 1),
        ([1, 1, 1], 8, 4),
        ([7, 0, 0, 0], 12, 4),
        ([3] * 8, 32, 8),
        ([7] * 8, 64, 8),
        ([7, 1, 0, 0, 0, 0, 0, 0], 16, 8),
    ],
)
def test_the_graph_of_the_fewest_rows_that_holds_all(
    graphs: VerifyGraphs, counts: list[int], rows: int, requests: int
) -> None:
    graph = graphs.fitting(drafting(counts))
    assert graph is not None
    assert graph.groups is not None
    assert graph.sizes.rows == rows
    assert graph.groups.groups == groups_needed(requests, rows, graph.groups.rows)
    assert graph.input_words == graph.sizes.words + graph.groups.words


def test_steps_that_no_such_graph_computes(graphs: VerifyGraphs) -> None:
    assert graphs.fitting(drafting([0] * 4)) is None, "no drafts"
    assert graphs.fitting(drafting([1] * 9)) is None, "too many requests"
    with_drafts = drafting([2, 2])
    assert graphs.fitting(StepBatch([StepRow([5, 6], 0, range(9), DRAW)], with_drafts.tokens)) is None, "a prompt"
