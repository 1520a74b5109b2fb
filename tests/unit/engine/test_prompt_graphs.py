"""Which steps of prompts get a graph, and which of them takes a step."""

import random
from dataclasses import replace
from typing import Any, cast

import pytest

from costs.step_grid import TILE_TOKENS, WINDOW_TOKENS, gpu_grid, slots_of, unpadded_prompts
from engine.batch import Draw, StepBatch, StepRow
from engine.models.shapes import shape_config
from engine.prompt_graphs import PromptGraphs, PromptSize, largest, prompt_graph_sizes
from engine.step_graph import StepGraph
from engine.step_packer import StepLimits, StepPacker
from wire.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=1_000_000, pages=70_000, page_tokens=16)
DRAW = Draw(SamplingParams(max_tokens=1), 0)


PLAIN = ((0, 64), (0, 512), (0, 128), (16, 64), (64, 64), (64, 512))
SPLIT = ((0, 64, 16), (0, 64, 4), (0, 128, 64), (16, 64, 4), (64, 64, 16))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    return captured(monkeypatch, *PLAIN)


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> PromptGraphs:
    return captured(monkeypatch, *PLAIN, *SPLIT)


def captured(monkeypatch: pytest.MonkeyPatch, *sizes: tuple[int, ...]) -> PromptGraphs:
    """Of 32 heads on an H200; logits stand for the graph's size."""
    nothing = cast(Any, None)
    made = PromptGraphs(StepPacker(LIMITS), nothing, nothing, (0, 0), gpu_grid(32, split=True))

    def capture(size: PromptSize) -> StepGraph:
        return StepGraph(made.step_sizes(size), nothing, nothing, cast(Any, size), chunks_at=size.answers)

    monkeypatch.setattr(made, "_capture", capture)
    made.capture([PromptSize(*each) for each in sizes])
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


def test_answers_beside_prompts(graphs: PromptGraphs) -> None:
    assert size_of(graphs, answer(), chunk(64)) == (16, 64)
    assert size_of(graphs, *[answer()] * 16, chunk(2), chunk(62)) == (16, 64)
    assert size_of(graphs, *[answer()] * 17, chunk(64)) == (64, 64)
    assert size_of(graphs, answer(), chunk(65)) == (64, 512)
    assert size_of(graphs, chunk(64)) == (0, 64)


def split_of(graphs: PromptGraphs, *rows: StepRow) -> tuple[int, int, int] | None:
    batch = StepBatch(rows)
    graph = graphs.fitting(batch, StepPacker(LIMITS).sizes(batch))
    if graph is None:
        return None
    size = cast(PromptSize, graph.logits)
    return size.answers, size.tokens, size.windows


def test_short_chunks_behind_long_contexts_are_split(split: PromptGraphs) -> None:
    window = WINDOW_TOKENS
    assert split_of(split, chunk(64, 2 * window - 65)) == (0, 64, 0)
    assert split_of(split, chunk(64, 2 * window - 64)) == (0, 64, 4)
    assert split_of(split, chunk(64, 4 * window - 64)) == (0, 64, 4)
    assert split_of(split, chunk(64, 4 * window - 63)) == (0, 64, 16)
    assert split_of(split, chunk(65, 4 * window)) == (0, 128, 64)
    assert split_of(split, chunk(129, 4 * window)) == (0, 512, 0), "no such graph has windows"
    assert split_of(split, chunk(257, 4 * window)) == (0, 512, 0), "more than half of a wave"
    assert split_of(split, chunk(64, 16 * window - 64)) == (0, 64, 16)
    assert split_of(split, chunk(64, 16 * window - 63)) == (0, 64, 0), "more windows than these graphs have"
    assert split_of(split, chunk(65, 64 * window - 65)) == (0, 128, 64)
    assert split_of(split, chunk(65, 64 * window - 64)) == (0, 128, 0), "more than any graph has"


def test_it_is_known_whether_any_is_split(graphs: PromptGraphs, split: PromptGraphs) -> None:
    assert (graphs.splits_attention, split.splits_attention) == (False, True)
    assert split_of(graphs, chunk(64, 5000)) == (0, 64, 0)


