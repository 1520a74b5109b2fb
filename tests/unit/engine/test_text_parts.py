"""The text parts of multimodal models against transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import StepBatch
from tests.factories import row, tiny_engine_config
from tests.ranks import group_runner

TOLERANCE = 2e-5
IDS = [(11 * position + 5) % 157 for position in range(40)]
TEXT: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
SECTIONS = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
QWEN_TOWER = {"depth": 1, "num_heads": 2, "in_channels": 3}
MODELS: dict[str, dict[str, Any]] = {
    "mistral3": {
        "text_config": TEXT | {"model_type": "ministral3", "head_dim": 16},
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        | {"num_attention_heads": 2},
    },
    "qwen2_vl": {
        "text_config": TEXT | {"rope_parameters": SECTIONS},
        "vision_config": QWEN_TOWER | {"embed_dim": 32, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | {"rope_parameters": SECTIONS},
        "vision_config": QWEN_TOWER | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64},
    },
    "qwen3_vl": {
        "text_config": TEXT | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}, "head_dim": 16},
        "vision_config": QWEN_TOWER
        | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
    "qwen3_vl_moe": {
        "text_config": TEXT
        | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}, "head_dim": 16, "tie_word_embeddings": False}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
        "vision_config": QWEN_TOWER
        | {"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    },
}


def write(folder: Path, model_type: str, **changes: Any) -> torch.Tensor:
    """Writes a model with random weights, and returns its logits of the text; `changes` override its text part."""
    torch.manual_seed(0)
    parts = MODELS[model_type]
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(model_type, **(parts | {"text_config": parts["text_config"] | changes})),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.1)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    # Published experts are transposed; transformers reads both forms.
    tensors = load_file(weights)
    transposed = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    save_file(tensors | transposed, weights, metadata={"format": "pt"})
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([IDS])).logits[0]
    return logits


def assert_same_logits(folder: Path, wanted: torch.Tensor) -> None:
    runner = ModelRunner.load(tiny_engine_config(folder))
    pages = list(range(-(-len(IDS) // 16)))
    runner.run(StepBatch([row(IDS[:21], 0, pages, drawn=False)]))
    for start, end in ((21, 30), (30, 40)):
        actual = runner.logits(StepBatch([row(IDS[start:end], start, pages)]))
        torch.testing.assert_close(actual[0], wanted[end - 1], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("intermediate", [32, 33])
def test_stacked_and_transposed_experts_are_divided_among_ranks(intermediate: int, tmp_path: Path) -> None:
    """Those of 33 elements are whole on a rank."""
    write(tmp_path, "qwen3_vl_moe", moe_intermediate_size=intermediate)
    config = tiny_engine_config(tmp_path)
    batch = StepBatch([row(IDS, 0, list(range(3)))])
    wanted = ModelRunner.load(config, kernels=ReferenceKernels()).logits(batch).clone()
    with group_runner(config, 2) as (runner, _):
        actual = runner.logits(batch)
        torch.testing.assert_close(actual, wanted, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("model_type", MODELS)
def test_logits_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    assert_same_logits(tmp_path, write(tmp_path, model_type))


def test_the_text_model_may_have_its_fields_beside_those_of_the_tower(tmp_path: Path) -> None:
    """As in published files of Qwen2-VL, whose tensors have the names of Qwen2's."""
    wanted = write(tmp_path, "qwen2_vl")
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": SECTIONS["mrope_section"]}
    flat = text | config | {"rope_theta": SECTIONS["rope_theta"], "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    weights = tmp_path / "model.safetensors"
    renames = {"model.language_model.": "model.", "model.visual.": "visual."}
    tensors = load_file(weights)
    for old, new in renames.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, weights)
    assert_same_logits(tmp_path, wanted)
