"""GGUF models in several files, which the gguf package divides as llama.cpp's gguf-split does."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import tokenizers
from transformers import AutoTokenizer

from tandem.engine.weights import gguf as conversion
from tandem.engine.weights.gguf import prepare_model, refuse_codes
from tandem.engine.weights.gguf_parts import model_name
from tandem.protocol.errors import ModelError
from tests.factories import write_tiny_model
from tests.small_tokenizer import TEXT, save_tokenizer
from tests.unit.engine.weights.gguf_files import split_gguf
from tests.unit.engine.weights.test_gguf import write_gguf

MOST = 14
"""Three files have the model's 35 tensors if each has at most as many as this."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a quantized model with a tokenizer."""
    folder = tmp_path_factory.mktemp("whole")
    save_tokenizer(folder)
    bpe = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    words = sorted(bpe["vocab"], key=bpe["vocab"].get), [" ".join(pair) for pair in bpe["merges"]]
    return write_gguf(folder / "tiny.gguf", "qwen3", kind_of=lambda _: gguf.GGMLQuantizationType.Q8_0, bpe=words)


def parts_of(whole: Path, folder: Path, most: int = MOST, *, metadata_first: bool = False) -> Path:
    """Returns the first of the parts of a file, to which a new folder is given."""
    folder.mkdir()
    copied = Path(shutil.copyfile(whole, folder / "tiny.gguf"))
    first = split_gguf(copied, most, metadata_first=metadata_first)
    copied.unlink()
    assert sorted(file.name for file in folder.iterdir()) == [f"tiny-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    return first


@pytest.fixture
def first(whole: Path, tmp_path: Path) -> Path:
    return parts_of(whole, tmp_path / "parts")


@pytest.mark.parametrize("metadata_first", [False, True])
def test_parts_are_converted_as_the_whole_file(whole: Path, tmp_path: Path, *, metadata_first: bool) -> None:
    first = parts_of(whole, tmp_path / "parts", 18 if metadata_first else MOST, metadata_first=metadata_first)
    wanted, actual = (prepare_model(file, tmp_path / "cache", codes=True) for file in (whole, first))
    assert wanted.parent != actual.parent
    assert wanted.name == actual.name == "tiny"
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        assert (actual / name).read_bytes() == (wanted / name).read_bytes(), name
    theirs = AutoTokenizer.from_pretrained(whole.parent, gguf_file=whole.name)
    ours = tokenizers.Tokenizer.from_file(str(actual / "tokenizer.json"))
    assert ours.encode(TEXT).ids == theirs(TEXT)["input_ids"]
    assert prepare_model(first.parent, tmp_path / "cache", codes=True) == actual
    for path in (first, first.parent):
        with pytest.raises(ModelError, match=r"is quantized already \(Q8_0\)"):
            refuse_codes(path)


def test_a_change_of_any_part_is_converted_again(first: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = prepare_model(first, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert", lambda *_args, **_named: pytest.fail("converted again"))
        assert prepare_model(first, tmp_path / "cache") == before
    last = first.with_name("tiny-00003-of-00003.gguf")
    os.utime(last, ns=(0, last.stat().st_mtime_ns + 1))
    assert prepare_model(first, tmp_path / "cache") != before


def remove(part: int) -> Callable[[Path, Path], None]:
    return lambda folder, _others: (folder / f"tiny-0000{part}-of-00003.gguf").unlink()


def replace(*parts: int) -> Callable[[Path, Path], None]:
    """Returns a function that puts parts of the same model, divided in another way, in place of its own."""

    def apply(folder: Path, others: Path) -> None:
        for part in parts:
            shutil.copyfile(*(path / f"tiny-0000{part}-of-00003.gguf" for path in (others, folder)))

    return apply


def swap(folder: Path, _others: Path) -> None:
    second, third = (folder / f"tiny-0000{part}-of-00003.gguf" for part in (2, 3))
    second.rename(folder / "saved")
    third.rename(second)
    (folder / "saved").rename(third)


def call_two_parts(folder: Path, _others: Path) -> None:
    remove(3)(folder, folder)
    for part in (1, 2):
        (folder / f"tiny-0000{part}-of-00003.gguf").rename(folder / f"tiny-0000{part}-of-00002.gguf")


def rename(folder: Path, _others: Path) -> None:
    (folder / "tiny-00001-of-00003.gguf").rename(folder / "tiny.gguf")
    remove(2)(folder, folder)
    remove(3)(folder, folder)


def take_another_model(folder: Path, _others: Path) -> None:
    other = parts_of(write_gguf(folder.parent / "other.gguf", "llama3"), folder.parent / "other")
    shutil.copyfile(other.with_name("tiny-00002-of-00003.gguf"), folder / "tiny-00002-of-00003.gguf")


def truncate(folder: Path, _others: Path) -> None:
    os.truncate(folder / "tiny-00003-of-00003.gguf", 3000)


def overwrite(folder: Path, _others: Path) -> None:
    (folder / "tiny-00002-of-00003.gguf").write_bytes(b"<!DOCTYPE html>")


def add_a_model(folder: Path, others: Path) -> None:
    shutil.copyfile(others / "tiny-00001-of-00003.gguf", folder / "b-00001-of-00003.gguf")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove(2), "lacks tiny-00002-of-00003.gguf of the 3 parts of the model"),
        (remove(1), "lacks tiny-00001-of-00003.gguf of the 3 parts of the model"),
        (swap, "tiny-00002-of-00003.gguf has split.no 2 instead of 1 in its metadata"),
        (call_two_parts, "tiny-00001-of-00002.gguf has split.count 3 instead of 2 in its metadata"),
        (rename, "tiny.gguf has split.count 3 instead of 1 in its metadata"),
        (take_another_model, "tiny-00002-of-00003.gguf has split.tensors.count 30 instead of 35 in its metadata"),
        (replace(2), "tiny-00002-of-00003.gguf has tensor blk.1.attn_norm.weight, as has a part before it"),
        (replace(1, 2), "its parts have 33 tensors, its metadata says 35"),
        (truncate, "part tiny-00003-of-00003.gguf: the file is truncated"),
        (overwrite, "tiny-00002-of-00003.gguf is not a GGUF file"),
        (add_a_model, "several GGUF models; name the file of one of them: b-00001-of-00003.gguf, tiny-00001-of-00003"),
    ],
)
def test_files_that_are_not_the_parts_of_one_model_are_refused(
    damage: Callable[[Path, Path], None], words: str, whole: Path, first: Path, tmp_path: Path
) -> None:
    others = parts_of(whole, tmp_path / "others", 13)
    damage(first.parent, others.parent)
    with pytest.raises(ModelError) as caught:
        prepare_model(first.parent, tmp_path / "cache")
    assert words in caught.value.message


def test_another_part_than_the_first_is_refused(first: Path, tmp_path: Path) -> None:
    for refuse in (lambda path: prepare_model(path, tmp_path / "cache"), refuse_codes):
        with pytest.raises(ModelError) as caught:
            refuse(first.with_name("tiny-00002-of-00003.gguf"))
        assert caught.value.message.endswith(f"is not the first part of its model; name that instead, {first}.")


def test_a_folder_with_safetensors_may_have_gguf_files(first: Path, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    shutil.copyfile(first, folder / first.name)
    assert prepare_model(folder, tmp_path / "cache") == folder


def test_the_name_of_a_model_has_no_number_of_a_part() -> None:
    names = {
        "a-00001-of-00012.gguf": "a",
        "a.gguf": "a",
        "a-00003-of-00002.gguf": "a-00003-of-00002",
        "a-1.gguf": "a-1",
    }
    assert {name: model_name(Path(name)) for name in names} == names
