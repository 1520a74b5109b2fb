"""The tiles of each row that each program of decode attention takes, against the plain model of `tile_range_model`.

In the interpreter the attention kernels themselves report them: their steps are replaced by a recorder.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention import triton_attention_kernels as kernels
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.attention.triton_attention_plan import Plan, PlanFunction, make_plan
from tandem.engine.kernels.attention.triton_attention_ranges import TileRange
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels import tile_range_model
from tests.kernels.decode_cases import DEVICE, ON_GPU, attention_of, check, decode_step, fixed, rows_of
from tests.kernels.steps import heads
from tests.kernels.tile_range_model import Line, Part, seen_tiles, tile_line
from tests.soak import examples

BLOCK = 32
"""Tokens of a tile, see `fixed`."""
PAGE = 64
KV_HEADS = 2
interpreted = pytest.mark.skipif(ON_GPU, reason="machine code keeps no notebook")

contexts = st.one_of(
    st.just(0),
    st.integers(1, BLOCK - 1),
    st.sampled_from([BLOCK, 2 * BLOCK, 10 * BLOCK]),
    st.integers(1, 2500),
)
"""Contexts of padded rows, of rows shorter than a tile, of whole tiles, of any length."""
unlike = st.lists(contexts, min_size=1, max_size=75)
alike = st.integers(1, 2500).flatmap(
    lambda longest: st.lists(st.integers(longest * 7 // 8, longest), min_size=1, max_size=40)
)
"""Contexts of similar length."""
padded = st.tuples(alike, st.integers(0, 3)).map(lambda rows: rows[0] + [0] * rows[1])
rows = st.one_of(unlike, alike, padded)
programs = st.integers(1, 40)
windows = st.one_of(st.none(), st.integers(1, 300))


class Notebook:
    """Records the work of a call's programs, instead of doing it, by key head, and the indices of partial results."""

    def __init__(self) -> None:
        self.taken: dict[int, list[Part]] = defaultdict(list)
        self.slots: list[int] = []
        self.firsts: dict[int, set[int]] = defaultdict(set)

    def attend(self, *given: Any) -> tuple[int, int, None]:
        """Replaces `triton_attention_tiles.attend`."""
        start, end = given[5:7]
        return _number(start), _number(end), None

    def deliver(self, start: int, end: int, _: None, *where: Any) -> None:
        """Replaces `triton_attention_tiles.deliver`, for the result of `attend`."""
        lane, number, active, first_partial = map(_number, where[:4])
        row, kv_head = divmod(lane, KV_HEADS)
        persistent = _number(tl.num_programs(2)) == 1
        program = _number(tl.program_id(1)) if persistent else row * _number(tl.num_programs(2)) + number
        assert _number(tl.program_id(0)) == kv_head
        self.taken[kv_head].append(Part(program, row, tuple(range(start, end)), number, active))
        if active > 1:
            self.slots.append(first_partial + number)
            self.firsts[lane].add(first_partial)


def _number(scalar: Any) -> int:
    return int(scalar.handle.data.item()) if isinstance(scalar, tl.tensor) else int(scalar)


def shape_of(window: int | None, head_dim: int = 16) -> AttentionShape:
    return heads(2 * KV_HEADS, KV_HEADS, head_dim, window)


def attention_with(choose: PlanFunction, shape: AttentionShape, most_rows: int) -> DecodeAttention:
    return DecodeAttention(shape, most_rows, DEVICE, torch.float16, overlaps_launches(), early=True, choose=choose)


def begin(attention: DecodeAttention, lengths: Sequence[int], columns: int = 40) -> tuple[torch.Tensor, ...]:
    """Begins a step of rows of these contexts → the arguments of its calls, except queries."""
    cache = torch.zeros(1, 1, 2, KV_HEADS, PAGE, attention._shape.head_dim, dtype=torch.float16, device=DEVICE)
    table = torch.zeros(len(lengths), columns, dtype=torch.int32, device=DEVICE)
    contexts = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    attention.begin_step(cache, table, contexts)
    return cache, table, contexts


