"""GPU kernels in whole models of packed weights: the logits of the plain ones. In Triton's interpreter, or on a GPU."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.engine.config import EngineConfig
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.load_spec import load_spec
from tandem.engine.steps.batch import StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.messages import SamplingParams

DRAW = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 1},
    "qwen2_moe": {
        "model_type": "qwen2_moe", "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
GROUP = {"targets": ["Linear"], "weights": CHANNELS, "input_activations": TOKENS}
SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8 int": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": GROUP},
        "ignore": ["lm_head"],
    },
    "fp8 dynamic": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8 blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "fp8": {"quant_method": "fp8"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
}  # fmt: skip
KL = 1e-3 if torch.cuda.is_available() else 1e-5
"""Codes of inputs may differ by one where sums differ in the last digit, and matrix units sum FP8 with few digits."""


GPT_OSS = {
    "model_type": "gpt_oss", "num_key_value_heads": 1, "num_local_experts": 6, "num_experts_per_tok": 2,
    "sliding_window": 8,
}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model", MODELS)
def test_logits_of_the_plain_kernels(model: str, scheme: str, tmp_path: Path) -> None:
    assert_same_logits(MODELS[model], SCHEMES[scheme], tmp_path)


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    assert_same_logits(GPT_OSS, {"quant_method": "mxfp4"}, tmp_path)


def assert_same_logits(model: dict[str, Any], scheme: dict[str, Any], tmp_path: Path) -> None:
    config = {
        "vocab_size": 67, "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "eos_token_id": 0,
        "tie_word_embeddings": False, "quantization_config": scheme,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | model))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings = EngineConfig.of(
        tmp_path, device=device, dtype="float32", page_tokens=16, kv_cache_bytes=1 << 20, random_weights=True
    )
    kernels = CudaKernels(load_spec(tmp_path), torch.device(device), torch.float32, 16, max_decode_rows=4)
    ours, plain = (ModelRunner.load(settings, kernels=backend) for backend in (kernels, ReferenceKernels()))
    prompt = [(7 * i) % 67 for i in range(21)]
    for rows in (
        [StepRow(prompt, 0, [3, 1, 2], DRAW), StepRow(prompt[:5], 0, [5], DRAW)],
        [StepRow([9], 21, [3, 1, 2], DRAW), StepRow([8], 5, [5], DRAW)],
    ):
        step = StepBatch(rows)
        wanted, actual = (runner.logits(step).log_softmax(-1) for runner in (plain, ours))
        assert (wanted.exp() * (wanted - actual)).sum(-1).max() < KL
