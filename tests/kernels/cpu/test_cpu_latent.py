"""Latent attention of the CPU kernels: as exact as plain PyTorch, and the same bits in any step."""

import pytest
import torch

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.cpu.latent import latent_attention
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.latent.latent_steps import REAL, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
ROWS = [(1, 40), (1, 1), (9, 30), (2, 2)]


def run(step: LatentStep) -> torch.Tensor:
    return latent_attention(step.queries, step.layer, step.held, step.layout)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(TINY, torch.float32), (TINY, torch.bfloat16), (REAL, torch.bfloat16)], ids=str
)
def test_as_exact_as_torch(shape: LatentShape, dtype: torch.dtype) -> None:
    check(make_latent_step(ROWS, shape), dtype)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bit_latents_are_as_exact_as_torch(kind: torch.dtype) -> None:
    check(make_latent_step(ROWS, TINY).quantized(kind), torch.bfloat16)


def check(step: LatentStep, dtype: torch.dtype) -> None:
    exact, plain = (
        REFERENCE.latent_attention(inputs.queries, inputs.layer, inputs.held, inputs.layout)
        for inputs in (step, step.to(dtype))
    )
    assert_as_good(run(step.to(dtype)), plain, exact)


def test_a_token_has_the_same_bits_in_any_step(dtype: torch.dtype) -> None:
    alone, among = (make_latent_step(rows, TINY).to(dtype) for rows in ([(1, 40)], ROWS))
    among.cache[among.layout.page_table[0, :3].long()] = alone.cache[alone.layout.page_table[0].long()]
    among.q[:1], among.kv_up[:] = alone.q, alone.kv_up
    assert torch.equal(run(alone)[0], run(among)[0])
