"""Which steps of prompts get a graph, and which of them takes a step."""

from typing import Any, cast

import pytest

from costs.step_grid import TILE_TOKENS, slots_of, unpadded_prompts
from engine.batch import Draw, StepBatch, StepRow
from engine.models.shapes import shape_config
from engine.prompt_graphs import MOST_CONTEXT, PromptGraphs, PromptSize, prompt_graph_sizes
from engine.step_graph import StepGraph
from engine.step_packer import StepLimits, StepPacker
from engine.step_sections import StepSizes
from wire.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=4 * MOST_CONTEXT, pages=9000, page_tokens=16)
DRAW = Draw(SamplingParams(max_tokens=1), 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    nothing = cast(Any, None)
    made = PromptGraphs(StepPacker(LIMITS), nothing, nothing, (0, 0))

    def captured(size: PromptSize) -> StepGraph:
        rows = size.answers + 8
        sizes = StepSizes(size.answers + size.tokens, rows, LIMITS.pages_of(MOST_CONTEXT), rows)
        return StepGraph(sizes, *[nothing] * 3, chunks_at=size.answers)

    monkeypatch.setattr(made, "_capture", captured)
    made.capture([PromptSize(*each) for each in ((0, 64), (0, 512), (0, 128), (16, 64), (64, 64), (64, 512))])
    return made


def chunk(tokens: int, start: int = 0) -> StepRow:
    return StepRow([1] * tokens, start, range(LIMITS.pages), DRAW)


def answer(start: int = 40) -> StepRow:
    return StepRow([1], start, range(LIMITS.pages), DRAW)


def size_of(graphs: PromptGraphs, *rows: StepRow) -> tuple[int | None, int] | None:
    """Answers and prompt tokens of the graph that takes these rows."""
    batch = StepBatch(rows)
    graph = graphs.fitting(batch, StepPacker(LIMITS).sizes(batch))
    return None if graph is None else (graph.chunks_at, graph.sizes.tokens - graph.sizes.rows + 8)


def tokens_of(graphs: PromptGraphs, *rows: StepRow) -> int | None:
    found = size_of(graphs, *rows)
    return None if found is None else found[1]


def test_the_smallest_that_holds_all_tokens(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(2)) == 64
    assert tokens_of(graphs, chunk(64)) == 64
    assert tokens_of(graphs, chunk(60), chunk(5)) == 128
    assert tokens_of(graphs, *[chunk(64)] * 8) == 512
    assert tokens_of(graphs, chunk(100, MOST_CONTEXT - 100)) == 128


def test_steps_that_none_takes(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(513)) is None
    assert tokens_of(graphs, *[chunk(2)] * 9) is None
    assert tokens_of(graphs, chunk(100, MOST_CONTEXT - 99)) is None
    assert tokens_of(graphs, chunk(1)) is None, "a row that decodes"
    assert tokens_of(graphs, *[answer()] * 65, chunk(64)) is None
    assert tokens_of(graphs, answer(), chunk(513)) is None
    assert tokens_of(graphs, answer(MOST_CONTEXT), chunk(64)) is None


def test_answers_beside_prompts(graphs: PromptGraphs) -> None:
    assert size_of(graphs, answer(), chunk(64)) == (16, 64)
    assert size_of(graphs, *[answer()] * 16, chunk(2), chunk(62)) == (16, 64)
    assert size_of(graphs, *[answer()] * 17, chunk(64)) == (64, 64)
    assert size_of(graphs, answer(), chunk(65)) == (64, 512)
    assert size_of(graphs, chunk(64)) == (0, 64)


@pytest.mark.parametrize(
    ("name", "most"), [("qwen3-0.6b", 2048), ("llama-3.2-1b", 2048), ("llama-3-8b", 2048), ("qwen3-32b", 896)]
)
def test_wide_layers_are_worth_graphs_of_fewer_tokens(name: str, most: int) -> None:
    sizes = prompt_graph_sizes(shape_config(name), max_step_tokens=16384, max_answers=100)
    alone = [size.tokens for size in sizes if size.answers == 0]
    assert alone == sorted(alone)
    assert alone[-1] == most
    assert sorted({size.answers for size in sizes}) == [0, 16, 32, 64, 100]
    totals = {size.answers + size.tokens for size in sizes if size.answers}
    assert totals == {each for each in (*range(128, 1024, 128), *range(1024, 2049, 256)) if each <= most}
    assert len(sizes) < 75, "each takes its time at the start"


def test_a_step_with_answers_fills_tiles() -> None:
    """As costs count on it: what they take for the end of a tile fills a graph."""
    sizes = prompt_graph_sizes(shape_config("llama-3-8b"), max_step_tokens=16384, max_answers=256)
    for answers, asked in ((3, 200), (16, 300), (17, 500), (100, 300), (3, 900), (40, 1270), (100, 1700), (7, 2032)):
        tokens = unpadded_prompts(asked, answers, TILE_TOKENS)
        assert PromptSize(slots_of(answers), tokens) in sizes


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    narrow = shape_config("qwen3-0.6b")
    sizes = prompt_graph_sizes(narrow, max_step_tokens=700, max_answers=1)
    assert max(size.tokens for size in sizes) == 640
    assert sizes[-1] == PromptSize(1, 639)
    assert prompt_graph_sizes(narrow, max_step_tokens=63, max_answers=1) == []
