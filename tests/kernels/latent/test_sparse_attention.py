"""Sparse latent attention: index keys, scores, and attention to chosen tokens, against plain PyTorch in float64."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.config.attention import IndexShape, LatentShape
from tandem.engine.kernels.latent.sparse import SparseAttention, rows_of
from tandem.engine.kernels.latent.triton_index import index_store
from tandem.engine.kernels.layers import IndexQueries, LatentLayer, LayerNorm
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.latent.latent_steps import LAYER, ODD, REAL, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [(1, 40), (1, 1), (1, 0), (1, 33), (6, 37), (17, 17)]
SMALL = IndexShape(heads=16, dim=24, top_k=8)


def sparse(shape: LatentShape, index: IndexShape = SMALL) -> LatentShape:
    return replace(shape, index=index)


def index_layer(step: LatentStep) -> LatentLayer:
    index = step.shape.index
    assert index is not None
    weight, bias = (random(9 + number, index.dim).to(step.q) for number in range(2))
    return replace(step.layer, index_norm=LayerNorm(weight, bias, 1e-6))


def random(seed: int, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def index_queries(step: LatentStep) -> IndexQueries:
    index, tokens = step.shape.index, len(step.q)
    assert index is not None
    return IndexQueries(random(1, tokens, index.heads, index.dim).to(step.q), random(2, tokens, index.heads).to(step.q))


def real_tokens(step: LatentStep) -> torch.Tensor:
    return torch.cat([torch.full((length,), context > 0) for length, context in step.rows])


@pytest.mark.parametrize("shape", [TINY, ODD], ids=["tiny", "odd"])
def test_keys_are_stored_and_queries_rotated(shape: LatentShape, dtype: torch.dtype) -> None:
    step = make_latent_step([(1, 9), (5, 21), (2, 2)], sparse(shape), filled=False)
    keys, queries = random(3, 8, SMALL.dim), random(4, 8, SMALL.heads * SMALL.dim)

    def stored(step: LatentStep, *, ours: bool) -> tuple[torch.Tensor, torch.Tensor]:
        cache = step.cache.clone()
        inputs = queries.to(step.q), keys.to(step.q), index_layer(step), cache, step.layout
        q = index_store(*inputs, pdl=False) if ours else REFERENCE.index_store(*inputs)
        return q.cpu(), cache.cpu()

    exact, plain, ours = (
        stored(step, ours=False),
        stored(step.to(dtype), ours=False),
        stored(step.to(dtype, DEVICE), ours=True),
    )
    written = ~exact[1].isnan()
    assert torch.equal(written, ~ours[1].isnan())
    assert_as_good(ours[0], plain[0], exact[0])
    assert_as_good(ours[1][written], plain[1][written], exact[1][written])


def test_padding_stores_no_keys() -> None:
    step = make_latent_step([(1, 9), (1, 0), (1, 4)], sparse(TINY), filled=False).to(torch.float32, DEVICE)
    cache = torch.full_like(step.cache, float("nan"))
    inputs = random(4, 3, SMALL.heads * SMALL.dim), random(3, 3, SMALL.dim)
    index_store(*(tensor.to(step.q) for tensor in inputs), index_layer(step), cache, step.layout, pdl=False)
    assert int((~cache.isnan()).sum()) == 2 * SMALL.dim


@pytest.mark.parametrize("top_k", [8, 64], ids=["some", "all"])
def test_the_same_tokens_are_chosen(top_k: int) -> None:
    """In float32; 64 are more than any row has. The order of equal or almost equal scores does not matter."""
    step = make_latent_step(ROWS, sparse(TINY, replace(SMALL, top_k=top_k)))
    exact = step.to(torch.float32)
    wanted = REFERENCE.choose_tokens(index_queries(exact), index_layer(exact), exact.cache, exact.layout)
    moved = step.to(torch.float32, DEVICE)
    ours = SparseAttention.choose(
        index_queries(moved), rows_of(moved.layout), index_layer(moved), moved.cache, moved.layout
    ).cpu()
    tokens = real_tokens(step)
    assert torch.equal(ours[tokens].sort(-1).values, wanted[tokens].sort(-1).values)
    assert (ours[~tokens] == -1).all()
    counts = (ours >= 0).sum(1)
    assert torch.equal(counts[tokens], (step.layout.positions[tokens] + 1).clamp(max=top_k))
    assert all((row[:count] >= 0).all() for row, count in zip(ours, counts.tolist(), strict=True))


@pytest.mark.parametrize(("shape", "tokens"), [(TINY, 100), (TINY, 4), (ODD, 100), (REAL, 100)])
def test_attention_to_chosen_tokens(shape: LatentShape, tokens: int, dtype: torch.dtype) -> None:
    """`tokens` are computed at a time."""
    step = make_latent_step(ROWS, sparse(shape))
    chosen = REFERENCE.choose_tokens(index_queries(step), index_layer(step), step.cache, step.layout)

    def reference(step: LatentStep) -> torch.Tensor:
        return REFERENCE.sparse_attention(step.queries, chosen, step.layer, step.cache, step.layout)

    moved = step.to(dtype, DEVICE)
    attention = SparseAttention(step.shape, DEVICE, dtype, False, tokens)
    ours = attention.attend(
        moved.queries, chosen.to(DEVICE), rows_of(moved.layout), moved.layer, moved.cache, moved.layout
    ).cpu()
    real = real_tokens(step)
    assert_as_good(ours[real], reference(step.to(dtype))[real], reference(step)[real], 4)
    assert not ours[~real].any()


def test_all_tokens_chosen_is_attention_to_all() -> None:
    step = make_latent_step(ROWS, sparse(TINY, replace(SMALL, top_k=64)))
    chosen = REFERENCE.choose_tokens(index_queries(step), index_layer(step), step.cache, step.layout)
    dense = make_latent_step(ROWS, TINY)
    dense = replace(dense, cache=step.cache[..., : TINY.cached], q=step.q, kv_up=step.kv_up)
    real = real_tokens(step)
    ours = REFERENCE.sparse_attention(step.queries, chosen, step.layer, step.cache, step.layout)
    wanted = REFERENCE.latent_attention(dense.queries, dense.layer, dense.cache, dense.layout)
    torch.testing.assert_close(ours[real], wanted[real])


def test_a_choice_reads_no_other_layer_or_page() -> None:
    """All memory that no row of the step owns is NaN, and so are the other layers."""
    step = make_latent_step(ROWS, sparse(TINY))
    others = [layer for layer in range(step.cache.shape[1]) if layer != LAYER]
    assert step.cache[:, others].isnan().all()
    chosen = REFERENCE.choose_tokens(index_queries(step), index_layer(step), step.cache, step.layout)
    ours = REFERENCE.sparse_attention(step.queries, chosen, step.layer, step.cache, step.layout)
    assert not ours[real_tokens(step)].isnan().any()
