"""Which schemes quantize the inputs of products, and what the plain kernels then compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.config.quantization import WeightScheme, at_load
from tandem.engine.kernels.layers import Linear
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import load_spec, quantized_at_load
from tandem.engine.models.parameters import named_weights
from tandem.engine.models.quantization_config import parse_quantization
from tandem.engine.weights.checkpoint import check_model, load_weights
from tests.factories import write_tiny_model
from tests.unit.engine.weights.quantized_folders import WEIGHTS, write_quantized

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


def scheme_of(stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> WeightScheme:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": stored, "config_groups": {"group_0": group}}
    ((_, scheme),) = parse_quantization(config).rules
    assert scheme is not None
    return scheme


@pytest.mark.parametrize(
    ("stored", "weights", "inputs", "quantized"),
    [
        ("int-quantized", INT8, TOKEN, True),
        ("int-quantized", INT8, {"num_bits": 8, "dynamic": False, "strategy": "tensor"}, True),
        ("int-quantized", INT8, None, False),
        ("float-quantized", FP8, FP8 | {"dynamic": True}, True),
        ("float-quantized", FP8, FP8 | {"dynamic": False}, True),
        ("float-quantized", FP8, TOKEN, False),
        ("pack-quantized", INT8 | {"num_bits": 4}, TOKEN, False),
        ("pack-quantized", INT8, None, False),
    ],
)
def test_inputs_of_the_type_of_the_weights_are_quantized(
    stored: str, weights: dict[str, Any], inputs: dict[str, Any] | None, quantized: bool
) -> None:
    scheme = scheme_of(stored, weights, inputs)
    assert scheme.quantized_inputs == quantized
    packing = scheme.packing(128)
    assert packing is not None
    assert packing.quantized_inputs == quantized


def test_inputs_of_weights_with_zero_points_are_not() -> None:
    packing = scheme_of("int-quantized", INT8 | {"symmetric": False}, TOKEN).packing(128)
    assert packing is not None
    assert packing.offsets
    assert not packing.quantized_inputs


@pytest.mark.parametrize(("activations", "quantized"), [("dynamic", True), ("static", True), (None, False)])
@pytest.mark.parametrize("block", [None, [128, 128]])
def test_fp8(activations: str | None, quantized: bool, block: list[int] | None) -> None:
    config = {"quant_method": "fp8", "activation_scheme": activations, "weight_block_size": block}
    ((_, scheme),) = parse_quantization(config).rules
    assert scheme is not None
    assert scheme.quantized_inputs == quantized
    assert scheme.group == (None if block is None else 128)


def test_at_load_fp8_quantizes_inputs_and_integers_do_not() -> None:
    schemes = {name: at_load(name).rules[0][1] for name in ("fp8", "int8", "int4")}
    assert {name for name, scheme in schemes.items() if scheme and scheme.quantized_inputs} == {"fp8"}


def test_experts_quantize_their_inputs_too(tmp_path: Path) -> None:
    spec = quantized_at_load(load_spec(write_tiny_model(tmp_path, "qwen2_moe")), "fp8")
    weights = dict(named_weights(allocate_parameters(spec, torch.float32, torch.device("meta"))))
    packed = {path: weight for path, weight in weights.items() if isinstance(weight, PackedWeight)}
    assert {len(weight.shape) for weight in packed.values()} == {2, 3}
    assert all(weight.quantized_inputs for weight in packed.values())


@pytest.mark.parametrize("case", ["fp8 of one scale", "fp8 channel"])
def test_a_stored_scale_of_inputs_is_not_used(case: str, tmp_path: Path) -> None:
    """Scales are computed for each token, whatever a static scheme stores."""
    folder, _ = write_quantized(tmp_path, case)
    stored = load_file(folder / WEIGHTS)
    modules = [name.removesuffix(".weight_scale") for name in stored if name.endswith("weight_scale")]
    static = {f"{module}.input_scale": torch.tensor([123.0]) for module in modules}
    save_file(stored | static, folder / WEIGHTS)
    spec = check_model(folder)
    parameters = allocate_parameters(spec, torch.float32, torch.device("cpu"))
    load_weights(folder, spec, parameters)
    packed = [weight for _, weight in named_weights(parameters) if isinstance(weight, PackedWeight)]
    assert packed
    assert {weight.quantized_inputs for weight in packed} == {
        "activation_scheme" in (folder / "config.json").read_text()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [8, 4])
def test_the_plain_product_by_hand(group: int, dtype: torch.dtype) -> None:
    """Codes of the token and of the weight are multiplied as integers, then scaled."""
    x = torch.tensor([[3.0, -1.0, 0.5, 2.0, 8.0, -4.0, 1.0, 0.0], [0.0] * 8], dtype=dtype)
    codes = torch.tensor([[1, -2, 3, 4, 5, -6, 7, 8], [100, 90, 80, 70, 60, 50, 40, 30]], dtype=torch.int8)
    scales = torch.tensor([[0.5] * (8 // group), [0.25] * (8 // group)])
    weight = PackedWeight(codes, scales, None, group, quantized_inputs=True)
    actual = ReferenceKernels().linear(x, Linear(weight, torch.tensor([10.0, 20.0], dtype=dtype)))
    wanted = torch.zeros(2, 2, dtype=torch.float64)
    for token in range(2):
        for row in range(2):
            for first in range(0, 8, group):
                most = float(x[token, first : first + group].abs().max())
                total = 0
                for column in range(first, first + group):
                    code = round(float(x[token, column]) * 127 / most) if most else 0
                    total += code * int(codes[row, column])
                wanted[token, row] += total * most / 127 * float(scales[row, first // group])
            wanted[token, row] += (10.0, 20.0)[row]
    torch.testing.assert_close(actual.double(), wanted, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=1e-6)


def test_config_json_of_a_quantizer_says_so(tmp_path: Path) -> None:
    """`tandem quantize --scheme w8a8` and `fp8` write what is read here."""
    from tandem.engine.quantizer.scheme import SCHEMES

    for name, quantized in (("w8a8", True), ("fp8", True), ("w8a16", False), ("w4a16", False)):
        config = json.loads(json.dumps(SCHEMES[name].config(128, [])))
        assert any(scheme and scheme.quantized_inputs for _, scheme in parse_quantization(config).rules) == quantized
