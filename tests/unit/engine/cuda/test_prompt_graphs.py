"""The choice of prefill and mixed steps with a CUDA graph, and of a step's graph."""

from dataclasses import replace
from typing import Any, cast

import pytest

from tandem.cost_model.step_cost import slots_of, unpadded_prompts
from tandem.cost_model.step_grid import TILE_TOKENS
from tandem.engine.cuda.prompt_graphs import PromptGraphs, PromptSize, largest, prompt_graph_sizes
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.models.shapes import shape_config
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_buffer import StepLimits
from tandem.engine.steps.step_packer import StepPacker
from tandem.protocol.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=1_000_000, pages=70_000, page_tokens=16)
DRAW = SamplingInput(SamplingParams(max_tokens=1), 0)
SIZES = ((0, 64), (0, 512), (0, 128), (16, 64), (64, 64), (64, 512))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    nothing = cast(Any, None)
    made = PromptGraphs(StepPacker(LIMITS), nothing, nothing, (0, 0))

    def capture(size: PromptSize) -> StepGraph:
        return StepGraph(made.step_sizes(size), nothing, nothing, nothing, chunks_at=size.answers)

    monkeypatch.setattr(made, "_capture", capture)
    made.capture([PromptSize(*size) for size in SIZES])
    return made


def chunk(tokens: int, start: int = 0) -> StepRow:
    return StepRow([1] * tokens, start, range(LIMITS.pages), DRAW)


def answer(start: int = 40) -> StepRow:
    return StepRow([1], start, range(LIMITS.pages), DRAW)


def size_of(graphs: PromptGraphs, *rows: StepRow) -> tuple[int | None, int] | None:
    """Returns decode rows and prompt tokens of the graph that takes these rows."""
    batch = StepBatch(rows)
    graph = graphs.fitting(batch, StepPacker(LIMITS).sizes(batch))
    return None if graph is None else (graph.chunks_at, graph.sizes.tokens - graph.sizes.rows + 8)


def tokens_of(graphs: PromptGraphs, *rows: StepRow) -> int | None:
    match = size_of(graphs, *rows)
    return None if match is None else match[1]


def test_the_smallest_that_holds_all_tokens(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(2)) == 64
    assert tokens_of(graphs, chunk(64)) == 64
    assert tokens_of(graphs, chunk(60), chunk(5)) == 128
    assert tokens_of(graphs, *[chunk(64)] * 8) == 512


def test_steps_that_none_takes(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(513)) is None
    assert tokens_of(graphs, *[chunk(2)] * 9) is None
    assert tokens_of(graphs, chunk(1)) is None, "a row that decodes"
    assert tokens_of(graphs, *[answer()] * 65, chunk(64)) is None
    assert tokens_of(graphs, answer(), chunk(513)) is None


def test_page_tables_are_as_wide_as_the_context_until_they_take_long_to_copy(graphs: PromptGraphs) -> None:
    widest = {answers: 300_000 // (answers + 8) * LIMITS.page_tokens for answers in (16, 64)}
    assert tokens_of(graphs, chunk(100, widest[16])) == 128, "without answers"
    assert size_of(graphs, answer(), chunk(64, widest[16] - 64)) == (16, 64)
    assert size_of(graphs, answer(), chunk(64, widest[16] - 63)) is None
    assert size_of(graphs, answer(widest[16] - 1), chunk(64)) == (16, 64)
    assert size_of(graphs, answer(widest[16]), chunk(64)) is None
    assert size_of(graphs, *[answer()] * 17, chunk(64, widest[64] - 64)) == (64, 64)
    assert size_of(graphs, *[answer()] * 17, chunk(64, widest[64] - 63)) is None
    short = PromptGraphs(StepPacker(replace(LIMITS, max_context=8191)), *[cast(Any, None)] * 2, (0, 0))
    assert short.step_sizes(PromptSize(16, 64)).width == 512


def test_prompts_of_more_pages_than_graphs_take(graphs: PromptGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_most_pages", 10)
    assert size_of(graphs, answer(1000), chunk(30, 50), chunk(2, 78)) == (16, 64)
    assert size_of(graphs, answer(1000), chunk(30, 50), chunk(2, 79)) is None


def test_answers_beside_prompts(graphs: PromptGraphs) -> None:
    assert size_of(graphs, answer(), chunk(64)) == (16, 64)
    assert size_of(graphs, *[answer()] * 16, chunk(2), chunk(62)) == (16, 64)
    assert size_of(graphs, *[answer()] * 17, chunk(64)) == (64, 64)
    assert size_of(graphs, answer(), chunk(65)) == (64, 512)
    assert size_of(graphs, chunk(64)) == (0, 64)


def test_memory_is_measured_with_the_largest() -> None:
    assert largest(prompt_graph_sizes(shape_config("llama-3.2-1b"), 16384, 256)) == [PromptSize(256, 1792)]
    assert largest([]) == []


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
    assert totals == {total for total in (*range(128, 1024, 128), *range(1024, 2049, 256)) if total <= most}
    assert len(sizes) < 75, "each takes its time at the start"


def test_ranks_that_divide_tokens_have_graphs_of_the_steps_that_are_too_short_to_divide() -> None:
    sizes = prompt_graph_sizes(shape_config("llama-3-8b"), 16384, 100, divides_tokens=True)
    assert max(size.tokens for size in sizes) == 1024


def test_a_step_with_answers_fills_tiles() -> None:
    """The cost model relies on it: the chunk that it fits to the end of a tile fills a graph."""
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
