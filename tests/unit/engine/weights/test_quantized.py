"""Quantized checkpoints: values, greedy tokens, bytes, and what is refused in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters, weight_bytes
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import named_weights, tensors_of
from tandem.engine.models.quantization_config import parse_quantization
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights.checkpoint import check_model, load_weights, stored_dtype
from tandem.protocol.errors import ModelError
from tests.factories import row, tiny_engine_config, write_tiny_model
from tests.unit.engine.weights.quantized_folders import CASES, WEIGHTS, write_quantized

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def loaded(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of a folder by their names, packed ones dequantized to float32."""
    spec = check_model(folder)
    parameters = allocate_parameters(spec, torch.float32, CPU)
    load_weights(folder, spec, parameters)
    weights = {name: slot.tensor for name, slot in slots_of(spec, parameters).items()}
    return {
        name: weight.dequantized(torch.float32) if isinstance(weight, PackedWeight) else weight
        for name, weight in weights.items()
    }


def greedy(folder: Path, kernels: Kernels, **settings: Any) -> list[int]:
    runner = ModelRunner.load(tiny_engine_config(folder, **settings), kernels=kernels)
    tokens, start = list(range(3, 24)), 0
    for _ in range(8):
        logits = runner.logits(StepBatch([row(tokens[start:], start, [4, 2, 5])]))
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[21:]


@pytest.mark.parametrize("case", CASES)
def test_values_and_tokens_are_those_of_the_dequantized_model(case: str, tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, case)
    wanted = loaded(twin)
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)
    tokens = greedy(twin, ReferenceKernels())
    assert greedy(folder, ReferenceKernels()) == tokens
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("case", ["awq", "W4A16", "deepseek fp8"])
@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "phi3"])
def test_experts_latents_and_stacked_layers(case: str, family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {}
    if family == "qwen2_moe":
        sizes = {"shared_expert_intermediate_size": 96, "mlp_only_layers": [0]}
    sizes |= {"moe_intermediate_size": 64, "q_lora_rank": 64} if family != "phi3" else {}
    if family == "deepseek_v3":
        sizes |= {"v_head_dim": 32, "qk_nope_head_dim": 16}
    folder, twin = write_quantized(tmp_path, case, family, **sizes)
    wanted = loaded(twin)
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)
    assert greedy(folder, ReferenceKernels()) == greedy(twin, ReferenceKernels())
    spec = check_model(folder)
    packed = [
        path
        for path, weight in named_weights(allocate_parameters(spec, torch.float32, CPU))
        if isinstance(weight, PackedWeight)
    ]
    if family != "phi3":
        assert "layers.1.feed_forward.gate_up" in packed
        assert "layers.1.feed_forward.shared_down.weight" in packed
    assert not any("router" in path or "kv_up" in path or "embedding" in path for path in packed)


@pytest.mark.parametrize("case", ["awq", "W8A8 int", "fp8 block"])
def test_kernels_of_cpus_compute_nearly_the_same(case: str, tmp_path: Path) -> None:
    """Nearly, as products of codes may round their input."""
    folder, twin = write_quantized(tmp_path, case)
    batch = StepBatch([row(list(range(3, 40)), 0, [4, 2, 5])])
    actual, wanted = (
        ModelRunner.load(tiny_engine_config(path), kernels=CpuKernels(torch.float32, 1)).logits(batch).log_softmax(-1)
        for path in (folder, twin)
    )
    assert (wanted.exp() * (wanted - actual)).sum() < 2e-3


def test_packed_weights_take_fewer_bytes(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "W4A16")
    spec = check_model(folder)
    parameters = allocate_parameters(spec, torch.bfloat16, CPU)
    assert weight_bytes(spec, torch.bfloat16) == sum(tensor.nbytes for _, tensor in tensors_of(parameters))
    layers = sum(tensor.numel() for name, tensor in load_file(twin / WEIGHTS).items() if name.endswith("_proj.weight"))
    saved = layers * 2 - layers // 2 - layers // 32 * 4  # a scale of four bytes for each 32 codes
    assert weight_bytes(spec, torch.bfloat16) == weight_bytes(check_model(twin), torch.bfloat16) - saved


