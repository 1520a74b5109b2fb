"""Adapters that cannot be served: each is refused with the reason, before the model is loaded."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.engine.adapters import reader
from tandem.engine.adapters.load import check_adapters, load_adapters
from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.load_spec import load_spec
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.settings.parsing import NamedPath
from tests.adapters import ATTENTION, TinyAdapter, write_adapter
from tests.factories import tiny_engine_config, write_tiny_model
from tests.soak import soak

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def check(tmp_path: Path, adapter: Path, family: str = "llama3", **changes: Any) -> None:
    folder = write_tiny_model(tmp_path / "model", family)
    config = tiny_engine_config(folder, loras=(NamedPath("one", adapter),))
    check_adapters(replace(config, **changes), load_spec(folder))


def matrices(module: str = Q, rank: int = 4, n: int = 64, k: int = 64) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {f"{module}.lora_A.weight": (rank, k), f"{module}.lora_B.weight": (n, rank)}
    return {name: np.zeros(shape, dtype=np.float32) for name, shape in shapes.items()}


def test_one_that_fits(tmp_path: Path) -> None:
    check(tmp_path, TinyAdapter().write(tmp_path / "adapter"))


@pytest.mark.usefixtures("adapters_read_here")
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
        ({"lora_alpha": 10**400}, "not a finite number"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, "not a finite number"),
        ({"alpha_pattern": {"(" * 5000 + ")" * 5000: 1}}, "cannot be read as an adapter"),
        ({"revision": "x" * (1 << 20)}, "more than 1048576 bytes"),
        ({"r": 5}, "rank 5"),
        ({"alpha_pattern": {"[": 1}}, "regular expression"),
        ({"rank_pattern": [4]}, "no JSON object"),
    ],
)
def test_configs(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", matrices(), **({"r": 4, "lora_alpha": 8} | config))
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, adapter)


@pytest.mark.usefixtures("adapters_read_here")
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


@pytest.mark.usefixtures("adapters_read_here")
@pytest.mark.parametrize(("family", "module"), [("mixtral", "experts.1.w1"), ("deepseek_v2", "self_attn.q_a_proj")])
def test_experts_and_latents(family: str, module: str, tmp_path: Path) -> None:
    adapter = TinyAdapter(family, modules=(module,)).write(tmp_path / "adapter")
    with pytest.raises(ModelError, match="experts or latents"):
        check(tmp_path, adapter, family)


def truncate(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def with_header(described: tuple[str, list[float], list[int]], adapter: Path) -> None:
    """Writes a file with one tensor of this dtype, shape and range."""
    raw = json.dumps({f"{Q}.lora_A.weight": dict(zip(("dtype", "shape", "data_offsets"), described, strict=True))})
    (adapter / "adapter_model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw.encode() + bytes(8))


@pytest.mark.usefixtures("adapters_read_here")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda adapter: (adapter / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "cannot be read"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[]"), "cannot be read"),
        (lambda adapter: (adapter / "adapter_config.json").write_text("[" * 100_000), "cannot be read"),
        (truncate, "truncated or corrupt"),
        (partial(with_header, ("F32", [4, 0.5], [0, 8])), "no natural number"),
        (partial(with_header, ("F32", [2], [-8, 0])), "no natural number"),
        (partial(with_header, ("F32" * 400_000, [2], [0, 8])), "has a header of .* bytes, and the limit is 1048576"),
    ],
)
def test_files(spoil: Callable[[Path], object], reason: str, tmp_path: Path) -> None:
    adapter = TinyAdapter().write(tmp_path / "adapter")
    spoil(adapter)
    with pytest.raises(ModelError, match=reason):
        check(tmp_path, adapter)


@pytest.mark.parametrize("field", ["rank_pattern", pytest.param("alpha_pattern", marks=soak)])
def test_a_pattern_of_exponential_time_ends_at_a_limit(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process has computed for some seconds then, however long that took on a busy host."""
    monkeypatch.setattr(reader, "_CPU_S", 1)
    adapter = replace(TinyAdapter(), config={field: {"((.+)+)+!": 4}}).write(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"takes more than 1 s to read; simplify .* rank_pattern and alpha_pattern"):
        check(tmp_path, adapter)


def test_a_process_that_does_not_answer_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_WAIT_S", 0.0)
    with pytest.raises(ModelError, match="was not read within 0 s"):
        check(tmp_path, TinyAdapter().write(tmp_path / "adapter"))


def filled(number: float) -> dict[str, np.ndarray[Any, Any]]:
    return {name: matrix + np.float32(number) for name, matrix in matrices().items()}


def spoiled(name: str, number: float) -> dict[str, np.ndarray[Any, Any]]:
    tensors = matrices()
    tensors[f"{Q}.{name}.weight"][1, 2] = number
    return tensors


@pytest.mark.usefixtures("adapters_read_here")
@pytest.mark.parametrize(
    ("tensors", "alpha", "dtype"),
    [
        (filled(1.0), 1e308, torch.float32),
        (filled(1.0), 1e308, torch.bfloat16),
        (filled(1e30), 8, torch.float32),
        (spoiled("lora_A", float("nan")), 8, torch.float32),
        (spoiled("lora_A", float("inf")), 8, torch.bfloat16),
        (spoiled("lora_B", float("-inf")), 8, torch.float32),
    ],
)
def test_values_that_are_not_finite(tensors: dict[str, Any], alpha: float, dtype: torch.dtype, tmp_path: Path) -> None:
    """Also updates whose matrices are finite, and which are not."""
    folder = write_tiny_model(tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", tensors, r=4, lora_alpha=alpha)
    config, spec = tiny_engine_config(folder, loras=(NamedPath("one", adapter),)), load_spec(folder)
    with pytest.raises(ModelError, match=r"the update of model\.layers\.0\.self_attn\.q_proj has numbers"):
        load_adapters(config, spec, allocate_parameters(spec, dtype, torch.device("cpu")))


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
