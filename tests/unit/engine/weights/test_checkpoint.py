"""Model folders: sharded or not, read directly into their tensors; broken ones refused with a message."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.models.allocation import allocate_parameters
from tandem.engine.models.families import slots_of
from tandem.engine.models.parameters import tensors_of
from tandem.engine.weights.checkpoint import check_model, load_weights, revision_hash, stored_dtype, weight_file_facts
from tandem.protocol.errors import ModelError
from tests.factories import write_tiny_model

Tensors = dict[str, torch.Tensor]
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny", "qwen2")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Tensors:
    config = check_model(folder)
    parameters = allocate_parameters(config, dtype, torch.device("cpu"))
    for _, tensor in tensors_of(parameters):
        tensor.fill_(float("nan"))
    load_weights(folder, config, parameters)
    # The stacked tensors themselves must have no hole left.
    assert not any(tensor.isnan().any() for _, tensor in tensors_of(parameters))
    return {name: slot.tensor for name, slot in slots_of(config, parameters).items()}


def shard(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / WEIGHTS).unlink()


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_every_tensor_arrives_in_its_place(folder: Path) -> None:
    wanted = load_file(folder / WEIGHTS)
    loaded = load(folder)
    assert loaded.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor), name


def test_shards_load_as_one(folder: Path) -> None:
    whole = load(folder)
    shard(folder)
    for name, tensor in load(folder).items():
        assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_are_cast_on_the_way(folder: Path, stored: torch.dtype) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    wanted = load_file(folder / WEIGHTS)
    assert stored_dtype(folder) == str(stored).removeprefix("torch.")
    for target in (torch.float32, torch.bfloat16):
        for name, tensor in load(folder, target).items():
            assert torch.equal(tensor, wanted[name].to(target))


def test_progress_ends_at_one(folder: Path) -> None:
    config = check_model(folder)
    seen: list[float] = []
    parameters = allocate_parameters(config, torch.float32, torch.device("cpu"))
    load_weights(folder, config, parameters, lambda stage, done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "smollm2")
    rewrite(
        folder,
        lambda tensors: tensors.update(
            {
                "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
            }
        ),
    )
    load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: [t.pop(f"model.layers.{i}.self_attn.q_proj.bias") for i in range(3)], "lacks .*q_proj.bias, "),
        (lambda t: [t.pop(name) for name in list(t)[:5]], "and 2 more"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.ones(2)}), r"has tensor model\.layers\.3"),
        (lambda t: t.update({"lm_head.weight": torch.ones(160, 32)}), r"lm_head\.weight .*\[160, 32\].*\[160, 64\]"),
        (lambda t: t.update({"lm_head.weight": torch.ones(160, 64, dtype=torch.int8)}), "stored as I8"),
    ],
)
def test_wrong_tensors_are_named(folder: Path, change: Callable[[Tensors], object], words: str) -> None:
    rewrite(folder, change)
    with pytest.raises(ModelError, match=words):
        check_model(folder)


def break_header(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-100]), "truncated"),
        (lambda f: f.write_bytes(f.read_bytes()[:30]), "truncated"),
        (lambda f: f.write_bytes(b""), "truncated"),
        (lambda f: f.write_bytes(f.read_bytes() + b"more"), "truncated or corrupt"),
        (lambda f: f.write_bytes(b"\xff" * 200), "no safetensors file"),
        (lambda f: break_header(f, b"{not json"), "corrupt"),
        (lambda f: break_header(f, b"[]"), "corrupt"),
        (lambda f: break_header(f, b'{"a": {"dtype": "F32"}}'), "corrupt"),
        (lambda f: break_header(f, b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 64]}}'), "do not match"),
    ],
)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], object], words: str) -> None:
    damage(folder / WEIGHTS)
    with pytest.raises(ModelError, match=words) as caught:
        check_model(folder)
    assert str(folder / WEIGHTS) in caught.value.message


def test_missing_files_are_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        check_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../../secret.safetensors"}}')
    with pytest.raises(ModelError, match="lacks"):
        check_model(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(ModelError, match=r"index\.json is corrupt"):
        check_model(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        check_model(folder)


def test_revision_changes_with_config_shapes_and_weights(folder: Path, tmp_path: Path) -> None:
    before = revision_hash(folder)
    assert revision_hash(write_tiny_model(tmp_path / "same", "qwen2")) == before
    assert revision_hash(write_tiny_model(tmp_path / "tuned", "qwen2", seed=1)) != before
    assert revision_hash(write_tiny_model(tmp_path / "wider", "qwen2", vocab_size=161)) != before
    (folder / "config.json").write_text((folder / "config.json").read_text().replace("10000", "20000"))
    assert revision_hash(folder) != before


def test_a_change_of_weights_in_place_changes_the_facts_of_the_files(folder: Path, tmp_path: Path) -> None:
    before = weight_file_facts(folder)
    assert [name for name, _ in before] == ["model.safetensors"]
    assert weight_file_facts(folder) == before
    file = folder / "model.safetensors"
    content, stat = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    # Where clocks are coarse, the test would have written within one tick.
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert weight_file_facts(folder) != before
    assert weight_file_facts(tmp_path / "random weights") == ()
