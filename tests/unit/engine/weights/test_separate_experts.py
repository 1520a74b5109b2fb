"""Checkpoints that store each expert by itself, of families whose 16-bit checkpoints stack the experts of a layer."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters, weight_bytes
from tandem.engine.models.load_spec import load_spec
from tandem.engine.models.parameters import named_weights
from tandem.engine.weights.checkpoint import check_model
from tandem.protocol.errors import ModelError
from tests.factories import tiny_engine_config, write_tiny_model
from tests.unit.engine.parallel.test_ranks import assert_same_logits
from tests.unit.engine.parallel.test_ranks import logits_of as runner_logits
from tests.unit.engine.weights.quantized_folders import WEIGHTS, Tensors, quantize_folder

STACKS = (
    *("experts.gate_up_proj", "experts.down_proj", "experts.gate_up_proj_bias", "experts.down_proj_bias"),
    *("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
WIDTH = {"moe_intermediate_size": 64}
QWEN = WIDTH | {"shared_expert_intermediate_size": 64}


def single_experts(family: str, tensors: Tensors) -> Tensors:
    """Returns the matrices and biases of each expert by their names, as views of the stacked tensors."""
    views = {}
    for name, stack in tensors.items():
        if not name.endswith(STACKS):
            continue
        prefix, kind = re.split(r"experts\.|(?=input_linear|output_linear)", name)
        end = "bias" if kind.endswith("_bias") else "weight"
        transposed = end == "weight" and family in {"llama4", "gpt_oss"}
        for number, stored in enumerate(stack):
            expert = stored.t() if transposed else stored
            if "down" in kind or "output" in kind:
                views[f"{prefix}experts.{number}.down_proj.{end}"] = expert
                continue
            gate, up = (expert[0::2], expert[1::2]) if family == "gpt_oss" else expert.chunk(2)
            parts = {"gate": gate, "up": up}
            views |= {f"{prefix}experts.{number}.{part}_proj.{end}": values for part, values in parts.items()}
    assert views
    return views


def write_separate(folder: Path, family: str, **changes: Any) -> tuple[Path, Path]:
    """Writes a folder with separate experts, and one with the same weights in the family's own layout."""
    stacked = write_tiny_model(folder / "stacked", family, **changes)
    separate = folder / "separate"
    shutil.copytree(stacked, separate)
    tensors = load_file(stacked / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(STACKS)}
    single = {name: view.contiguous().clone() for name, view in single_experts(family, tensors).items()}
    save_file(kept | single, separate / WEIGHTS)
    return separate, stacked