def test_a_stack_of_different_schemes_is_kept_in_the_models_dtype(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "W4A16")
    tensors, plain = load_file(folder / WEIGHTS), load_file(twin / WEIGHTS)
    name = "model.layers.1.self_attn.k_proj."
    tensors = {path: tensor for path, tensor in tensors.items() if not path.startswith(name)}
    save_file(tensors | {f"{name}weight": plain[f"{name}weight"].to(torch.bfloat16).float()}, folder / WEIGHTS)
    spec = check_model(folder)
    weights = allocate_parameters(spec, torch.float32, CPU).layers
    assert isinstance(weights[0].attention.qkv, PackedWeight)  # type: ignore[union-attr]
    assert isinstance(weights[1].attention.qkv, torch.Tensor)  # type: ignore[union-attr]
    assert isinstance(weights[1].attention.output, PackedWeight)
    wanted = loaded(twin)
    for path, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[path], atol=1e-2 if path.startswith(name) else 1e-7, rtol=1e-6)


def test_scattered_columns_are_dequantized_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = write_quantized(tmp_path, "gptq desc_act")
    with caplog.at_level("INFO"):
        loaded(folder)
    assert "14 of 14 quantized tensors are dequantized" in caplog.text


def test_codes_are_no_dtype_of_a_model(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "awq", vocab_size=3)
    assert stored_dtype(folder) == "float32"


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    message = caught.value.message
    assert message.endswith(".")
    assert "\n" not in message
    return message


MODULE = "model.layers.1.mlp.down_proj."


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {path: tensor for path, tensor in tensors.items() if path != MODULE + name}


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {MODULE + name: change(tensors[MODULE + name]).contiguous()}


TENSORS: list[tuple[str, Callable[[Tensors], Tensors], list[str]]] = [
    ("awq", without("scales"), [f"lacks tensor {MODULE}scales", "(awq, int4, groups of 32)"]),
    ("awq", without("qweight"), [f"lacks tensor {MODULE}qweight"]),
    (
        "awq",
        changed("scales", lambda tensor: tensor[:1]),
        [f"{MODULE}scales has shape [1, 64]", "[3, 64]", "groups of 32"],
    ),
    ("awq", changed("qweight", lambda tensor: tensor.t()), [f"{MODULE}qweight has shape [8, 96]", "[96, 8]"]),
    ("awq", changed("qweight", lambda tensor: tensor.long()), [f"{MODULE}qweight is stored as I64; only I32"]),
    ("gptq asymmetric", without("qzeros"), [f"lacks tensor {MODULE}qzeros"]),
    ("gptq symmetric", changed("qzeros", lambda tensor: tensor * 0), ["zero points other than the centre"]),
    ("gptq asymmetric", changed("g_idx", lambda tensor: tensor.flip(0)), ["g_idx in another order"]),
    ("gptq desc_act", changed("g_idx", lambda tensor: tensor + 1), ["g_idx outside of its 3 groups"]),
    ("gptq desc_act", lambda tensors: tensors | {MODULE + "bias": torch.ones(64)}, ["a bias that is not zero"]),
    (
        "W4A16",
        lambda tensors: tensors | {MODULE + "weight_g_idx": torch.arange(96).flip(0).int() // 32},
        ["another order"],
    ),
    ("gptq desc_act", without("g_idx"), [f"lacks tensor {MODULE}g_idx"]),
    ("W4A16", without("weight_scale"), [f"lacks tensor {MODULE}weight_scale", "pack-quantized"]),
    ("W4A16 asymmetric", without("weight_zero_point"), [f"lacks tensor {MODULE}weight_zero_point"]),
    ("W8A8 int", changed("weight_scale", lambda tensor: tensor[:5]), ["has shape [5, 1]", "[64, 1]", "int-quantized"]),
    ("fp8 tensor", changed("weight", lambda tensor: tensor.view(torch.int8)), ["stored as I8; only F8_E4M3"]),
    ("fp8 2:4 sparse", without("bitmask"), [f"lacks tensor {MODULE}bitmask"]),
    ("fp8 2:4 sparse", changed("bitmask", lambda tensor: tensor | 1), ["without exactly half of the columns"]),
    ("fp8 2:4 sparse", changed("compressed", lambda tensor: tensor[:, 1:]), ["has shape [64, 47]", "[64, 48]"]),
    ("deepseek fp8", without("weight_scale_inv"), [f"lacks tensor {MODULE}weight_scale_inv", "fp8, groups of 64"]),
    ("deepseek fp8", changed("weight_scale_inv", lambda tensor: tensor.t()), ["has shape [2, 1]", "[1, 2]"]),
]


@pytest.mark.parametrize(("case", "change", "words"), TENSORS)
def test_wrong_tensors(case: str, change: Callable[[Tensors], Tensors], words: list[str], tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, case)
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS)
    message = refusal(folder)
    for word in words:
        assert word in message


CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized (bitsandbytes), which is not supported"),
    ({"quant_method": "mxfp6"}, "quantized (mxfp6)"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "awq, version gemv"),
    ({"quant_method": "awq", "w_bit": 3}, "awq, 3 bits"),
    ({"quant_method": "gptq", "bits": 3}, "gptq, 3 bits"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "gptq, group_size 0"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq, marlin"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down.*": {"bits": 8}}}, "gptq, dynamic"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, e5m2"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "fp8, weight_block_size [128]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "fp8, weight_block_size [0, 128]"),
    ({"quant_method": "fp8", "weight_block_size": "128x0"}, "fp8, weight_block_size 128x0"),
    ({"quant_method": "compressed-tensors"}, "config_groups"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "modelopt, NVFP4_AWQ"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "modelopt, NVFP4, group_size 32"),
    ({"quant_method": "modelopt"}, "modelopt, no quant_algo"),
    ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, "auto_round:auto_awq, int"),
    (
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", "data_type": "mx_fp"},
        "auto_round:auto_gptq, mx_fp",
    ),
]


def of_group(stored: str, **weights: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "format": stored}
    return config | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


CONFIGS += [
    (of_group("nvfp4-pack-quantized", num_bits=4, type="float"), "nvfp4-pack-quantized, float4, group_size None"),
    (of_group("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32), "mxfp4-pack-quantized, float4"),
    (of_group("pack-quantized", num_bits=3, type="int"), "pack-quantized, int3"),
    (of_group("marlin-24", num_bits=4, type="int", strategy="group", group_size=32), "marlin-24"),
    (of_group("int-quantized", num_bits=8, type="int", strategy="token"), "strategy token"),
    (of_group("float-quantized", num_bits=8, type="float", strategy="block"), "block_structure None"),
    (CASES["W4A16"][0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask, pack-quantized"),
    (CASES["W8A8 int"][0] | {"sparsity_config": {"format": "sparse-bitmask"}}, "sparse-bitmask"),
    (CASES["W4A16"][0] | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config"),
]


@pytest.mark.parametrize(("quantization", "words"), CONFIGS)
def test_schemes_that_are_not_served(quantization: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = json.loads((write_tiny_model(tmp_path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    message = refusal(tmp_path)
    assert "the checkpoint is quantized (" in message
    assert words in message


def test_a_name_that_is_no_regular_expression(tmp_path: Path) -> None:
    folder, _ = write_quantized(tmp_path, "W4A16")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["re:*lm_head("]
    (folder / "config.json").write_text(json.dumps(config))
    assert "names modules by '(?:*lm_head().*'" in refusal(folder)


def test_columns_that_are_ordered_dynamically_are_scattered() -> None:
    config = of_group("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32, actorder="dynamic")
    ((_, scheme),) = parse_quantization(config).rules
    assert scheme is not None
    assert scheme.scattered


def test_tensors_that_are_not_in_use_may_be_there(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "fp8 tensor")
    attention = "model.layers.0.self_attn."
    names = [f"{attention}k_scale", f"{attention}v_proj.v_scale", f"{MODULE}input_scale"]
    save_file(load_file(folder / WEIGHTS) | {name: torch.ones(1) for name in names}, folder / WEIGHTS)
    wanted = loaded(twin)
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)
    save_file(load_file(folder / WEIGHTS) | {f"{MODULE}weight_sparse": torch.ones(1)}, folder / WEIGHTS)
    assert f"has tensor {MODULE}weight_sparse" in refusal(folder)


def test_biases_are_the_models_own_or_zero(tmp_path: Path) -> None:
    """GPTQ's old exports have zeros for each module; of qwen2 the attention has biases that count."""
    folder, twin = write_quantized(tmp_path, "gptq asymmetric", "qwen2")
    save_file(load_file(folder / WEIGHTS) | {f"{MODULE}bias": torch.zeros(64)}, folder / WEIGHTS)
    wanted, bias = loaded(twin), "model.layers.0.self_attn.q_proj.bias"
    assert wanted[bias].any()
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)


def test_the_configuration_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "gptq asymmetric")
    config = json.loads((folder / "config.json").read_text())
    (folder / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (folder / "config.json").write_text(json.dumps(config))
    wanted = loaded(twin)
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)


def test_the_configuration_of_modelopt_may_be_in_a_file_of_its_own(tmp_path: Path) -> None:
    folder, twin = write_quantized(tmp_path, "modelopt fp8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    own = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": inner}
    (folder / "hf_quant_config.json").write_text(json.dumps(own))
    wanted = loaded(twin)
    for name, weight in loaded(folder).items():
        torch.testing.assert_close(weight, wanted[name], atol=1e-7, rtol=1e-6)


def test_modules_with_settings_of_their_own() -> None:
    """ModelOpt names modules with wildcards, AutoRound by name or regular expression."""
    quantization = parse_quantization(
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "exclude_modules": ["*.mlp.gate*", "model.layers.0.self_attn"],
        }
    )
    assert quantization.scheme_of("model.layers.3.mlp.gate_proj") is None
    assert quantization.scheme_of("model.layers.0.self_attn.q_proj") is None
    assert quantization.scheme_of("model.layers.1.self_attn.q_proj") is not None
    own = {"model.layers.0.mlp.up_proj": {"bits": 16}, r"model\.layers\.1\..*": {"bits": 8, "group_size": 64}}
    quantization = parse_quantization(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 128,
            "packing_format": "auto_round",
            "extra_config": own,
        }
    )
    assert quantization.scheme_of("model.layers.0.mlp.up_proj") is None
    eight, four = (quantization.scheme_of(f"model.layers.{number}.mlp.down_proj") for number in (1, 0))
    assert eight is not None
    assert four is not None
    assert (eight.codes, eight.group, four.codes, four.group) == ("int8", 64, "int4", 128)


def test_scales_that_float16_cannot_follow_are_refused(tmp_path: Path) -> None:
    """Weights of columns in an order of their own are dequantized at load, to the dtype of the model."""
    folder, _ = write_quantized(tmp_path, "gptq desc_act")
    tensors = load_file(folder / WEIGHTS)
    name = next(path for path in tensors if path.endswith(".scales"))
    tensors[name] = torch.full_like(tensors[name], 3e4)
    save_file(tensors, folder / WEIGHTS)
    spec = check_model(folder)
    with pytest.raises(ModelError, match=r"dequantized, has a number of size .* float16 holds none beyond 65504"):
        load_weights(folder, spec, allocate_parameters(spec, torch.float16, CPU))
    load_weights(folder, spec, allocate_parameters(spec, torch.bfloat16, CPU))
