"""Attention by windows against float64, in Triton's interpreter or on a GPU, with PyTorch's for the windows themselves.

tests/gpu judges flash-attn-4 on such steps.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.kernels.base import AttentionShape, StepLayout
from engine.kernels.reference import gather_row, visible
from engine.kernels.split_attention import SplitAttention
from engine.kernels.triton_launch import overlaps_launches
from engine.kernels.triton_split import Segments

from .prefill_cases import run, to_device, torch_of
from .split_cases import as_graph
from .steps import LAYER, Step, assert_as_good, heads, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOW = 32
SHAPE = heads(2, 1, 16)
ROWS = {
    **{f"1 token, context of {context}": [(1, context)] for context in (1, 31, 32, 33, 64, 65, 257)},
    **{f"a prompt of {length}": [(length, length)] for length in (5, 32, 33, 70)},
    **{f"{tokens} tokens, context of {context}": [(tokens, context)] for tokens in (2, 31) for context in (64, 65)},
    "more tokens than a window": [(40, 96)],
    "many rows": [(3, 70), (1, 1), (9, 9), (4, 64), (1, 65), (12, 64), (2, 33)],
    "long after short": [(2, 2), (3, 200)],
    "short after long": [(3, 200), (2, 2)],
}
"""Rows of (tokens, context with them): at, below and above multiples of the window, and across its borders."""


class PlainWindows:
    """`WindowAttention` by PyTorch's plain operations; nobody's results are NaN. Checks what it is given."""

    def __call__(
        self, q: Tensor, cache: Tensor, layer: int, rows: Segments, shape: AttentionShape
    ) -> tuple[Tensor, Tensor]:
        starts, contexts = rows.starts.tolist(), rows.contexts.tolist()
        assert starts == sorted(starts)
        assert starts[-1] <= len(q)
        out = torch.full_like(q, float("nan"))
        lse = torch.full((shape.heads, len(q)), float("nan"), dtype=torch.float32, device=q.device)
        for row, context in enumerate(contexts):
            here = slice(starts[row], starts[row + 1])
            tokens = here.stop - here.start
            assert tokens <= min(rows.longest, context)
            if not tokens:
                continue
            keys, values = gather_row(cache, layer, rows.page_table[row], context)
            positions = torch.arange(context - tokens, context, device=q.device)
            wide = torch.promote_types(q.dtype, torch.float32)
            keys, values = (
                each.to(wide).repeat_interleave(shape.heads // shape.kv_heads, dim=0) for each in (keys, values)
            )
            scores = q[here].to(wide).transpose(0, 1) @ keys.transpose(1, 2) * shape.scale
            scores.masked_fill_(~visible(positions, context, rows.window), float("-inf"))
            out[here] = (scores.softmax(-1) @ values).transpose(0, 1).to(q.dtype)
            lse[:, here] = scores.logsumexp(-1).float()
        return out, lse


class Split:
    """`PrefillAttention` of nothing but split steps."""

    def __init__(self, window: int = WINDOW) -> None:
        self.split = SplitAttention(PlainWindows(), overlaps_launches(), window)
        self.begin_step = self.split.begin_step

    def begin_layer(self, q: Tensor, _: StepLayout, shape: AttentionShape) -> None:
        self.split.begin_layer(q)

    def __call__(self, _: Tensor, cache: Tensor, layer: int, *others: Any) -> Tensor:
        return self.split(cache, layer, others[1])


def tokens_of(step: Step) -> int:
    return int(step.layout.row_starts[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_as_exact_as_torch(rows: list[tuple[int, int]], dtype: torch.dtype) -> None:
    step = make_step(rows, SHAPE)
    ours = run(Split(), as_graph(step, WINDOW), dtype, DEVICE)
    assert_as_good(ours, torch_of(step, dtype, DEVICE), torch_of(step, torch.float64, DEVICE))


@pytest.mark.parametrize("page_tokens", [7, 16, 128])
@pytest.mark.parametrize("shape", [heads(3, 3, 96), heads(4, 1, 64), heads(6, 2, 128)], ids=str)
def test_every_shape_and_page_size(shape: AttentionShape, page_tokens: int) -> None:
    step = make_step([(5, 100), (3, 3), (6, 70)], shape, page_tokens)
    ours = run(Split(), as_graph(step, WINDOW), torch.float32, DEVICE)
    assert_as_good(ours, torch_of(step, torch.float32, DEVICE), torch_of(step, torch.float64, DEVICE))


@pytest.mark.parametrize("room", [{"empty_rows": 3}, {"tokens": 5}, {"windows": 6}], ids=str)
@pytest.mark.parametrize("rows", [ROWS["many rows"], [(1, 1)], [(4, 200)]], ids=["many", "one", "long"])
def test_what_a_graph_has_room_for_changes_nothing(rows: list[tuple[int, int]], room: dict[str, int]) -> None:
    step = make_step(rows, SHAPE)
    plain = run(Split(), as_graph(step, WINDOW), torch.bfloat16, DEVICE)
    ours = run(Split(), as_graph(step, WINDOW, **room), torch.bfloat16, DEVICE)
    assert torch.equal(ours[: tokens_of(step)], plain)
    assert not ours[tokens_of(step) :].any(), "tokens of no row"


def test_a_step_of_nothing() -> None:
    step = make_step([(4, 4)], SHAPE)
    layout = step.layout
    empty = replace(layout, row_starts=layout.row_starts * 0, context_lens=layout.context_lens * 0, windows=2)
    assert not run(Split(), replace(step, layout=empty), torch.float32, DEVICE).any()


def test_rows_before_the_first_belong_to_another_kernel() -> None:
    """Beside answers: their tokens and contexts count for nothing."""
    step = make_step([(1, 140), (1, 7), (14, 69), (6, 100)], SHAPE)
    alone = torch_of(step, torch.float32, DEVICE), torch_of(step, torch.float64, DEVICE)
    held = as_graph(step, WINDOW, empty_rows=1, tokens=3)
    ours = run(Split(), held, torch.float32, DEVICE, first_row=2)
    assert_as_good(ours[:20], *(each[2:] for each in alone))
    assert len(ours) == 23


@pytest.mark.parametrize("window", [1, 16, 50, 1000])
def test_the_width_of_windows_changes_the_rounding_alone(window: int) -> None:
    step = make_step([(7, 40), (3, 21)], SHAPE)
    ours = run(Split(window), as_graph(step, window), torch.float32, DEVICE)
    assert_as_good(ours, torch_of(step, torch.float32, DEVICE), torch_of(step, torch.float64, DEVICE))


def test_each_query_sees_each_token_before_it_once() -> None:
    """With equal keys every token weighs the same, and with values of one place each its weight can be read."""
    tokens, context = 20, 60
    shape = heads(1, 1, 64)
    step = make_step([(tokens, context)], shape, page_tokens=64)
    cache = torch.zeros_like(step.cache)
    page = int(step.layout.page_table[0, 0])
    cache[page, LAYER, 1, 0, torch.arange(context), torch.arange(context)] = 1
    weights = run(Split(7), as_graph(step, 7), torch.float32, DEVICE, cache=cache)
    for token in range(tokens):
        seen = context - tokens + token + 1
        wanted = torch.where(torch.arange(64) < seen, 1 / seen, 0.0)
        torch.testing.assert_close(weights[token], wanted)


def test_the_same_bits_every_time() -> None:
    step = as_graph(make_step(ROWS["many rows"], SHAPE), WINDOW, tokens=2)
    first = run(Split(), step, torch.bfloat16, DEVICE)
    attention = Split()
    assert torch.equal(run(attention, step, torch.bfloat16, DEVICE), first)
    run(attention, as_graph(make_step([(2, 300)], SHAPE, seed=1), WINDOW), torch.bfloat16, DEVICE)
    assert torch.equal(run(attention, step, torch.bfloat16, DEVICE), first), "after another step"


def test_queries_inside_a_stacked_product() -> None:
    """As the engine passes them: q is a part of each token's row."""
    step = as_graph(make_step([(5, 70), (3, 33)], SHAPE), WINDOW)
    attention = Split()
    layout = to_device(step.layout, DEVICE)
    cache = step.cache.to(DEVICE, torch.float32)
    q = step.q.to(DEVICE, torch.float32)
    stacked = torch.full((len(q), 64), float("nan"), device=DEVICE)
    inside = stacked[:, :32].view(q.shape)
    inside.copy_(q)
    attention.begin_step(cache, layout, 0)
    found = []
    for each in (inside, q):
        attention.begin_layer(each, layout, SHAPE)
        found.append(attention.split(cache, LAYER, SHAPE))
    assert torch.equal(*found)