def noted(attention: DecodeAttention, lengths: Sequence[int], columns: int = 40) -> Notebook:
    """Returns the record of a call's programs."""
    cache, table, contexts = begin(attention, lengths, columns)
    shape, notebook = attention._shape, Notebook()
    q = torch.zeros(len(lengths), shape.heads, shape.head_dim, dtype=torch.float16, device=DEVICE)
    with patch.object(kernels, "attend", notebook.attend), patch.object(kernels, "deliver", notebook.deliver):
        attention(q, cache, 0, table, contexts)
    return notebook


def tile_ranges_of(attention: DecodeAttention) -> list[TileRange]:
    return [TileRange(*tile_range) for tile_range in attention._begun.step.tile_ranges.tolist()]


def tiles_of(lengths: Iterable[int], window: int | None, block_tokens: int = BLOCK) -> list[list[int]]:
    return [seen_tiles(length, window, block_tokens) for length in lengths]


def assert_each_once(parts: Sequence[Part], seen: Sequence[Sequence[int]]) -> None:
    """Checks that a row's parts are numbered and have its tiles in order, or are one empty part."""
    for row, tiles in enumerate(seen):
        own = sorted((part for part in parts if part.row == row), key=lambda part: part.number)
        assert [part.number for part in own] == list(range(len(own)))
        assert {part.of for part in own} == {len(own)}
        assert [tile for part in own for tile in part.tiles] == list(tiles)
        assert own[0].tiles or not tiles, "a first part without a tile has no maximum to merge with"


