"""The reference kernels against transformers' own functions."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from tandem.engine.kernels.layers import Linear, Norm
from tandem.engine.kernels.reference import ReferenceKernels, rms_norm, visible

from .steps import LAYER, heads, make_step

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_rounds_as_llama_does(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(96, 1e-5).to(dtype)
    norm.weight.data = torch.randn(96).to(dtype)
    x = torch.randn(7, 96).to(dtype)
    assert torch.equal(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("page_tokens", [4, 16])
def test_stored_and_attended_tokens_are_those_of_one_long_sequence(window: int | None, page_tokens: int) -> None:
    shape = heads(6, 2, 16, window)
    step = make_step([(13, 13)], shape, page_tokens, filled=False)
    cache = step.cache_as(torch.float32).clone()
    q = REFERENCE.rope_and_store(step.qkv.float(), step.layer, cache, step.layout)
    ours = REFERENCE.attention(q, step.layer, cache, step.layout)
    heads_first = step.qkv.float().view(13, 10, 16).transpose(0, 1)[None]
    cos, sin = (half.repeat(1, 2)[None] for half in step.rope[:13].chunk(2, dim=-1))
    rotated, keys = apply_rotary_pos_emb(heads_first[:, :6], heads_first[:, 6:8], cos, sin)
    seen = visible(torch.arange(13), range(13), shape)
    theirs = F.scaled_dot_product_attention(rotated, keys, heads_first[:, 8:], attn_mask=seen, enable_gqa=True)
    assert torch.allclose(ours, theirs[0].transpose(0, 1).flatten(1), atol=1e-5)
    assert cache[:, [layer for layer in range(cache.shape[1]) if layer != LAYER]].isnan().all()


def test_a_window_is_the_latest_positions() -> None:
    seen = visible(torch.tensor([4]), range(7), heads(1, 1, 16, window=3))
    assert seen.tolist() == [[False, False, True, True, True, False, False]]


def test_a_chunk_ends_at_the_token_itself() -> None:
    shape = replace(heads(1, 1, 16), chunk=3)
    assert visible(torch.tensor([4, 6]), range(2, 8), shape).tolist() == [
        [False, True, True, False, False, False],
        [False, False, False, False, True, False],
    ]
    assert [shape.first_seen(position) for position in (0, 2, 3, 5, 6)] == [0, 0, 3, 3, 6]


def test_gate_rows_come_first() -> None:
    weight = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    result = REFERENCE.norm_gate_up(torch.ones(1, 2), Norm(torch.ones(2), 0.0), Linear(weight))
    assert torch.allclose(result, F.silu(torch.tensor([[2.0]])) * 3)


def test_linear_add_changes_the_residual_in_place() -> None:
    hidden = torch.ones(2, 3)
    REFERENCE.linear_add(torch.ones(2, 4), Linear(torch.ones(3, 4), torch.full((3,), 0.5)), hidden)
    assert torch.equal(hidden, torch.full((2, 3), 5.5))