def test_what_is_not_a_number_in_a_row_stays_there() -> None:
    step = make_step([(9, 100), (5, 90)], SHAPE)
    page = int(step.layout.page_table[0, 1])
    cache = step.cache.clone()
    cache[page, LAYER, 1] = float("nan")
    ours = run(Split(), as_graph(step, WINDOW), torch.float32, DEVICE, cache=cache)
    assert ours[:9].isnan().all()
    assert torch.equal(ours[9:], run(Split(), as_graph(step, WINDOW), torch.float32, DEVICE)[9:])


def test_a_step_that_began_with_others_is_refused() -> None:
    step = as_graph(make_step([(9, 100)], SHAPE), WINDOW)
    layout, cache = to_device(step.layout, DEVICE), step.cache.to(DEVICE)
    attention = SplitAttention(PlainWindows(), overlaps_launches(), WINDOW)
    q = step.q.to(DEVICE)
    with pytest.raises(ValueError, match="began with others"):
        attention.begin_layer(q)
    attention.begin_step(cache, layout, 0)
    with pytest.raises(ValueError, match="8 tokens of a step that began with others"):
        attention.begin_layer(q[1:])
    attention.begin_layer(q)
    attention(cache, LAYER, SHAPE)
    with pytest.raises(ValueError, match="a layer that did not begin"):
        attention(cache, LAYER, SHAPE)
