"""Checkpoints with FP4 codes: gpt-oss in MXFP4 as published and as GGUF, and NVFP4."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.packed_weight import FLOAT4_TILE, Float4Weight, PackedWeight, pack_nibbles, unpack_nibbles
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.parameters import named_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights.checkpoint import check_model, load_weights
from tandem.protocol.errors import ModelError
from tests.e2e.reference import Reference
from tests.factories import row, tiny_engine_config
from tests.unit.engine.weights.quantized_folders import WEIGHTS, write_mxfp4, write_quantized

Tensors = dict[str, torch.Tensor]
IDS = tuple(range(3, 60))
EXPERTS = "model.layers.1.mlp.experts."


def logits(folder: Path, kernels: Kernels | None = None) -> torch.Tensor:
    kernels = ReferenceKernels() if kernels is None else kernels
    runner = ModelRunner.load(tiny_engine_config(folder, dtype="float32"), kernels=kernels)
    return runner.logits(StepBatch([row(list(IDS), 0, [4, 2, 5, 6, 7, 8, 9, 10])]))


def packed_weights(folder: Path) -> dict[str, Float4Weight]:
    spec = check_model(folder)
    parameters = allocate_parameters(spec, torch.float32, torch.device("cpu"))
    load_weights(folder, spec, parameters)
    return {path: weight for path, weight in named_weights(parameters) if isinstance(weight, Float4Weight)}


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    """Transformers dequantizes the blocks with its own code."""
    folder, twin = write_mxfp4(tmp_path)
    actual = logits(folder)
    torch.testing.assert_close(actual[0], Reference(folder).logits(IDS)[-1], atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(actual, logits(twin), atol=2e-5, rtol=2e-5)


def test_kernels_of_cpus_compute_nearly_the_same(tmp_path: Path) -> None:
    """Nearly, as products of codes round their input."""
    folder, twin = write_mxfp4(tmp_path)
    actual, wanted = (logits(path, CpuKernels(torch.float32, 1)).log_softmax(-1) for path in (folder, twin))
    assert (wanted.exp() * (wanted - actual)).sum() < 2e-3


def test_experts_stay_packed_and_the_rest_is_plain(tmp_path: Path) -> None:
    folder, _ = write_mxfp4(tmp_path, num_hidden_layers=2)
    weights = packed_weights(folder)
    assert set(weights) == {
        f"layers.{number}.feed_forward.{part}" for number in range(2) for part in ("gate_up", "down")
    }
    assert {str(weight.scales.dtype) for weight in weights.values()} == {"torch.float8_e8m0fnu"}


def test_experts_that_are_stored_in_16_bits(tmp_path: Path) -> None:
    """Fine-tuned models may keep the configuration although their experts are not quantized any more."""
    folder, twin = write_mxfp4(tmp_path, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps(config))
    assert packed_weights(twin) == {}
    torch.testing.assert_close(logits(folder), logits(twin), atol=2e-5, rtol=2e-5)


def test_the_stacked_parts_of_nvfp4_have_scales_of_their_own(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "modelopt nvfp4")
    qkv = packed_weights(folder)["layers.0.attention.qkv"]
    assert len(qkv.factors.unique()) == 3
    assert qkv.scales.dtype == torch.float8_e4m3fn


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {path: tensor for path, tensor in tensors.items() if path != EXPERTS + name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {EXPERTS + name: change(tensors[EXPERTS + name]).contiguous()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("down_proj_scales"), ["lacks tensor", "down_proj_scales", "mxfp4, fp4, groups of 32"]),
        (without("gate_up_proj_blocks"), ["lacks tensor", "gate_up_proj_blocks"]),
        (changed("down_proj_scales", lambda tensor: tensor[:, :5]), ["has shape [8, 5, 2]", "[8, 64, 2]"]),
        (changed("down_proj_blocks", lambda tensor: tensor.view(torch.int8)), ["stored as I8; only U8"]),
        (
            changed("gate_up_proj_scales", lambda tensor: tensor | 255),
            ["gate_up_proj has scales that are negative or not"],
        ),
    ],
)
def test_wrong_tensors(change: Callable[[Tensors], Tensors], words: list[str], tmp_path: Path) -> None:
    folder, _ = write_mxfp4(tmp_path, num_hidden_layers=2)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    with pytest.raises(ModelError) as caught:
        packed_weights(folder)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("weight_scale_2", 0.0, "weight_scale_2 of 0, which must be above 0"),
        ("weight_scale", -1.0, "scales that are negative"),
    ],
)
def test_wrong_scales_of_nvfp4(part: str, value: float, words: str, tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "modelopt nvfp4")
    tensors = load_file(folder / WEIGHTS)
    name = f"model.layers.1.mlp.down_proj.{part}"
    tensors[name] = torch.full(tensors[name].shape, value).to(tensors[name].dtype)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=words):
        packed_weights(folder)


def test_columns_that_are_no_multiple_of_32_are_dequantized(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "modelopt nvfp4", intermediate_size=80)
    assert "layers.0.feed_forward.down" not in packed_weights(folder)
    assert "layers.0.feed_forward.gate_up" in packed_weights(folder)
    torch.testing.assert_close(logits(folder), logits(twin), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("columns", [32, 64, 96, 160])
def test_codes_are_packed_in_tiles_of_64_columns(columns: int) -> None:
    codes = torch.arange(3 * columns).view(3, columns) % 16
    packed = pack_nibbles(codes, FLOAT4_TILE)
    assert torch.equal(unpack_nibbles(packed, FLOAT4_TILE), codes.to(torch.uint8))
    half = min(columns, 64) // 2
    assert torch.equal(packed[:, 0].long(), codes[:, 0] | codes[:, half] << 4)


def test_a_view_is_of_the_same_kind() -> None:
    codes, scales = torch.zeros(2, 6, 32, dtype=torch.uint8), torch.ones(2, 6, 2).to(torch.float8_e8m0fnu)
    weight = Float4Weight(codes, scales, None, 32, torch.arange(12.0).view(2, 6))
    assert isinstance(weight[1], Float4Weight)
    upper = weight[1].chunk(2)[1]
    assert isinstance(upper, Float4Weight)
    assert upper.factors.tolist() == [9, 10, 11]
    assert isinstance(weight, PackedWeight)
    assert weight.shape == (2, 6, 64)
