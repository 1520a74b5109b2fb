"""All GPU kernels together in models whose layers differ, over prefill and decode steps.

One has layers of different windows, the other everything that a layer may have besides. Against float64, in Triton's
interpreter or on a GPU.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache, cache_bytes
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.host_stepper import Forward, HostStepper
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import Parameters, tensors_of
from tandem.engine.sampler import sample
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.engine.steps.step_packer import StepPacker, step_limits
from tandem.engine.weights.random_weights import fill_randomly
from tandem.protocol.kv_pages import FREED, KvPages
from tandem.protocol.messages import SamplingParams
from tests.kernels.decode_cases import DEVICE, ON_GPU
from tests.kernels.steps import assert_as_good
from tests.soak import soak

DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
PAGE, PAGES = 16, 12
WINDOW = 20
DECODE_ROWS = 2
"""Rows of one token beyond this number count as prefill."""
CONFIG = {
    "model_type": "qwen3", "vocab_size": 67, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5, "eos_token_id": 0, "use_sliding_window": True, "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}  # fmt: skip
PROMPTS = [[(7 * i + 3 * prompt) % 67 for i in range(100)] for prompt in range(3)]
PAGES_OF = ([3, 1, 2, 0, 9, 8], [5, 4], [6, 7, 10])
KV = KvPages(PAGE, (None, WINDOW, WINDOW))
"""Pages hold one layer."""


def step_of(*rows: tuple[int, int, int]) -> StepBatch:
    """Returns a step of rows (request, tokens in the cache, tokens after the step) on the pages that they see."""
    return StepBatch([StepRow(PROMPTS[of][start:end], start, entries(of, start, end), DRAW) for of, start, end in rows])


def entries(of: int, start: int, end: int) -> list[int]:
    pages = [KV.groups * page + group for page in PAGES_OF[of][: KV.numbers(end)] for group in range(KV.groups)]
    for dead in KV.dead(pages, start):
        pages[dead] = FREED
    return pages


STEPS = {
    "two prompts": step_of((0, 0, 70), (1, 0, 5)),
    "two answers beside a chunk": step_of((0, 70, 71), (1, 5, 6), (2, 0, 17)),
    "two answers beside the next chunk": step_of((0, 71, 72), (1, 6, 7), (2, 17, 36)),
    "three answers": step_of((0, 72, 73), (1, 7, 8), (2, 36, 37)),
    "two answers": step_of((0, 73, 74), (2, 37, 38)),
    "one answer beside a chunk": step_of((0, 74, 75), (1, 8, 20)),
}
"""The steps in order: each reads the KV that those before it stored."""


def free_unseen_pages(cache: PagedCache, row: StepRow) -> None:
    """Overwrites the pages of the row's request that it does not see."""
    of = next(of for of, pages in enumerate(PAGES_OF) if row.page_ids[0] == KV.groups * pages[0])
    for entry, page in enumerate(row.page_ids):
        if page == FREED:
            number, group = divmod(entry, KV.groups)
            cache.storage[KV.groups * PAGES_OF[of][number] + group] = float("nan")


@pytest.fixture(params=[pytest.param("windows", marks=soak), "everything", "shapes"])
def model(tmp_path: Path, request: pytest.FixtureRequest) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = load_spec(tmp_path)
    return {"windows": lambda: spec, "everything": lambda: with_everything(spec), "shapes": lambda: with_shapes(spec)}[
        request.param
    ]()


def with_everything(spec: ModelSpec) -> ModelSpec:
    """Returns the model with soft caps, sinks, partial rotary, GELU and norms of every kind, each in some layers."""
    first, second, third = spec.layers
    assert isinstance(first.attention, GroupedQueryAttention)
    assert isinstance(second.attention, GroupedQueryAttention)
    assert isinstance(third.attention, GroupedQueryAttention)
    shape, whole = first.attention.shape, second.attention.shape
    attentions = (
        replace(first.attention, shape=replace(shape, softcap=2.0), sinks=True),
        replace(second.attention, shape=replace(whole, rotary_dims=32), qk_norm=whole.heads * whole.head_dim),
        replace(third.attention, rope=None, qk_norm=0, sinks=True),
    )
    layers = (LayerSpec(attention, DenseFeedForward(96, "gelu_tanh"), output_norms=True) for attention in attentions)
    return replace(spec, layers=tuple(layers), wide_norms=True)


def with_shapes(spec: ModelSpec) -> ModelSpec:
    """Returns the model with other heads in the layers with a window; the other one leaves a part of a page unused."""
    layers = []
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, GroupedQueryAttention)
        if (shape := attention.shape).window is not None:
            other = replace(shape, heads=4, kv_heads=2, head_dim=80)
            attention = replace(attention, shape=other, qk_norm=80 if attention.qk_norm else 0)
        layers.append(replace(layer, attention=attention))
    return replace(spec, layers=tuple(layers))


def weights(model: ModelSpec, dtype: torch.dtype) -> Parameters:
    """Returns the same weights for each dtype, except for rounding."""
    parameters = allocate_parameters(model, torch.float64, DEVICE)
    fill_randomly(parameters)
    copies = allocate_parameters(model, dtype, DEVICE)
    for (_, given), (_, copy) in zip(tensors_of(parameters), tensors_of(copies), strict=True):
        # Numbers that float16 holds exactly, so that every dtype starts from the same ones.
        copy.copy_(given.half())
    return copies


def logits(model: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the logits of each step, in float64."""
    cache = PagedCache(model, PAGE, cache_bytes(model, KV.groups * PAGES, PAGE, dtype), dtype, DEVICE)
    assert cache.kv_pages == KV
    cache.storage.fill_(float("nan"))
    forward = Forward(DecoderModel(model, weights(model, dtype), kernels, model.max_context), cache)
    stepper = HostStepper(StepPacker(step_limits(model, cache)), forward, DEVICE, sample)
    logits_of = {}
    with torch.inference_mode():
        for name, step in STEPS.items():
            for row in step.rows:
                free_unseen_pages(cache, row)
            drawn = stepper.logits(step)
            assert drawn is not None
            logits_of[name] = drawn.double().cpu()
    return logits_of


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.float32, torch.bfloat16] if ON_GPU else [])], ids=str)
def test_every_step_as_exact_as_torch(model: ModelSpec, dtype: torch.dtype) -> None:
    kernels = CudaKernels(model, DEVICE, dtype, PAGE, DECODE_ROWS)
    assert {shape.window or 0 for shape in kernels._decode} == {0, WINDOW}
    ours = logits(model, kernels, dtype)
    plain = logits(model, ReferenceKernels(), dtype)
    exact = logits(model, ReferenceKernels(), torch.float64)
    for name in STEPS:
        assert_as_good(ours[name], plain[name], exact[name])
