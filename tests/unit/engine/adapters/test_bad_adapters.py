"""Adapters that cannot be served: each is refused with the reason, before the model is loaded."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.adapters.load import check_adapters
from engine.config import AdapterSource
from engine.models.load_spec import load_spec
from tests.adapters import ATTENTION, TinyAdapter, write_adapter
from tests.factories import tiny_engine_config, write_tiny_model
from wire.errors import InvalidArgument, ModelError

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def check(tmp_path: Path, adapter: Path, family: str = "llama3", **changes: Any) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    config = tiny_engine_config(folder, adapters=(AdapterSource("one", adapter),))
    check_adapters(replace(config, **changes), load_spec(folder))


def matrices(module: str = Q, rank: int = 4, n: int = 64, k: int = 64) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {f"{module}.lora_A.weight": (rank, k), f"{module}.lora_B.weight": (n, rank)}
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_one_that_fits(tmp_path: Path) -> None:
    check(tmp_path, TinyAdapter().write(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "only LORA"),
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"init_lora_weights": "pissa_niter_4"}, "base model"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"r": 5}, "rank 5"),
        ({"alpha_pattern": {"[": 1}}, "regular expression"),
        ({"rank_pattern": [4]}, "no JSON object"),
    ],
)
def test_configs(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", matrices(), **({"r": 4, "lora_alpha": 8} | config))
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, adapter)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        (matrices(n=32), r"shape \[32, 64\]; the model's has \[64, 64\]"),
        (matrices(k=32), "shape"),
        (matrices(Q.replace("layers.0", "layers.9")), "lacks"),
        (matrices("base_model.model.model.layers.0.mlp.fc1"), "lacks"),
        (matrices("base_model.model.lm_head", n=160), "not of embeddings"),
        ({f"{Q}.lora_magnitude_vector": np.zeros(64, np.float32)}, "only lora_A and lora_B"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.zeros((4, 160), np.float32)}, "only lora_A"),
        ({f"{Q}.lora_A.weight": np.zeros((4, 64), np.float32)}, "only one of"),
        (matrices(rank=4) | {f"{Q}.lora_B.weight": np.zeros((64, 3), np.float32)}, "outputs, rank"),
        ({}, "no tensors"),
    ],
)
def test_tensors(tensors: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, write_adapter(tmp_path / "adapter", tensors, r=4, lora_alpha=8))


@pytest.mark.parametrize(("family", "module"), [("mixtral", "experts.1.w1"), ("deepseek_v2", "self_attn.q_a_proj")])
def test_experts_and_latents(family: str, module: str, tmp_path: Path) -> None:
    adapter = TinyAdapter(family, modules=(module,)).write(tmp_path / "adapter")
    with pytest.raises(ModelError, match="experts or latents"):
        check(tmp_path, adapter, family)


def truncate(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), "cannot be read"),
        (truncate, "truncated or corrupt"),
    ],
)
def test_files(spoil: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    adapter = TinyAdapter().write(tmp_path / "adapter")
    spoil(adapter)
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, adapter)


def test_limits(tmp_path: Path) -> None:
    adapter = TinyAdapter(rank=9).write(tmp_path / "adapter")
    check(tmp_path, adapter, max_lora_rank=9)
    with pytest.raises(InvalidArgument, match=r"max_lora_rank: is 8, and the adapter in .* has rank 9"):
        check(tmp_path, adapter, max_lora_rank=8)
    with pytest.raises(InvalidArgument, match="max_loras: is 0"):
        check(tmp_path, adapter, max_loras=0)


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is no adapter"):
        check(tmp_path, tmp_path / "nothing")


def test_what_peft_writes_is_read(tmp_path: Path) -> None:
    """Fields that peft adds with values that mean nothing are no reason to refuse."""
    adapter = TinyAdapter(modules=ATTENTION)
    more = {"use_dora": False, "modules_to_save": None, "layer_replication": None, "init_lora_weights": True}
    folder = replace(adapter, config=more | {"target_modules": ["q_proj"], "revision": None}).write(tmp_path / "a")
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 4
    check(tmp_path, folder)