def keep_inputs(folder: Path) -> None:
    """Changes the config so that the inputs of products are not rounded, as the dequantized model's are not."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].pop("activation_scheme", None)
    (folder / "config.json").write_text(json.dumps(config))


def logits_of(folder: Path) -> list[torch.Tensor]:
    config = tiny_engine_config(folder, kv_cache_bytes=8 << 20)
    return runner_logits(ModelRunner.load(config, kernels=ReferenceKernels()))


@pytest.mark.parametrize(
    ("family", "case", "changes"),
    [
        ("qwen3_5_moe", "deepseek fp8", QWEN),
        ("qwen3_5_moe", "W4A16", QWEN),
        ("gemma4_experts", "nvfp4-pack-quantized", WIDTH),
        ("mistral4", "awq", WIDTH | {"q_lora_rank": 64, "v_head_dim": 32, "qk_nope_head_dim": 16}),
        ("llama4", "W4A16", {"intermediate_size": 64}),
        ("gpt_oss", "W8A16", {}),
        ("granitemoehybrid_experts", "fp8 channel", {"intermediate_size": 64, "shared_intermediate_size": 64}),
    ],
)
def test_logits_are_those_of_the_dequantized_values(
    family: str, case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    separate, stacked = write_separate(tmp_path, family, **changes)
    quantized = quantize_folder(separate, tmp_path / "quantized", case)
    keep_inputs(quantized)
    values, tensors = load_file(separate / WEIGHTS), load_file(stacked / WEIGHTS)
    tensors |= {name: values[name] for name in tensors.keys() & values.keys()}
    for name, view in single_experts(family, tensors).items():
        view.copy_(values[name])
    save_file(tensors, stacked / WEIGHTS)
    wanted = logits_of(stacked)
    for folder in (separate, quantized):
        torch.testing.assert_close(logits_of(folder), wanted, atol=2e-5, rtol=2e-5)
    spec = check_model(quantized)
    packed = {
        path.rpartition(".")[2]
        for path, weight in named_weights(allocate_parameters(spec, torch.float32, torch.device("cpu")))
        if isinstance(weight, PackedWeight) and len(weight.shape) > 2
    }
    assert packed == {"gate_up", "down"}
    # What is known from config.json alone, for example to plan, counts experts as quantized, too.
    assert weight_bytes(load_spec(quantized), torch.float32) <= weight_bytes(spec, torch.float32)


@pytest.mark.parametrize(("family", "changes"), [("gpt_oss", {}), ("gpt_oss", {"intermediate_size": 33})])
def test_ranks_divide_separate_experts(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """With an odd width each rank has whole experts, whose biases are added once."""
    separate, _ = write_separate(tmp_path, family, **changes)
    assert_same_logits(tiny_engine_config(separate, kv_cache_bytes=8 << 20), 2)


@pytest.mark.parametrize(
    ("left_out", "words"),
    [
        (".experts.", "lacks tensor model.layers.0.mlp.experts.gate_up_proj"),
        ("layers.2.mlp.experts.5.up_proj.", "lacks tensor model.layers.2.mlp.experts.5.up_proj.weight"),
        ("layers.2.mlp.experts.5.up_proj.weight_scale_inv", "lacks tensor model.layers.2.mlp.experts.5.up_proj.weight"),
    ],
)
def test_a_checkpoint_without_all_experts_is_refused(left_out: str, words: str, tmp_path: Path) -> None:
    separate, _ = write_separate(tmp_path, "qwen3_5_moe", **QWEN)
    quantized = quantize_folder(separate, tmp_path / "quantized", "deepseek fp8")
    tensors = {name: tensor for name, tensor in load_file(quantized / WEIGHTS).items() if left_out not in name}
    save_file(tensors, quantized / WEIGHTS)
    with pytest.raises(ModelError) as refused:
        check_model(quantized)
    assert words in refused.value.message


def test_experts_in_both_layouts_are_refused(tmp_path: Path) -> None:
    separate, stacked = write_separate(tmp_path, "qwen3_5_moe")
    save_file(load_file(stacked / WEIGHTS) | load_file(separate / WEIGHTS), separate / WEIGHTS)
    with pytest.raises(ModelError, match=r"has tensor model.layers.0.mlp.experts.\w+, .* and 5 more, which a model of"):
        check_model(separate)


def test_stacked_experts_of_16_bits_in_a_quantized_checkpoint(tmp_path: Path) -> None:
    """The layers' other weights are quantized, because the tool did not see experts in the stacked tensors."""
    stacked = write_tiny_model(tmp_path / "stacked", "qwen3_5_moe", **QWEN)
    quantized = quantize_folder(stacked, tmp_path / "quantized", "W4A16")
    torch.testing.assert_close(logits_of(quantized), logits_of(stacked), atol=2e-5, rtol=2e-5)


def test_a_multimodal_checkpoint_has_separate_experts(tmp_path: Path) -> None:
    separate, stacked = write_separate(tmp_path, "qwen3_5_moe")
    config = {"text_config": json.loads((separate / "config.json").read_text()), "vision_config": {"depth": 1}}
    config["architectures"] = ["Qwen3_5MoeForConditionalGeneration"]
    (separate / "config.json").write_text(json.dumps(config))
    tensors = load_file(separate / WEIGHTS)
    save_file(
        {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()},
        separate / WEIGHTS,
    )
    torch.testing.assert_close(logits_of(separate), logits_of(stacked), atol=2e-5, rtol=2e-5)
