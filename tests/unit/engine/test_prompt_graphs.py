"""Which steps of prompts get a graph, and which of them takes a step."""

from typing import Any, cast

import pytest

from engine.batch import Draw, StepBatch, StepRow
from engine.cuda_graphs import SHORT_CONTEXT
from engine.models.shapes import shape_config
from engine.prompt_graphs import PromptGraphs, prompt_graph_sizes
from engine.step_graph import StepGraph
from engine.step_packer import StepLimits, StepPacker, StepSizes
from wire.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=4 * SHORT_CONTEXT, pages=9000, page_tokens=16)
DRAW = Draw(SamplingParams(max_tokens=1), 0)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    nothing = cast(Any, None)
    made = PromptGraphs(StepPacker(LIMITS), nothing, nothing, (0, 0))

    def captured(tokens: int) -> StepGraph:
        return StepGraph(StepSizes(tokens, 8, LIMITS.pages_of(SHORT_CONTEXT), 8), SHORT_CONTEXT, *[nothing] * 3)

    monkeypatch.setattr(made, "_capture", captured)
    made.capture([64, 512, 128])
    return made


def chunk(tokens: int, start: int = 0) -> StepRow:
    return StepRow([1] * tokens, start, range(LIMITS.pages), DRAW)


def tokens_of(graphs: PromptGraphs, *rows: StepRow) -> int | None:
    batch = StepBatch(rows)
    graph = graphs.fitting(batch, StepPacker(LIMITS).sizes(batch))
    return None if graph is None else graph.sizes.tokens


def test_the_smallest_that_holds_all_tokens(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(2)) == 64
    assert tokens_of(graphs, chunk(64)) == 64
    assert tokens_of(graphs, chunk(60), chunk(5)) == 128
    assert tokens_of(graphs, *[chunk(64)] * 8) == 512
    assert tokens_of(graphs, chunk(100, SHORT_CONTEXT - 100)) == 128


def test_steps_that_none_takes(graphs: PromptGraphs) -> None:
    assert tokens_of(graphs, chunk(513)) is None
    assert tokens_of(graphs, *[chunk(2)] * 9) is None
    assert tokens_of(graphs, chunk(100, SHORT_CONTEXT - 99)) is None
    assert tokens_of(graphs, chunk(1)) is None, "a row that decodes"
    assert tokens_of(graphs, chunk(1), chunk(64)) is None


@pytest.mark.parametrize(
    ("name", "most"), [("qwen3-0.6b", 2048), ("llama-3.2-1b", 2048), ("llama-3-8b", 512), ("qwen3-32b", 256)]
)
def test_wide_layers_keep_the_device_busy_with_fewer_tokens(name: str, most: int) -> None:
    sizes = prompt_graph_sizes(shape_config(name), max_step_tokens=16384)
    assert sizes == sorted(sizes)
    assert sizes[-1] == most


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    narrow = shape_config("qwen3-0.6b")
    assert prompt_graph_sizes(narrow, max_step_tokens=700)[-1] == 640
    assert prompt_graph_sizes(narrow, max_step_tokens=63) == []
