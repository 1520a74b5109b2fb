"""Rounding to nearest and the folders that are written: a plain reader finds the values that were meant."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tandem.engine.quantizer.quantize import QuantizationRecipe, quantize
from tandem.engine.quantizer.rtn import round_to_nearest
from tandem.engine.quantizer.scheme import SCHEMES, choose_group, parse_scheme
from tandem.protocol.errors import InvalidArgument, ModelError
from tests.factories import write_tiny_model
from tests.unit.engine.quantizer.plain_reader import read_plainly

CPU = torch.device("cpu")
QUANTIZING = [name for name, scheme in SCHEMES.items() if scheme.quantizes]
HALF_STEPS = {"w4a16": 2 / 15, "w4a16-asym": 2 / 15, "w8a16": 1 / 127, "w8a8": 1 / 127}
PRODUCT = "model.layers.0.mlp.down_proj.weight"


def _products(weights: dict[str, Tensor]) -> list[str]:
    return [name for name in weights if name.endswith("_proj.weight")]


@pytest.mark.parametrize("scheme", QUANTIZING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_bytes_are_the_values_meant(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    chosen = SCHEMES[scheme]
    written = quantize(folder, tmp_path / "out", QuantizationRecipe(chosen), device=CPU)
    tensors = read_plainly(tmp_path / "out")
    assert tensors.keys() == weights.keys()
    assert written.group == (32 if chosen.grouped else None)
    scales = torch.float32 if chosen.activations else dtype
    for name, weight in weights.items():
        meant = weight.float()
        if name in _products(weights):
            meant = round_to_nearest(meant, chosen, written.group, scales).values()
        assert torch.equal(tensors[name], meant), name


@pytest.mark.parametrize("scheme", HALF_STEPS)
def test_each_weight_is_within_half_a_step(scheme: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES[scheme]), device=CPU)
    weight, written = load_file(folder / "model.safetensors")[PRODUCT], read_plainly(tmp_path / "out")[PRODUCT]
    width = 32 if SCHEMES[scheme].grouped else weight.shape[1]
    groups, errors = (tensor.view(len(weight), -1, width) for tensor in (weight, (written - weight).abs()))
    reach = groups.abs().amax(-1)
    if not SCHEMES[scheme].symmetric:
        # The zero point is rounded, too: a code more may be needed than there is.
        reach = (groups.amax(-1) - groups.amin(-1)) * 1.01
    assert (errors.amax(-1) <= reach * HALF_STEPS[scheme] / 2 * 1.001 + 1e-7).all()


def test_e4m3_is_rounded_to_the_nearest() -> None:
    weight = torch.tensor([[448.0, 1.0625, 1.0624, -300.0]])
    quantized = round_to_nearest(weight, SCHEMES["fp8"], None, torch.float32)
    assert quantized.values().tolist() == [[448.0, 1.0, 1.0, -288.0]]


def test_a_group_of_zeros_stays_zero() -> None:
    for scheme in SCHEMES.values():
        group = 32 if scheme.grouped else None
        assert not round_to_nearest(torch.zeros(2, 64), scheme, group, torch.float16).values().any()


def test_the_configuration_is_that_of_compressed_tensors(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny", "qwen3_moe")
    (folder / "tokenizer.json").write_text("{}")
    quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["w4a16-asym"]), device=CPU)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    stored = load_file(tmp_path / "out" / "model.safetensors")
    quantization = config.pop("quantization_config")
    assert config == json.loads((folder / "config.json").read_text())
    assert quantization["format"] == "pack-quantized"
    assert quantization["ignore"] == ["lm_head", *(f"model.layers.{number}.mlp.gate" for number in range(3))]
    (group,) = quantization["config_groups"].values()
    assert group["weights"]["group_size"] == 32
    assert group["input_activations"] is None
    base = "model.layers.1.mlp.experts.3.up_proj.weight"
    shapes = {name.removeprefix(base): tuple(tensor.shape) for name, tensor in stored.items() if name.startswith(base)}
    assert shapes == {"_packed": (32, 8), "_scale": (32, 2), "_shape": (2,), "_zero_point": (4, 2)}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_large_models_are_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    monkeypatch.setattr("tandem.engine.quantizer.folder_writer._SHARD_BYTES", 100_000)
    written = quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["w8a8"]), device=CPU)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == written.written_bytes
    assert read_plainly(tmp_path / "out").keys() == load_file(folder / "model.safetensors").keys()


def test_tokenizers_with_code_and_templates_are_copied(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "additional_chat_templates").mkdir()
    kept = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "tokenization_tiny.py", "tokenizer.json"]
    for name in (*kept, "modeling_tiny.py", "README.md"):
        (folder / name).write_text(name)
    quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["w8a8"]), device=CPU)
    files = [file.relative_to(tmp_path / "out") for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert sorted(map(str, files)) == sorted([*kept, "config.json", "model.safetensors"])
    assert (tmp_path / "out" / kept[0]).read_text() == kept[0]


@pytest.mark.parametrize("place", ["save_file", "shutil.copyfile"])
def test_a_full_disk_is_said_in_a_sentence(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    folder = write_tiny_model(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(f"tandem.engine.quantizer.folder_writer.{place}", full)
    with pytest.raises(InvalidArgument, match=r"out cannot be written: .*No space left on device\."):
        quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["w8a8"]), device=CPU)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny"]


@pytest.mark.parametrize(
    ("family", "reason"), [("deepseek_v2", "latent attention"), ("gpt_oss", "experts that are stored stacked")]
)
def test_what_cannot_be_quantized_is_refused(family: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        quantize(
            write_tiny_model(tmp_path / "tiny", family),
            tmp_path / "out",
            QuantizationRecipe(SCHEMES["fp8"]),
            device=CPU,
        )
    assert not (tmp_path / "out").exists()


def test_settings_that_cannot_be_met_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    with pytest.raises(InvalidArgument, match="64, 96 inputs, which groups of 64 do not divide"):
        quantize(folder, tmp_path / "out", QuantizationRecipe(SCHEMES["w4a16"], group_size=64), device=CPU)
    with pytest.raises(InvalidArgument, match="one scale for each output"):
        choose_group(SCHEMES["fp8"], 64, {64})
    with pytest.raises(InvalidArgument, match="use w4a16, w4a16-asym"):
        parse_scheme("w3a16")
    with pytest.raises(InvalidArgument, match="exists"):
        quantize(folder, folder, QuantizationRecipe(SCHEMES["w4a16"]), device=CPU)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["tiny"]
