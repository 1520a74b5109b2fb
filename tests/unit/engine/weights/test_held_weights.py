"""The bytes of packed weights as each device's kernels keep them, and what the plan and the cost model count."""

import pytest
import torch

from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.held_weight import held_bytes
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.model_sizes import matrix_bytes, model_sizes, total_weights
from tandem.engine.models.allocation import weight_bytes
from tandem.engine.models.load_spec import quantized_at_load
from tandem.engine.models.shapes import shape_config
from tests.kernels.packed_cases import make_packed

ROWS, COLUMNS = 16, 256


@pytest.mark.parametrize(
    ("kind", "group", "cpu", "gpu"),
    [
        ("int8", 256, ROWS * 256 + ROWS * 2, ROWS * 256 + ROWS * 4),
        ("int8", 16, ROWS * 256 * 2, ROWS * (256 + 16 * 4)),
        ("int8", 8, ROWS * 256 * 2, ROWS * 256 * 2),
        ("fp8", 128, ROWS * 256 * 2, ROWS * (256 + 2 * 4)),
        ("int4", 32, ROWS * (128 + 8 * 2), ROWS * (128 + 8 * 4)),
        ("mxfp4", 32, ROWS * (256 + 8 * 2), ROWS * (128 + 8 + 4)),
        ("nvfp4", 16, ROWS * 256 * 2, ROWS * (128 + 16 + 4)),
        ("int4_offsets", 32, ROWS * (128 + 16 * 2), ROWS * (128 + 16 * 4)),
    ],
)
def test_codes_or_a_weight_of_16_bits(kind: str, group: int, cpu: int, gpu: int) -> None:
    weight = make_packed(kind, (ROWS, COLUMNS), group)
    assert held_bytes(weight, 2, on_cpu=True) == cpu
    assert held_bytes(weight, 2, on_cpu=False) == gpu


def quantized(shape: str, name: str) -> ModelSpec:
    return quantized_at_load(shape_config(shape), name)


def test_experts_on_gpus_are_codes() -> None:
    plain, packed = (
        model_sizes(spec, 2) for spec in (shape_config("qwen3-30b-a3b"), quantized("qwen3-30b-a3b", "fp8"))
    )
    assert packed.expert_bytes == pytest.approx(plain.expert_bytes / 2, rel=0.01)


def test_gpt_oss_in_mxfp4_has_the_size_of_its_files() -> None:
    """The weights of the published files have 12.8 and 60.8 GiB."""
    assert weight_bytes(shape_config("gpt-oss-20b-mxfp4"), torch.bfloat16) / 2**30 == pytest.approx(12.8, rel=0.01)
    assert weight_bytes(shape_config("gpt-oss-120b"), torch.bfloat16) / 2**30 == pytest.approx(60.8, rel=0.01)


def test_fp8_on_cpus_is_dequantized() -> None:
    spec = quantized("llama-3.2-1b", "fp8")
    plain = shape_config("llama-3.2-1b")
    assert weight_bytes(spec, torch.bfloat16, on_cpu=True) == weight_bytes(plain, torch.bfloat16)
    assert matrix_bytes(spec, 2, on_cpu=True) == total_weights(spec) * 2
    assert model_sizes(spec, 2, on_cpu=True).weight_bytes == model_sizes(plain, 2).weight_bytes
    assert weight_bytes(spec, torch.bfloat16) < 0.7 * weight_bytes(plain, torch.bfloat16)


def test_a_view_of_a_weight_keeps_its_inputs_form() -> None:
    weight = make_packed("fp8", (8, 64), 64)
    asked = PackedWeight(weight.codes, weight.scales, None, 64, quantized_inputs=True)
    assert asked[2:4].quantized_inputs
    assert asked.rows(torch.tensor([1])).quantized_inputs
    assert not weight[2:4].quantized_inputs