def most_tiles(line: Line, seen: Sequence[Sequence[int]], programs: int) -> int:
    """Returns an even share of all cells, or an eighth more than one of all tiles where no row is cut unnecessarily."""
    share = -(-sum(len(tiles) or 1 for tiles in seen) // programs)
    return share if line.least == 1 else max(share, 9 * sum(map(len, seen)) // (8 * programs))


def most_taken(notebook: Notebook) -> int:
    """Returns the tiles of the program that has the most."""
    taken: dict[int, int] = defaultdict(int)
    for part in notebook.taken[0]:
        taken[part.program] += len(part.tiles)
    return max(taken.values())


def assert_as_expected(notebook: Notebook, expected: list[Part], seen: Sequence[Sequence[int]], room: int) -> None:
    """Checks each key head's programs, and that their partial results are adjacent and not shared."""
    for kv_head in range(KV_HEADS):
        assert sorted(notebook.taken[kv_head]) == expected
    assert_each_once(notebook.taken[0], seen)
    assert len(set(notebook.slots)) == len(notebook.slots)
    assert max(notebook.slots, default=0) < room
    assert all(len(firsts) == 1 for firsts in notebook.firsts.values())


@pytest.mark.parametrize(
    ("lengths", "units", "ranges"),
    [
        ([256] * 5, 5, [8] * 5),
        ([256] * 9 + [0], 10, [8] * 9 + [1]),
        ([256, 250, 200, 256], 4, [8] * 4),
        ([256] * 8, 3, [24, 24, 16]),
        ([256] * 2, 9, [2] * 8),
        ([256] * 5 + [0], 5, [9, 9, 9, 9, 5]),
        ([256] * 4, 3, [11, 11, 10]),
        ([256, 32, 32, 32], 4, [3, 3, 3, 2]),
    ],
    ids=["one each", "and one padded", "nearly one length", "several each", "parts", "no room", "waste", "uneven"],
)
def test_rows_of_about_one_length_are_not_cut(lengths: list[int], units: int, ranges: list[int]) -> None:
    """Compares the number of cells of each program that has any."""
    line = tile_line(tiles_of(lengths, None), units)
    cells = len(line.cells)
    assert [min(line.range_tiles, cells - start) for start in range(0, cells, line.range_tiles)] == ranges
    step = decode_step(lengths, heads(2, 1, 64), 64)
    attention = attention_of(step, choose=fixed(units))
    attention.begin_step(step.cache_as(torch.float16).to(DEVICE), *rows_of(step))
    assert tile_ranges_of(attention) == [line.tile_range(unit) for unit in range(units)]
    if 0 not in lengths:
        check(step, torch.float16, choose=fixed(units))


@given(rows, programs, windows)
@example([700], 1, None)
@example([700], 40, 100)
@example([0, 0, 0], 5, None)
@example([5, 0, 5, 0], 1, 3)
@example([*[33] * 70], 7, None)
@example([2500, *[1] * 40], 16, None)
@settings(max_examples=examples(8))
def test_records_are_those_of_the_model(lengths: list[int], units: int, window: int | None) -> None:
    attention = attention_with(fixed(units), shape_of(window), len(lengths))
    begin(attention, lengths)
    line = tile_line(tiles_of(lengths, window), units)
    assert tile_ranges_of(attention) == [line.tile_range(unit) for unit in range(units)]


@interpreted
@given(rows, programs, windows)
@example([700], 40, 100)
@example([0, 0, 0], 5, None)
@example([5, 0, 5, 0], 1, 3)
@example([256, 0, 256, 0], 7, None)
@example([2500, *[1] * 40], 16, None)
@settings(max_examples=examples(4))
def test_programs_take_what_the_model_gives_them(lengths: list[int], units: int, window: int | None) -> None:
    seen = tiles_of(lengths, window)
    notebook = noted(attention_with(fixed(units), shape_of(window), len(lengths)), lengths)
    line = tile_line(seen, units)
    assert_as_expected(notebook, line.parts(), seen, KV_HEADS * (units + len(lengths)))
    assert most_taken(notebook) <= most_tiles(line, seen, units)


@interpreted
@given(st.lists(contexts, min_size=1, max_size=3), st.sampled_from([1, 2, 7, 33]), st.integers(1, 40), windows)
@example([700], 33, 1, None)
@settings(max_examples=examples(4))
def test_programs_of_one_row_take_what_the_model_gives_them(
    lengths: list[int], splits: int, least: int, window: int | None
) -> None:
    plan = Plan(BLOCK, warps=4, stages=2, splits=splits, least_tiles=least)
    seen = tiles_of(lengths, window)
    notebook = noted(attention_with(lambda *_: plan, shape_of(window), len(lengths)), lengths)
    assert_as_expected(
        notebook, tile_range_model.split(seen, splits, least), seen, KV_HEADS * plan.partials(len(lengths))
    )


steps = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 1 << 30)), min_size=2, max_size=3)
"""Columns of a table, and the seed of the contexts."""


@interpreted
@given(st.integers(1, 40), steps, windows, st.sampled_from([64, 128]))
@example(2, [(1, 0), (40, 1), (1, 2)], None, 64)
@settings(max_examples=examples(3))
def test_steps_of_as_many_rows_and_tables_of_other_widths(
    count: int, widths_and_seeds: list[tuple[int, int]], window: int | None, head_dim: int
) -> None:
    """All steps share one attention's memory and use the engine's own plans."""
    attention = attention_with(make_plan, shape_of(window, head_dim), 40)
    for columns, seed in widths_and_seeds:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, columns * PAGE + 1, (count,), generator=generator).tolist()
        notebook = noted(attention, lengths, columns)
        plan, tile_ranges = attention._begun.step.plan, attention._begun.step.tile_ranges
        assert len(tile_ranges) == plan.units
        assert KV_HEADS * plan.partials(count) * 2 <= len(attention._partial_lse), "two heads share a key head"
        seen = tiles_of(lengths, window, plan.block_tokens)
        parts = tile_line(seen, plan.units).parts() if plan.units else tile_range_model.split(seen, plan.splits, 1)
        assert_as_expected(notebook, parts, seen, KV_HEADS * plan.partials(count))
