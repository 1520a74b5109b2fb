"""Expanded attention against plain PyTorch in float64: prompts, chunks behind context, blocks of the cached ones."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.latent import expanded
from tandem.engine.kernels.latent.block_attention import BlockAttention, PlainBlocks, choose_block_attention, compiled
from tandem.engine.kernels.latent.expanded import ExpandedAttention
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.latent.latent_steps import LAYER, ODD, REAL, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = {
    "prompts": [(21, 21), (2, 2)],
    "chunks": [(9, 40), (5, 5)],
    "chunks behind decode rows": [(1, 30), (1, 8), (6, 38)],
}


class Spoiled(PlainBlocks):
    """Results as undefined as the interface allows, and a look at the keys behind each row."""

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, *others: Any, causal: bool) -> tuple[Tensor, Tensor]:
        """Puts NaN wherever the result is undefined; the tails must be zero."""
        out, lse = super().__call__(q, keys, values, *others, causal=causal)
        q_starts, key_starts, key_lengths = (tensor.tolist() for tensor in others[:3])
        out[: q_starts[0]] = float("nan")
        for row, length in enumerate(key_lengths):
            end = key_starts[row] + length
            assert not keys[end : end + 128].any()
            assert not values[end : end + 128].any()
            if not length:
                out[q_starts[row] : q_starts[row + 1]] = float("nan")
                lse[:, q_starts[row] : q_starts[row + 1]] = float("nan")
        return out, lse


def run(step: LatentStep, attention: BlockAttention | None = None) -> Tensor:
    """Computes the rows from the first one of several tokens on."""
    single = step.layout.single_rows
    ours = ExpandedAttention(step.shape, attention or Spoiled(), pdl=False)
    ours.begin_step(step.layout, single)
    out = ours(step.queries, step.kv_up, step.held, LAYER, step.layout, single)
    return out.flatten(1)[single:].cpu()


def check(step: LatentStep, dtype: torch.dtype) -> None:
    ours = run(step.to(dtype, DEVICE))
    plain, exact = (
        REFERENCE.latent_attention(inputs.queries, inputs.layer, inputs.held, inputs.layout)
        for inputs in (step.to(dtype), step)
    )
    single = step.layout.single_rows
    # float32 sums in another order than PyTorch's, which are few here and so exact by chance.
    assert_as_good(ours, plain[single:], exact[single:], times=4 if dtype is torch.float32 else 2)


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_as_exact_as_torch(rows: Sequence[tuple[int, int]], known: bool, dtype: torch.dtype) -> None:
    check(make_latent_step(rows, TINY, known=known), dtype)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_8_bit_latents(rows: Sequence[tuple[int, int]], kind: torch.dtype, dtype: torch.dtype) -> None:
    check(make_latent_step(rows, ODD, page_tokens=24).quantized(kind), dtype)


def test_several_blocks_of_cached_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "BLOCK_TOKENS", 26)
    monkeypatch.setattr(expanded, "LEAST_TOKENS", 1)
    check(make_latent_step([(9, 40), (3, 17)], TINY), torch.float32)


@pytest.mark.parametrize("shape", [ODD, REAL], ids=["odd", "real"])
def test_every_shape(shape: LatentShape, dtype: torch.dtype) -> None:
    check(make_latent_step([(3, 20), (2, 2)], shape, page_tokens=24), dtype)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    step = make_latent_step([(5, 20), (6, 6)], TINY).to(torch.float32, DEVICE)
    expected = run(step)[:5]
    step.cache[step.layout.page_table[1, 0], LAYER, 0, 0, 0] = float("inf")
    assert torch.equal(run(step)[:5], expected)


def test_flash_is_used_where_it_runs(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_block_attention(torch.device("cpu"), torch.bfloat16, [REAL])
    assert isinstance(chosen, PlainBlocks)
    assert "needs a GPU" in caplog.text
    assert compiled(chosen, [REAL], torch.bfloat16, torch.device("cpu")) is chosen
