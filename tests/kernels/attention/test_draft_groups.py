"""Attention of rows that verify drafts, by groups of one request's rows, against PyTorch and against single rows.

Shuffled pages, NaN in all memory that was never written; table entries behind a row's pages name no page.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.config.attention import AttentionShape
from tandem.engine.kernels.attention.triton_attention_plan import group_rows, make_group_plan, make_plan
from tandem.engine.steps.batch import StepRow, TokenRows
from tandem.engine.steps.draft_groups import DraftGroupSizes, fill_draft_groups, groups_needed
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams
from tests.kernels.decode_cases import DEVICE, NO_PAGE, ON_GPU, REFERENCE, SHAPES, attention_of, fixed, torch_of
from tests.kernels.quantized_kv.quantized_caches import moved, quantized
from tests.kernels.steps import LAYER, Step, assert_as_good, heads, make_step, with_sinks
from tests.pairwise import pairwise
from tests.soak import seeds, soak

DTYPES = {"float32": torch.float32, "float16": torch.float16} | ({"bfloat16": torch.bfloat16} if ON_GPU else {})
REQUESTS = [(1, 1), (8, 8), (4, 129), (2, 128), (1, 300), (6, 131), (3, 48), (5, 17)]
"""Rows of a request, and the context of its last one: alone, at the borders of pages and tiles, within them."""
PLANS = {"chosen": make_group_plan, "splits": fixed(splits=7), "one range": fixed(), "units": fixed(units=7)}
SLOW = () if ON_GPU else soak
LUCK = 4
"""Scores and weights over codes are rounded otherwise than by PyTorch, which dequantizes before it multiplies."""
EXTRA = {
    "capped": replace(heads(6, 2, 64), softcap=1.5),
    "capped window": replace(heads(4, 2, 64, window=100), softcap=1.5),
    "odd": heads(4, 2, 80),
}


class Rows:
    """A step's rows of one token, the newest of each request first, and their groups."""

    def __init__(self, step: Step, group: int, spare_groups: int = 0, padding: int = 0) -> None:
        self.step, self.group, self.padding = step, group, padding
        self.batch = rows_with_drafts([tokens for tokens, _ in step.rows])
        starts, counts = step.layout.row_starts[:-1].tolist(), [tokens for tokens, _ in step.rows]
        newest = [(request, 0) for request in range(len(counts))]
        self.rows = newest + [(request, n) for request, count in enumerate(counts) for n in range(1, count)]
        self.order = torch.tensor([starts[request] + distance for request, distance in self.rows])
        needed = groups_needed(len(counts), len(self.rows), group)
        self.groups = torch.from_numpy(groups_of(self.batch, DraftGroupSizes(needed + spare_groups, group)))

    def layout(self) -> tuple[Tensor, Tensor]:
        """Returns page table and contexts of each row, and of padding rows."""
        layout, step = self.step.layout, self.step
        table = layout.page_table[[request for request, _ in self.rows]].clone()
        contexts = [step.rows[request][1] - step.rows[request][0] + 1 + distance for request, distance in self.rows]
        page_tokens = step.cache.shape[4]
        for row, (request, _) in enumerate(self.rows):
            table[row, -(-step.rows[request][1] // page_tokens) :] = NO_PAGE
            if step.shape.window is not None:
                table[row, : max(contexts[row] - step.shape.window, 0) // page_tokens] = NO_PAGE
        table = torch.cat((table, torch.full((self.padding, table.shape[1]), NO_PAGE).int()))
        return table.to(DEVICE), torch.tensor([*contexts, *[0] * self.padding], dtype=torch.int32, device=DEVICE)

    def attend(
        self, dtype: torch.dtype, cache: object = None, *, grouped: bool = True, early: bool = False, **options: object
    ) -> Tensor:
        """Returns the result of each row, in the order of the step's tokens."""
        step = self.step
        held = step.cache_as(dtype).to(DEVICE) if cache is None else moved(cache, DEVICE)
        q = torch.full((len(self.rows) + self.padding, *step.q.shape[1:]), float("nan"), dtype=torch.float64)
        q[: len(self.rows)] = step.q[self.order]
        tokens = self.group if grouped else 1
        attention = attention_of(step, dtype, max_rows=len(q), tokens=tokens, early=early, **options)
        table, contexts = self.layout()
        attention.begin_step(held, table, contexts, self.groups.to(DEVICE) if tokens > 1 else None)
        table.clone()  # overlaps no launch, as the embedding between them
        sinks = None if step.sinks is None else step.sinks.to(DEVICE)
        out = torch.full((len(q), step.shape.heads * step.shape.head_dim), float("nan"), dtype=dtype, device=DEVICE)
        attention(q.to(DEVICE, dtype), held, LAYER, table, contexts, out, sinks)
        assert not attention._counters.any()
        assert not out[len(self.rows) :].any()
        result = torch.empty_like(out[: len(self.rows)])
        result[self.order] = out[: len(self.rows)]
        return result.cpu()


def dot_in_order(_: object, a: Any, b: Any, d: Any, *__: object) -> Any:
    """Multiplies in the interpreter so that a row's sums do not depend on its place, as those of libraries do."""
    return TensorHandle((a.data[:, :, None] * b.data[None]).sum(1) + d.data, d.dtype.scalar)


def rows_with_drafts(counts: Sequence[int]) -> TokenRows:
    """Returns the rows of requests with so many rows each."""
    draw = SamplingInput(SamplingParams(1), 0)
    return with_drafts([StepRow([0], 0, [0], draw) for _ in counts], [[0] * (count - 1) for count in counts])


def groups_of(batch: TokenRows, sizes: DraftGroupSizes) -> NDArray[np.int32]:
    """Returns the table of groups, written over words of anything."""
    words = np.full(sizes.words, -1, dtype=np.int64)
    fill_draft_groups(batch, sizes, words)
    return words.view(np.int32)[: 3 * (sizes.groups + 1)].reshape(-1, 3)


def check(rows: Rows, dtype: torch.dtype, **options: object) -> None:
    step = rows.step
    assert_as_good(rows.attend(dtype, **options), torch_of(step, dtype), torch_of(step, torch.float64))


@pairwise(
    shape=SHAPES | EXTRA, page_tokens=[16, 48, 128], group=[2, 4, 8], choose=PLANS, sinks=[False, True], dtype=DTYPES,
    always=[
        ("window", "16", "8", "splits", "True", "float32"),
        ("narrow", "16", "4", "units", "False", "float16"),
        ("gqa", "128", "4", "chosen", "False", "float16"),
    ],
)  # fmt: skip
def test_as_exact_as_torch(
    *, shape: AttentionShape, page_tokens: int, group: int, choose: object, sinks: bool, dtype: torch.dtype
) -> None:
    step = make_step(REQUESTS, shape, page_tokens)
    check(Rows(with_sinks(step) if sinks else step, group, spare_groups=2, padding=3), dtype, choose=choose)


@pytest.mark.parametrize(
    ("name", "group"),
    [pytest.param("gqa", 2, marks=SLOW), ("gqa", 8), pytest.param("mqa", 4, marks=SLOW), ("window", 8)],
)
def test_the_bits_of_single_rows_in_float32(name: str, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 512 tokens, and behind, a row gets one more split than the rows of the same request before it."""
    if not ON_GPU:
        monkeypatch.setattr(type(interpreter_builder), "create_dot", dot_in_order)
    requests = [*REQUESTS, (8, 515), (4, 1030)] if ON_GPU else [(1, 1), (4, 129), (8, 515)]
    step = make_step(requests, SHAPES[name], 16)
    rows = Rows(step, group)
    single = rows.attend(torch.float32, grouped=False)
    assert torch.equal(rows.attend(torch.float32, choose=make_group_plan), single)


@pairwise(
    shape={name: SHAPES[name] for name in ("gqa", "window")},
    choose=PLANS,
    kind={"int8": torch.int8, "fp8": torch.float8_e4m3fn},
    dtype=DTYPES,
)
def test_codes(*, shape: AttentionShape, choose: object, kind: torch.dtype, dtype: torch.dtype) -> None:
    step = with_sinks(make_step(REQUESTS, shape, 16))
    rows, cache = Rows(step, 4, spare_groups=1, padding=2), quantized(step.cache, kind)
    baseline, exact = (
        REFERENCE.attention(step.q.to(precision), step.layer, cache, step.layout)
        for precision in (dtype, torch.float64)
    )
    assert_as_good(rows.attend(dtype, cache, choose=choose, kv_dtype=kind), baseline, exact, LUCK)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("choose", [fixed(units=12), fixed(splits=3)], ids=["units", "splits"])
def test_many_requests_of_different_numbers_of_drafts(choose: object, early: bool) -> None:
    """There are more groups than a program reads at once, and a request alone."""
    counts = [(1 + n % 8, 20 + 37 * n % 200) for n in range(40)]
    check(Rows(make_step(counts, heads(2, 1, 64), 16), 4, 5, 9), torch.float16, choose=choose, early=early)
    check(Rows(make_step([(8, 300)], heads(4, 2, 64), 16), 8, 1, 4), torch.float16, choose=choose, early=early)


def test_a_request_of_more_rows_than_a_group_has_several() -> None:
    groups = Rows(make_step([(6, 100), (1, 9), (3, 50)], SHAPES["gqa"]), 2, spare_groups=1).groups.tolist()
    assert groups[:6] == [[0, 3, 2], [4, 5, 2], [6, 7, 2], [1, 8, 1], [2, 8, 2], [9, 10, 1]]
    assert groups[6:-1] == [[0, 0, 0]] * (len(groups) - 7)
    assert groups[-1] == [10, 0, 0]


@seeds(20)
def test_groups_have_each_row_once(seed: int) -> None:
    dice = np.random.default_rng(seed)
    counts, group = dice.integers(1, 9, size=dice.integers(1, 30)).tolist(), int(dice.integers(1, 9))
    sizes = DraftGroupSizes(groups_needed(len(counts), sum(counts), group), group)
    table = groups_of(rows_with_drafts(counts), sizes)
    assert table[-1, 0] == sum(counts)
    rows = [row for first, follow, n in table[:-1].tolist() if n for row in (first, *range(follow, follow + n - 1))]
    assert sorted(rows) == list(range(sum(counts)))
    assert table[:-1, 2].max() <= group


def test_a_group_fills_a_tile() -> None:
    """The size depends on the query heads of a key head: 8B models have 4, 70B models 8, some have 7."""
    assert [group_rows([heads(32, 8, 128)], drafts) for drafts in (1, 2, 3, 5, 7)] == [4, 4, 4, 8, 8]
    assert [group_rows([heads(64, 8, 128)], drafts) for drafts in (1, 3, 7)] == [2, 4, 4]
    assert [group_rows([heads(28, 4, 128)], drafts) for drafts in (1, 3)] == [2, 4]
    assert group_rows([heads(9, 9, 64)], 3) == 8
    assert group_rows([heads(32, 8, 128), heads(71, 1, 64)], 3) == 1
    assert group_rows([], 3) == 1


def test_few_splits_are_merged_for_groups() -> None:
    plans = [choose(1, 8, 128, 8192, torch.bfloat16, 132) for choose in (make_plan, make_group_plan)]
    assert [plan.splits for plan in plans] == [32, 16]
    single, group = (choose(40, 8, 128, 8192, torch.bfloat16, 132) for choose in (make_plan, make_group_plan))
    assert (single.units, single.block_tokens) == (group.units, 2 * group.block_tokens)
    assert make_group_plan(1, 8, 128, 8192, torch.float32, 132) == make_plan(1, 8, 128, 8192, torch.float32, 132)


def test_groups_come_with_a_table() -> None:
    step = make_step([(2, 3)], SHAPES["gqa"])
    rows = Rows(step, 4)
    table, contexts = rows.layout()
    with pytest.raises(ValueError, match="need a table"):
        attention_of(step, tokens=4).begin_step(step.cache_as(torch.float16), table, contexts)
    with pytest.raises(ValueError, match="need a table"):
        attention_of(step).begin_step(step.cache_as(torch.float16), table, contexts, rows.groups)
