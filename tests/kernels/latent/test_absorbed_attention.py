"""Absorbed attention against expanded attention in float64: decode rows, chunks, padding; NaN wherever nothing is."""

from collections.abc import Sequence

import pytest
import torch

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.latent.absorbed import AbsorbedAttention
from tandem.engine.kernels.latent.absorbed_plan import Plan, PlanFunction, absorbed_tokens, group_tokens, make_plan
from tandem.engine.kernels.latent.token_groups import group_chunks
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.latent.latent_steps import LAYER, MANY, ODD, REAL, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODE = [(1, 40), (1, 1), (1, 0), (1, 33), (1, 16)]
CHUNKS = [(5, 37), (1, 20), (17, 17), (3, 50)]


def run(step: LatentStep, choose: PlanFunction = make_plan, tokens: int | None = None) -> torch.Tensor:
    """Computes rows of one token each, or groups of up to `tokens` tokens."""
    shape, layout = step.shape, step.layout
    attention = AbsorbedAttention(shape, tokens or 1, DEVICE, step.q.dtype, pdl=False, choose=choose)
    if tokens is None:
        attention.begin_step(step.held, layout.page_table, layout.context_lens)
    else:
        groups = group_chunks(layout, 0, tokens)
        attention.begin_step(step.held, layout.page_table, groups.contexts, groups)
    out = torch.full((len(step.q), shape.heads * shape.v_dim), float("nan"), dtype=step.q.dtype, device=DEVICE)
    attention(step.queries, step.kv_up, step.held, LAYER, out)
    return out.cpu()


def reference(step: LatentStep) -> torch.Tensor:
    return REFERENCE.latent_attention(step.queries, step.layer, step.held, step.layout)


def check(step: LatentStep, dtype: torch.dtype, choose: PlanFunction = make_plan, tokens: int | None = None) -> None:
    """Compares all tokens but padding, which gives zeros."""
    real = torch.cat([torch.full((length,), context > 0) for length, context in step.rows])
    ours = run(step.to(dtype, DEVICE), choose, tokens)
    # In float32 little is rounded, and the order of sums decides, which depends on the CPU's vectors.
    times = 4 if dtype is torch.float32 else 2
    assert_as_good(ours[real], reference(step.to(dtype))[real], reference(step)[real], times)
    assert not ours[~real].any()


def cut(programs: int, block_tokens: int = 16, rows: int = 16) -> PlanFunction:
    """Returns a plan of so many programs."""
    return lambda *_: Plan(rows, block_tokens, warps=4, stages=2, programs=programs)


@pytest.mark.parametrize("shape", [TINY, ODD], ids=["tiny", "odd"])
def test_decode_rows(shape: LatentShape, dtype: torch.dtype) -> None:
    check(make_latent_step(DECODE, shape), dtype)


@pytest.mark.parametrize("tokens", [None, 1], ids=["decode rows", "chunks"])
def test_more_heads_than_a_tile_has_rows(tokens: int | None) -> None:
    rows = [(1, 20), (1, 0)] if tokens is None else [(2, 20), (1, 3)]
    check(make_latent_step(rows, MANY), torch.float16, tokens=tokens)


def test_deepseek_dimensions(dtype: torch.dtype) -> None:
    check(make_latent_step([(1, 35), (1, 3)], REAL), dtype)


@pytest.mark.parametrize("programs", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("rows", [DECODE, [(1, 100)], [(1, 16)] * 4], ids=["uneven", "one", "even"])
def test_however_the_tiles_are_cut(programs: int, rows: Sequence[tuple[int, int]]) -> None:
    check(make_latent_step(rows, TINY), torch.float16, cut(programs))


@pytest.mark.parametrize("page_tokens", [4, 24, 128])
def test_every_page_size(page_tokens: int, dtype: torch.dtype) -> None:
    check(make_latent_step(DECODE, TINY, page_tokens=page_tokens), dtype)


def test_chunks_after_a_context(dtype: torch.dtype) -> None:
    check(make_latent_step(CHUNKS, TINY), dtype, tokens=group_tokens(TINY))


@pytest.mark.parametrize("page_tokens", [4, 24, 128])
def test_8_bit_decode_rows(page_tokens: int, kind: torch.dtype, dtype: torch.dtype) -> None:
    check(make_latent_step(DECODE, ODD, page_tokens=page_tokens).quantized(kind), dtype)


def test_8_bit_chunks(kind: torch.dtype, dtype: torch.dtype) -> None:
    check(make_latent_step(CHUNKS, TINY).quantized(kind), dtype, tokens=group_tokens(TINY))


def test_8_bit_deepseek_dimensions(kind: torch.dtype) -> None:
    check(make_latent_step([(1, 35), (1, 3)], REAL).quantized(kind), torch.float16)


@pytest.mark.parametrize("programs", [1, 5, 40])
def test_chunks_cut_inside_what_their_first_tokens_do_not_see(programs: int) -> None:
    check(make_latent_step(CHUNKS, TINY), torch.float16, cut(programs, rows=32), tokens=7)


def test_a_row_has_the_same_bits_in_any_step_of_float32() -> None:
    alone, among = (make_latent_step(rows, TINY).to(torch.float32, DEVICE) for rows in ([(1, 700)], [(1, 700), (1, 9)]))
    among.cache[among.layout.page_table[0].long()] = alone.cache[alone.layout.page_table[0].long()]
    among.q[:1], among.kv_up[:] = alone.q, alone.kv_up
    assert torch.equal(run(alone)[0], run(among)[0])


def test_groups_of_padded_rows() -> None:
    """Graphs have empty rows behind the step's last token, and tokens in no row."""
    step = make_latent_step([(1, 4), (5, 37), (3, 9)], TINY)
    layout = step.layout
    layout.row_starts[3:] = 6
    layout.context_lens[2] = 0
    groups = group_chunks(layout, 1, 4)
    assert groups.of_tokens.tolist() == [0, 0, 0, 0, 1, -1, -1, -1]
    assert groups.contexts.tolist() == [36, 37, 0, 0]
    assert groups.table.tolist()[:2] == [[1, 0, 4], [1, 4, 1]]


def test_absorbed_sizes_of_deepseek() -> None:
    shape = LatentShape(heads=16, latent=512, rope=64, nope=128, v_dim=128, scale=1.0)
    assert absorbed_tokens(shape) == 170
    assert group_tokens(shape) == 4
