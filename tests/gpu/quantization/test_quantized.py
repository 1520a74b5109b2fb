"""Quantized weights on the GPU: loaded and repacked there, with the logits of the plain kernels on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import quantized_at_load
from tandem.engine.models.parameters import named_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights.checkpoint import check_model, load_weights
from tests.factories import row, write_tiny_model
from tests.unit.engine.weights.quantized_folders import CASES, write_quantized

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
}
"""Dimensions that the GPU's kernels take."""
KL = 2e-3
"""Products of codes may round their input to 8 bits."""


@pytest.mark.parametrize("case", CASES)
def test_repacking_on_the_gpu_is_that_on_the_cpu(case: str, tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, case, **WIDE)
    same_weights(folder, None)


@pytest.mark.parametrize("name", ["int8", "fp8", "int4"])
def test_rounding_on_the_gpu_is_that_on_the_cpu(name: str, tmp_path: Path) -> None:
    same_weights(write_tiny_model(tmp_path, "qwen3_moe", **(WIDE | {"moe_intermediate_size": 64})), name)


def same_weights(folder: Path, quantization: str | None) -> None:
    spec = quantized_at_load(check_model(folder), quantization)
    weights = []
    for device in ("cuda", "cpu"):
        parameters = allocate_parameters(spec, torch.float32, torch.device(device))
        load_weights(folder, spec, parameters)
        weights.append(dict(named_weights(parameters)))
    for path, weight in weights[0].items():
        other = weights[1][path]
        if isinstance(weight, PackedWeight):
            assert isinstance(other, PackedWeight)
            weight, other = weight.dequantized(torch.float32), other.dequantized(torch.float32)  # noqa: PLW2901
        assert isinstance(other, torch.Tensor)
        torch.testing.assert_close(weight.cpu(), other, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("case", ["awq", "gptq desc_act", "W4A16", "W8A8 int", "fp8 channel", "deepseek fp8"])
def test_logits_are_those_of_plain_kernels(case: str, tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, case, **WIDE)
    config = EngineConfig.of(
        folder, device="cuda", dtype="float32", kv_cache_bytes=1 << 26, page_tokens=16, max_batch_requests=64
    )
    ours = ModelRunner.load(config)
    plain = ModelRunner.load(
        EngineConfig.of(folder, dtype="float32", kv_cache_bytes=1 << 26, page_tokens=16), kernels=ReferenceKernels()
    )
    for ids, start in ((list(range(3, 40)), 0), ([41], 37), ([42], 38)):
        batch = StepBatch([row(ids, start, [4, 2, 5])])
        wanted = plain.logits(batch).log_softmax(-1)
        actual = ours.logits(batch).cpu().log_softmax(-1)
        assert (wanted.exp() * (wanted - actual)).sum() < KL
        ours.run(batch)
        plain.run(batch)
