"""Models with state layers on the GPU's kernels: the logits of the plain ones, in chunks and mixed steps."""

from pathlib import Path

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tests.factories import draw, write_tiny_model
from tests.soak import soak

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_TOKENS = 16


@pytest.mark.parametrize("family", [pytest.param("qwen3_next", marks=soak), "nemotron_h", "lfm2"])
def test_logits_of_the_plain_kernels(family: str, tmp_path: Path) -> None:
    heads = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    folder = write_tiny_model(tmp_path, family, **heads)
    config = EngineConfig.of(
        folder, device=DEVICE, dtype="float32", page_tokens=PAGE_TOKENS, kv_cache_bytes=1 << 21, threads=1
    )
    kernels = CudaKernels(load_spec(folder), torch.device(DEVICE), torch.float32, PAGE_TOKENS, 4)
    ours, plain = (ModelRunner.load(config, kernels=backend) for backend in (kernels, ReferenceKernels()))
    prompt = [(7 * i) % 67 for i in range(7)]
    share = ours.kv_pages.groups
    pages = [list(range(number * share, (number + 1) * share)) for number in range(3)]
    steps = [
        [StepRow(prompt[:5], 0, pages[0], draw()), StepRow(prompt[:3], 0, pages[1], draw())],
        [
            StepRow([8], 3, pages[1], draw()),
            StepRow(prompt[5:], 5, pages[0], draw()),
            StepRow(prompt[:2], 0, pages[2], draw()),
        ],
        [StepRow([4], 7, pages[0], draw()), StepRow([2], 4, pages[1], draw()), StepRow([3], 2, pages[2], draw())],
    ]
    for rows in steps:
        step = StepBatch(rows)
        torch.testing.assert_close(ours.logits(step), plain.logits(step), rtol=2e-5, atol=2e-5)
