"""The store of latents against plain PyTorch in float64."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.config.attention import LatentShape
from tandem.engine.kernels.kv_cache import quantize_kv
from tandem.engine.kernels.latent.triton_store import latent_store
from tandem.engine.kernels.reference import ReferenceKernels
from tests.kernels.latent.latent_steps import LAYER, MANY, ODD, REAL, TINY, LatentStep, make_latent_step
from tests.kernels.steps import assert_as_good

REFERENCE = ReferenceKernels()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def store(step: LatentStep) -> tuple[torch.Tensor, torch.Tensor]:
    cache = step.cache.clone()
    q = latent_store(step.q.clone(), step.latents, step.layer, cache, step.layout, pdl=False)
    return q.cpu(), cache.cpu()


def reference(step: LatentStep) -> tuple[torch.Tensor, torch.Tensor]:
    cache = step.cache.clone()
    q = REFERENCE.latent_store(step.q, step.latents, step.layer, cache, step.layout)
    return q.cpu(), cache.cpu()


@pytest.mark.parametrize("shape", [TINY, ODD, MANY, REAL], ids=["tiny", "odd", "many heads", "real"])
def test_as_exact_as_torch(shape: LatentShape, dtype: torch.dtype) -> None:
    step = make_latent_step([(1, 9), (5, 21), (2, 2)], shape, filled=False)
    exact, plain, ours = reference(step), reference(step.to(dtype)), store(step.to(dtype, DEVICE))
    written = ~exact[1].isnan()
    assert torch.equal(written, ~ours[1].isnan())
    assert_as_good(ours[0], plain[0], exact[0])
    assert_as_good(ours[1][written], plain[1][written], exact[1][written])


@pytest.mark.parametrize("shape", [TINY, ODD, REAL], ids=["tiny", "odd", "real"])
def test_codes_are_those_of_the_stored_numbers(shape: LatentShape, kind: torch.dtype, dtype: torch.dtype) -> None:
    step = make_latent_step([(1, 9), (5, 21), (1, 0), (2, 2)], shape, filled=False)
    step.latents[1] = 0
    q, plain = store(step.to(dtype, DEVICE))
    ours, wanted = (step.quantized(kind).to(dtype, device) for device in (DEVICE, "cpu"))
    assert ours.codes is not None
    assert wanted.codes is not None
    assert torch.equal(
        latent_store(ours.q.clone(), ours.latents, ours.layer, ours.codes, ours.layout, pdl=False).cpu(), q
    )
    slots = step.layout.slots[step.layout.slots >= 0]
    at = (slots // 16, LAYER, 0, 0, slots % 16)
    wanted.codes.codes[at], wanted.codes.scales[at] = quantize_kv(plain[at], kind)
    assert torch.equal(ours.codes.scales.cpu().nan_to_num(-1), wanted.codes.scales.nan_to_num(-1))
    assert torch.equal(ours.codes.codes.cpu().view(torch.int8), wanted.codes.codes.view(torch.int8))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [3, TINY.latent + 2])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_latents_that_are_not_finite_have_no_scale(column: int, value: float, kind: torch.dtype) -> None:
    step = make_latent_step([(3, 3)], TINY, filled=False).quantized(kind).to(torch.float16, DEVICE)
    step.latents[1, column] = value
    assert step.codes is not None
    latent_store(step.q, step.latents, step.layer, step.codes, step.layout, pdl=False)
    slots = step.layout.slots
    assert step.codes.scales[slots // 16, LAYER, 0, 0, slots % 16].isnan().tolist() == [False, True, False]


def test_padding_stores_nothing() -> None:
    step = make_latent_step([(1, 9), (1, 0), (1, 4)], TINY, filled=False).to(torch.float32, DEVICE)
    q, cache = store(step)
    assert int((~cache.isnan()).any(-1).sum()) == 8 + 3 + 2
    whole = make_latent_step([(1, 9), (1, 0), (1, 4)], TINY, filled=False).to(torch.float32)
    tokens = torch.tensor([0, 2])
    layout = replace(whole.layout, positions=whole.layout.positions[tokens], slots=whole.layout.slots[tokens])
    some = replace(whole, layout=layout, q=whole.q[tokens], latents=whole.latents[tokens])
    torch.testing.assert_close(q[tokens], reference(some)[0])


def test_rows_inside_a_stacked_product() -> None:
    """The engine passes queries and latents as parts of one product's rows."""
    step = make_latent_step([(1, 9), (5, 21)], TINY, filled=False).to(torch.float32, DEVICE)
    both = torch.cat((step.q, step.latents), dim=1)
    parts = replace(step, latents=both[:, step.q.shape[1] :])
    cache = step.cache.clone()
    q = latent_store(both[:, : step.q.shape[1]], parts.latents, step.layer, cache, step.layout, pdl=False)
    expected = store(step)
    assert torch.equal(q.cpu(), expected[0])
    assert torch.equal(cache.cpu().nan_to_num(), expected[1].nan_to_num())
