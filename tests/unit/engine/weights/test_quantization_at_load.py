"""Weights of 16 bits that are quantized while they are loaded."""

from pathlib import Path

import pytest
import torch

from tandem.engine.config.quantization import Codes, Packing
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.model_sizes import matrix_bytes, model_sizes, total_weights
from tandem.engine.model_summary import model_summary
from tandem.engine.models.allocation import allocate_parameters, weight_bytes
from tandem.engine.models.load_spec import load_spec, quantized_at_load
from tandem.engine.models.parameters import Parameters, named_weights, tensors_of
from tandem.engine.quantizer.rtn import round_to_nearest
from tandem.engine.quantizer.scheme import SCHEMES
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights.checkpoint import load_weights
from tandem.engine.weights.quantized.rounding import rounded
from tandem.engine.weights.random_weights import fill_randomly
from tandem.protocol.errors import InvalidArgument
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.unit.engine.weights.quantized_folders import write_quantized

CPU = torch.device("cpu")
NAMES = ["int8", "fp8", "int4"]


def load(folder: Path, quantization: str | None) -> Parameters:
    spec = quantized_at_load(load_spec(folder), quantization)
    parameters = allocate_parameters(spec, torch.float32, CPU)
    load_weights(folder, spec, parameters)
    return parameters


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [32, 128])
def test_no_weight_is_further_from_its_code_than_another_code(name: str, group: int) -> None:
    weight = torch.randn(3, 128) * torch.tensor([[1e-3], [0.0], [30.0]])
    packed = rounded(weight, Packing(Codes(name), group, offsets=False))
    error = (packed.dequantized(torch.float32) - weight).abs().view(3, -1, group)
    step = packed.scales[..., None].expand_as(error)
    if name == "fp8":
        step = torch.maximum(weight.abs().view_as(error) / 16, step / 512) * 2
    assert bool((error <= step * 0.501).all())
    assert not packed.dequantized(torch.float32)[1].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "family", ["llama3", "biased", "gpt_oss", "deepseek_v3", "qwen2_moe", "glm4", "nemotron_h", "qwen3_next"]
)
def test_the_products_of_the_layers_are_quantized(name: str, family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    plain, quantized = (dict(named_weights(load(folder, quantization))) for quantization in (None, name))
    assert list(quantized) == list(plain)
    packed = {path for path, weight in quantized.items() if isinstance(weight, PackedWeight)}
    for path, weight in quantized.items():
        wanted = plain[path]
        assert isinstance(wanted, torch.Tensor)
        if isinstance(weight, PackedWeight):
            group = weight.group
            columns = wanted.shape[-1]
            assert group == (columns if name != "int4" else next(g for g in (128, 64, 32) if columns % g == 0))
            form = Packing(Codes(name), group, offsets=False)
            assert torch.equal(rounded(wanted, form).dequantized(torch.float32), weight.dequantized(torch.float32))
        else:
            assert torch.equal(weight, wanted)
    fields = {path.rpartition(".")[2] for path in packed}
    assert not fields & {"router", "kv_up", "embedding", "lm_head", "input_norm", "shared_gate"}
    layers = {path for path in plain if path.endswith((".gate_up", ".output", ".qkv", ".shared_down.weight"))}
    assert name == "int4" or layers <= packed


def test_a_quantized_model_computes_nearly_the_same(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama3")
    batch = StepBatch([row(list(range(3, 40)), 0, [4, 2, 5])])
    runners = [
        ModelRunner.load(tiny_engine_config(folder, quantization=quantization), kernels=ReferenceKernels())
        for quantization in (None, *NAMES)
    ]
    plain, *quantized = (runner.logits(batch).log_softmax(-1) for runner in runners)
    for name, logprobs in zip(NAMES, quantized, strict=True):
        divergence = (plain.exp() * (plain - logprobs)).sum()
        assert 0 < divergence < {"int8": 1e-3, "fp8": 1e-2, "int4": 0.3}[name]
    # Workers of one folder exchange KV, however each of them keeps its weights.
    assert len({runner.compatibility_facts() for runner in runners}) == 1


def test_unknown_names_and_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "W4A16", num_hidden_layers=1)
    with pytest.raises(InvalidArgument, match="'int3' is not known; use int8, fp8, int4"):
        load(twin, "int3")
    with pytest.raises(InvalidArgument, match=r"quantized already \(compressed-tensors\)"):
        load(folder, "int8")


@pytest.mark.parametrize("name", NAMES)
def test_random_codes_have_the_spread_of_random_weights(name: str, tmp_path: Path) -> None:
    spec = quantized_at_load(load_spec(write_tiny_model(tmp_path)), name)
    first, second = (allocate_parameters(spec, torch.bfloat16, CPU) for _ in range(2))
    for parameters in (first, second):
        fill_randomly(parameters)
    weight = first.layers[0].feed_forward.gate_up
    assert isinstance(weight, PackedWeight)
    assert weight.dequantized(torch.float32).std().item() == pytest.approx(0.02, rel=0.05)
    for (_, one), (_, other) in zip(tensors_of(first), tensors_of(second), strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_sizes_count_packed_bytes(family: str, tmp_path: Path) -> None:
    spec = load_spec(write_tiny_model(tmp_path, family))
    packed = quantized_at_load(spec, "int8")
    saved = weight_bytes(spec, torch.bfloat16) - weight_bytes(packed, torch.bfloat16)
    assert saved > 0
    assert matrix_bytes(spec, 2) == total_weights(spec) * 2
    assert matrix_bytes(packed, 2) == matrix_bytes(spec, 2) - saved
    before, after = model_sizes(spec, 2), model_sizes(packed, 2)
    read_before, read_after = (sizes.weight_bytes + sizes.expert_bytes for sizes in (before, after))
    assert read_before - read_after == saved
    assert after.weights == before.weights
    assert (after.expert_bytes < before.expert_bytes) == (family == "qwen3_moe")
    assert any(line.startswith("weights: int8, ") for line in model_summary(packed, 2))


@pytest.mark.parametrize(("name", "scheme"), [("int8", "w8a16"), ("fp8", "fp8"), ("int4", "w4a16")])
def test_the_quantizer_rounds_as_loading_does(name: str, scheme: str) -> None:
    weight = torch.randn(8, 64)
    quantized = round_to_nearest(weight, SCHEMES[scheme], 32, torch.float32).values()
    assert torch.equal(quantized, rounded(weight, Packing(Codes(name), 32, offsets=False)).dequantized(torch.float32))
