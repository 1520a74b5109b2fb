"""Tensors read in pieces by several threads: every byte is at its position, and truncated files are named."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.engine.weights import tensor_reader
from tandem.engine.weights.safetensors_file import TensorEntry, read_header
from tandem.engine.weights.tensor_reader import read_tensors
from tandem.protocol.errors import ModelError

SHAPES = {"vector": (7,), "matrix": (33, 19), "long": (1001, 3), "single": (1,)}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses many pieces and more threads than cores."""
    monkeypatch.setattr(tensor_reader, "PIECE_BYTES", 56)
    monkeypatch.setattr(tensor_reader, "MAX_THREADS", 8)
    monkeypatch.setattr(tensor_reader.os, "sched_getaffinity", lambda _: range(8))


def write(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, TensorEntry]:
    """Two files of random tensors."""
    generator = torch.Generator().manual_seed(5)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    names, entries = list(tensors), {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors")
        entries |= read_header(folder / f"{number}.safetensors")
    return entries


def empty(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", tensor_reader.DTYPES.values(), ids=str)
def test_every_piece_arrives(stored: torch.dtype, wanted: torch.dtype, tmp_path: Path) -> None:
    entries, into = write(tmp_path, stored), empty(wanted)
    pieces: list[int] = []
    read_tensors(entries, into, pieces.append)
    exact = load_file(tmp_path / "0.safetensors") | load_file(tmp_path / "1.safetensors")
    for name, tensor in exact.items():
        assert torch.equal(into[name], tensor.to(wanted)), name
    assert sum(pieces) == sum(tensor.numel() for tensor in exact.values())
    assert max(pieces) == 56 // stored.itemsize


def test_views_into_a_stacked_tensor_are_filled_alone(tmp_path: Path) -> None:
    entries = write(tmp_path)
    stacked = torch.full((3, 33 + 2, 19), float("nan"))
    read_tensors({"matrix": entries["matrix"]}, {"matrix": stacked[1, :33]})
    assert torch.equal(stacked[1, :33], load_file(tmp_path / "1.safetensors")["matrix"])
    assert stacked[1, 33:].isnan().all()
    assert stacked[0].isnan().all()
    assert stacked[2].isnan().all()


def test_weights_may_be_allocated_for_inference(tmp_path: Path) -> None:
    with torch.inference_mode():
        into = empty(torch.float32)
        read_tensors(write(tmp_path), into)
        assert not any(tensor.isnan().any() for tensor in into.values())


def test_a_file_that_ends_early_is_named(tmp_path: Path) -> None:
    entries = write(tmp_path)
    file = tmp_path / "0.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"0\.safetensors ends early; download it again"):
        read_tensors(entries, empty(torch.float32))


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    entries = write(tmp_path)
    (tmp_path / "1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1\.safetensors cannot be read"):
        read_tensors(entries, empty(torch.float32))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32, torch.float64])
def test_numbers_beyond_float16_are_refused_by_name(tmp_path: Path, stored: torch.dtype) -> None:
    """Cast, they would be infinite, and every answer nonsense; the largest number that it holds is loaded."""
    tensors = {"fits": torch.full((70,), 65504.0), "weight": torch.ones(70)}
    tensors["weight"][69] = -70000.0
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    entries = read_header(tmp_path / "model.safetensors")
    into = {name: torch.empty(70, dtype=torch.float16) for name in tensors}
    if stored != torch.bfloat16:  # which rounds 65504 up
        read_tensors({"fits": entries["fits"]}, into)
        assert (into["fits"] == 65504).all()
    with pytest.raises(
        ModelError, match=r"safetensors: weight has a number of size .* use --dtype bfloat16 or"
    ) as caught:
        read_tensors(entries if stored != torch.bfloat16 else {"weight": entries["weight"]}, into)
    assert caught.value.message.endswith(".")
    wide = {name: torch.empty(70, dtype=torch.bfloat16) for name in tensors}
    read_tensors(entries, wide)
    assert wide["weight"][69] == torch.tensor(-70000.0).bfloat16()