def test_answers_are_not_split(split: PromptGraphs) -> None:
    assert split_of(split, answer(100_000), chunk(64)) == (16, 64, 0)
    assert split_of(split, answer(), chunk(64, 5000)) == (16, 64, 4)
    assert split_of(split, answer(), chunk(64, 20_000)) == (16, 64, 0), "not with places for more answers"
    assert split_of(split, *[answer()] * 17, chunk(64, 20_000)) == (64, 64, 16)


def test_several_rows_share_the_windows(split: PromptGraphs) -> None:
    window = WINDOW_TOKENS
    assert split_of(split, chunk(10, 3 * window), chunk(10, 3 * window), chunk(10, 3 * window)) == (0, 64, 4)
    assert split_of(split, *[chunk(10, 3 * window)] * 4) == (0, 64, 16), "16 windows, where 4 and one a row are 12"
    assert split_of(split, *[chunk(2)] * 7, chunk(2, 3 * window)) == (0, 64, 4)
    assert split_of(split, *[chunk(17, 15 * window)] * 4) == (0, 128, 64)
    assert split_of(split, *[chunk(40, 63 * window)] * 2) == (0, 128, 0), "too many for any graph"


def test_a_split_step_has_room_for_its_windows(split: PromptGraphs) -> None:
    """As `plan_segments` needs it: no row has more, nor all together more than beside one for each place of a row."""
    chosen = random.Random(7)
    found = set()
    for _ in range(2000):
        rows = [chunk(chosen.randint(2, 60), chosen.randint(0, 1 << chosen.randint(8, 17))) for _ in range(3)]
        size = split_of(split, *rows)
        if size is not None and size[2]:
            cuts = [-(-(row.start + len(row.token_ids)) // WINDOW_TOKENS) for row in rows]
            assert max(cuts) <= size[2]
            assert sum(cuts) <= size[2] + 8
            found.add(size[2])
    assert found == {4, 16, 64}


@pytest.mark.parametrize(
    ("name", "counts", "most"),
    [("llama-3-8b", [4], 256), ("llama-3.2-1b", [4, 16, 64], 256), ("qwen3-0.6b", [4, 16, 20], 256)],
)
def test_which_steps_are_captured_with_windows(name: str, counts: list[int], most: int) -> None:
    shape = shape_config(name)
    sizes = prompt_graph_sizes(shape, 16384, 256, gpu_grid(shape.heads, split=True))
    plain = [size for size in sizes if not size.windows]
    assert plain == prompt_graph_sizes(shape, 16384, 256)
    for windows in counts:
        wanted = [replace(size, windows=windows) for size in plain if size.tokens <= most]
        assert [size for size in sizes if size.windows == windows] == wanted
    assert len(sizes) == len(plain) + 14 * len(counts)
    short = replace(shape, max_context=2 * WINDOW_TOKENS - 1)
    assert not any(size.windows for size in prompt_graph_sizes(short, 16384, 256, gpu_grid(shape.heads, split=True)))


def test_the_smallest_step_of_each_number_of_windows_is_compiled_ahead(
    split: PromptGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[PromptSize] = []
    monkeypatch.setattr(split, "_step", lambda size: (None, lambda: ran.append(size), None))
    shape = shape_config("llama-3.2-1b")
    split.run_split(prompt_graph_sizes(shape, 16384, 256, gpu_grid(shape.heads, split=True)))
    assert sorted(ran, key=lambda size: size.windows) == [PromptSize(0, 64, windows) for windows in (4, 16, 64)]


def test_memory_is_measured_with_the_largest_of_both_kinds() -> None:
    shape = shape_config("llama-3.2-1b")
    sizes = prompt_graph_sizes(shape, 16384, 256, gpu_grid(shape.heads, split=True))
    assert largest(sizes) == [PromptSize(256, 1792), PromptSize(256, 256, 64)]
    assert largest(prompt_graph_sizes(shape, 16384, 256)) == [PromptSize(256, 1792)]
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
