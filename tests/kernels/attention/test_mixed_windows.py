"""All GPU kernels together in a model whose layers have different windows, over prefill and decode steps.

Against float64, in Triton's interpreter or on a GPU.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.cache.paged_cache import PagedCache, cache_bytes
from engine.config.model import ModelSpec
from engine.host_stepper import HostStepper, forward_over
from engine.kernels.base import Kernels
from engine.kernels.cuda import CudaKernels
from engine.kernels.reference import ReferenceKernels
from engine.models.decoder import DecoderModel
from engine.models.load_spec import load_spec
from engine.models.parameters import Parameters, allocate_parameters, tensors_of
from engine.steps.batch import Draw, StepBatch, StepRow
from engine.steps.step_packer import StepPacker, step_limits
from engine.weights.random_weights import fill_randomly
from tests.kernels.decode_cases import DEVICE, ON_GPU
from tests.kernels.steps import assert_as_good
from wire.ending import pages_for
from wire.messages import SamplingParams

DRAW = Draw(SamplingParams(max_tokens=1, temperature=0.0), 0)
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


def step_of(*rows: tuple[int, int, int]) -> StepBatch:
    """Returns a step of rows (request, tokens in the cache, tokens after the step)."""
    return StepBatch(
        [StepRow(PROMPTS[of][start:end], start, PAGES_OF[of][: pages_for(end, PAGE)], DRAW) for of, start, end in rows]
    )


STEPS = {
    "two prompts": step_of((0, 0, 70), (1, 0, 5)),
    "two answers beside a chunk": step_of((0, 70, 71), (1, 5, 6), (2, 0, 17)),
    "two answers beside the next chunk": step_of((0, 71, 72), (1, 6, 7), (2, 17, 36)),
    "three answers": step_of((0, 72, 73), (1, 7, 8), (2, 36, 37)),
    "two answers": step_of((0, 73, 74), (2, 37, 38)),
    "one answer beside a chunk": step_of((0, 74, 75), (1, 8, 20)),
}
"""The steps in order: each reads the KV that those before it stored."""


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return load_spec(tmp_path)


def weights(model: ModelSpec, dtype: torch.dtype) -> Parameters:
    """Returns the same weights for each dtype, except for rounding."""
    parameters = allocate_parameters(model, torch.float64, DEVICE)
    fill_randomly(parameters)
    found = allocate_parameters(model, dtype, DEVICE)
    for (_, given), (_, each) in zip(tensors_of(parameters), tensors_of(found), strict=True):
        # Numbers that float16 holds exactly, so that every dtype starts from the same ones.
        each.copy_(given.half())
    return found


def logits(model: ModelSpec, kernels: Kernels, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the logits of each step, in float64."""
    cache = PagedCache(model, PAGE, cache_bytes(model, PAGES, PAGE, dtype), dtype, DEVICE)
    forward = forward_over(DecoderModel(model, weights(model, dtype), kernels, model.max_context), cache)
    stepper = HostStepper(StepPacker(step_limits(model, cache)), forward, DEVICE, ())
    found = {}
    with torch.inference_mode():
        for name, step in STEPS.items():
            drawn = stepper.logits(step)
            assert drawn is not None
            found[name] = drawn.double().cpu()
    return found


@pytest.mark.parametrize("dtype", [torch.float16, *([torch.float32, torch.bfloat16] if ON_GPU else [])], ids=str)
def test_every_step_as_exact_as_torch(model: ModelSpec, dtype: torch.dtype) -> None:
    kernels = CudaKernels(model, DEVICE, dtype, PAGE, DECODE_ROWS)
    assert sorted(shape.window or 0 for shape in kernels._decode) == [0, WINDOW]
    ours = logits(model, kernels, dtype)
    plain = logits(model, ReferenceKernels(), dtype)
    exact = logits(model, ReferenceKernels(), torch.float64)
    for name in STEPS:
        assert_as_good(ours[name], plain[name], exact[name])
