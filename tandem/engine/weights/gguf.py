"""Converts a GGUF model once into a model folder in the user's cache, so that the engine has only one loader.

All weights become float32. With `codes`, tensors of the types in `GGUF_SCHEMES` keep their quantized blocks instead.
"""

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import GGML_QUANT_SIZES, ReaderTensor, dequantize

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import parse_spec
from tandem.engine.models.quantization_config import GGUF_SCHEMES
from tandem.engine.user_cache import user_cache
from tandem.engine.weights.checkpoint import Progress, check_model
from tandem.engine.weights.gguf_architectures import architecture_of
from tandem.engine.weights.gguf_config import (
    LONGROPE_FACTORS,
    ROPE_FACTORS,
    eos_token_ids,
    huggingface_config,
    huggingface_name,
    layer_of,
)
from tandem.engine.weights.gguf_layout import Architecture, Join, Metadata
from tandem.engine.weights.gguf_parts import gguf_files, model_name
from tandem.engine.weights.gguf_reader import open_gguf
from tandem.engine.weights.safetensors_file import write_tensors
from tandem.protocol.errors import ModelError

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_VERSION = b"5"
"""A part of the cache key, which is changed when the converter's output changes, so that old folders are not used."""
_DTYPE = "bfloat16"
"""The dtype of activations and KV of a quantized model on GPUs, because the file does not state one."""
_HASHED_BYTES = 1 << 20
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}
"""The GGUF types of weights that are not quantized."""


def prepare_model(
    path: Path, cache_dir: Path | None = None, progress: Progress | None = None, *, codes: bool = False
) -> Path:
    """Return a checked folder in Hugging Face layout: `path` itself if it is one, or the converted GGUF model.

    `path` may be a GGUF file, the first part of several, or a folder that holds them. With `codes`, the converted
    folder keeps the quantized codes, which only Tandem can read; otherwise all weights are float32. The folder is below
    `cache_dir` (by default tandem/models in the XDG cache folder), has the name of the file, and appears there
    atomically. Raises ModelError for anything that cannot be served.
    """
    files = gguf_files(path)
    if not files:
        check_model(path)
        return path
    if not files[0].is_file():
        raise ModelError(
            f"{path} does not exist; give a folder in Hugging Face layout, a GGUF file, or "
            "ORG/NAME of a repository on the Hugging Face Hub."
        )
    # Windows does not have it; `tandem plan` there imports this module, too.
    import fcntl

    home = (cache_dir or default_cache()) / _fingerprint(files, codes=codes)
    folder = home / model_name(files[0])
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            # Two simultaneous starts must not convert twice: the second waits for the first.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_sound(folder):
                _convert(files, folder, progress, codes=codes)
    except OSError as error:
        raise ModelError(f"{path} cannot be converted into {folder}: {error}.") from error
    return folder


def refuse_codes(path: Path) -> None:
    """Raise ModelError if a GGUF model has quantized weights, which would lose much accuracy if quantized again.

    Only the headers are read. Other problems with the path are reported by `prepare_model`.
    """
    files = gguf_files(path)
    if not files or not all(file.is_file() and _beginning(file).startswith(_MAGIC) for file in files):
        return
    try:
        types = {str(tensor.tensor_type.name) for tensor in open_gguf(files).tensors.values()} - _PLAIN_TYPES
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from error
    if types:
        raise ModelError(
            f"{path} is quantized already ({', '.join(sorted(types))}); quantize the model it was made from, or serve"
            " the file as it is."
        )


def default_cache() -> Path:
    """Return the folder that keeps converted models."""
    return user_cache("models")


def _fingerprint(files: Sequence[Path], *, codes: bool) -> str:
    """Return a name for the conversion of a GGUF model, from each file's size, modification time and first MiB."""
    digest = hashlib.blake2b(_VERSION + (b" codes" if codes else b""), digest_size=8)
    for file in files:
        status = file.stat()
        start = _beginning(file)
        if not start.startswith(_MAGIC):
            raise ModelError(f"{file} is not a GGUF file; give a GGUF file or a folder in Hugging Face layout.")
        digest.update(f"{status.st_size} {status.st_mtime_ns}".encode())
        digest.update(start)
    return digest.hexdigest()


def _beginning(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_HASHED_BYTES)


def _is_sound(folder: Path) -> bool:
    """Return True if `folder` has a complete conversion, not one that a full disk or a power cut interrupted."""
    if not folder.is_dir():
        return False
    try:
        check_model(folder)
    except ModelError:
        return False
    return True


def _convert(files: Sequence[Path], folder: Path, progress: Progress | None, *, codes: bool) -> None:
    """Write a hidden folder next to `folder`, then rename it.

    Leftover hidden folders are removed first; no process uses them, because the caller holds the lock.
    """
    for leftover in [*folder.parent.glob(".partial-*"), folder]:
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        _write_folder(files, partial, progress, codes=codes)
        check_model(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except ModelError as error:
        raise ModelError(f"{files[0]}: {error.message}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the converted checkpoint."""

    dtype: str
    """The safetensors dtype: U8 for quantized blocks, else F32."""
    shape: tuple[int, ...]
    read: Callable[[], Float32 | Bytes]
    """Reads the file and returns the tensor."""
    elements: int
    """The number of the file's elements from which the tensor is computed."""
    blocks: str | None = None
    """The type of the quantized blocks; None = F32."""


@dataclass(frozen=True, slots=True)
class _GgufCheckpoint:
    """A GGUF model as a checkpoint in Hugging Face layout: its configuration, and its tensors by name."""

    config: dict[str, Any]
    generation: dict[str, Any]
    outputs: dict[str, _Output]
    tokens: list[str]

    @classmethod
    def read(cls, files: Sequence[Path], *, codes: bool) -> "_GgufCheckpoint":
        """Read the headers of the files. Raises ModelError for a model that cannot be served."""
        model = open_gguf(files)
        read, tensors = model.read, model.tensors
        if "token_embd.weight" not in tensors:
            raise ModelError("it has no token embedding; convert the model to GGUF again.")
        architecture, layers = architecture_of(read), Metadata(read).layers
        factors = {
            name: _dequantize(tensors.pop(name)) for name in (ROPE_FACTORS, *LONGROPE_FACTORS) if name in tensors
        }
        tensors = {name: tensor for name, tensor in tensors.items() if (layer_of(name) or 0) < layers}
        vocab_size = int(tensors["token_embd.weight"].shape[1])
        config = huggingface_config(read, vocab_size, tensors, factors)
        outputs = _outputs(tensors, architecture, config, codes=codes)
        if types := _modules_by_type(outputs):
            config |= {"quantization_config": {"quant_method": "gguf", "types": types}, "torch_dtype": _DTYPE}
        generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos_token_ids(read) or None}
        return cls(config, generation, outputs, read("tokenizer.ggml.tokens") or [])


def gguf_spec(files: Sequence[Path]) -> ModelSpec:
    """Return the spec of a GGUF model, as it is served, from the headers of its files (`gguf_files`).

    Raises ModelError for a model that cannot be served.
    """
    try:
        checkpoint = _GgufCheckpoint.read(files, codes=True)
        return parse_spec(checkpoint.config, checkpoint.generation)
    except ModelError as error:
        raise ModelError(f"{files[0]}: {error.message}") from error


def _write_folder(files: Sequence[Path], folder: Path, progress: Progress | None, *, codes: bool) -> None:
    checkpoint = _GgufCheckpoint.read(files, codes=codes)
    parse_spec(checkpoint.config, checkpoint.generation)  # raises before anything is written
    outputs = checkpoint.outputs
    (folder / "config.json").write_text(json.dumps(checkpoint.config, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation, indent=2), encoding="utf-8")
    described = {name: (output.dtype, output.shape) for name, output in outputs.items()}
    write_tensors(folder / "model.safetensors", described, _weights(outputs.values(), progress))
    _write_tokenizer(files[0], folder, checkpoint.tokens, progress)


def _modules_by_type(outputs: Mapping[str, _Output]) -> dict[str, list[str]]:
    """Return the names of the modules of quantized weights for each block type."""
    by_type: dict[str, list[str]] = {}
    for name, output in outputs.items():
        if output.blocks is not None:
            by_type.setdefault(output.blocks, []).append(name.removesuffix(".weight"))
    return {kind: sorted(modules) for kind, modules in sorted(by_type.items())}


def _outputs(
    tensors: Mapping[str, ReaderTensor], architecture: Architecture, config: dict[str, Any], *, codes: bool
) -> dict[str, _Output]:
    """Return the tensors of the converted checkpoint by name. With `codes`, quantized blocks are kept if possible."""
    outputs: dict[str, _Output] = {}
    joined: set[str] = set()
    for number in range(int(config["num_hidden_layers"])):
        for join in architecture.joins:
            names = [f"blk.{number}.{name}" for name in join.inputs]
            if all(name in tensors for name in names):
                outputs[f"{architecture.layers}{number}.{join.name}"] = _joined(
                    join, [tensors[name] for name in names], codes=codes
                )
                joined.update(names)
    for name, tensor in tensors.items():
        if name in joined:
            continue
        target = huggingface_name(name, architecture)
        if "{}" in target:
            for expert in range(int(config["num_experts"])):
                outputs[target.format(expert)] = _copied(tensor, tensor.data[expert], None, codes=codes)
        else:
            outputs[target] = _copied(tensor, tensor.data, _change(name, architecture, config), codes=codes)
    return outputs


def _joined(join: Join, tensors: list[ReaderTensor], *, codes: bool) -> _Output:
    kind, *others = {tensor.tensor_type for tensor in tensors}
    whole = join.moved_columns % GGML_QUANT_SIZES[kind][0] == 0
    if codes and join.join_blocks is not None and not others and kind.name in GGUF_SCHEMES and whole:
        return _joined_blocks(join.join_blocks, tensors, str(kind.name))
    # GGUF lists dimensions from the fastest-varying one, safetensors from the slowest-varying one.
    shapes = [tuple(map(int, tensor.shape[::-1])) for tensor in tensors]
    shape = tuple(join.compute(*(torch.empty(shape, device="meta") for shape in shapes)).shape)

    def read() -> Float32:
        weights = (torch.tensor(_dequantize(tensor)) for tensor in tensors)
        result: Float32 = join.compute(*weights).numpy()
        return result

    return _Output("F32", shape, read, sum(int(tensor.n_elements) for tensor in tensors))


def _joined_blocks(join: Callable[..., torch.Tensor], tensors: list[ReaderTensor], kind: str) -> _Output:
    shape = tuple(join(*(torch.empty(tensor.data.shape, device="meta") for tensor in tensors)).shape)

    def read() -> Bytes:
        result: Bytes = join(*(torch.tensor(tensor.data) for tensor in tensors)).numpy()
        return result

    return _Output("U8", shape, read, math.prod(shape), kind)


def _copied(
    tensor: ReaderTensor,
    data: npt.NDArray[Any],
    change: Callable[[Float32 | Bytes], Float32 | Bytes] | None,
    *,
    codes: bool,
) -> _Output:
    """Return the output of a tensor, or of the part `data` of it, whose values `change` may reorder or shift."""
    kind = str(tensor.tensor_type.name)
    kept = codes and kind in GGUF_SCHEMES and tensor.name.endswith(".weight") and data.ndim == 2
    block_size, type_size = GGML_QUANT_SIZES[tensor.tensor_type]
    columns = data.shape[-1] if kept else data.shape[-1] * data.itemsize // type_size * block_size

    def read() -> Float32 | Bytes:
        weight: Float32 | Bytes = data if kept else _dequantize(tensor, data)
        return weight if change is None else change(weight)

    shape = (*map(int, data.shape[:-1]), int(columns))
    return _Output("U8" if kept else "F32", shape, read, math.prod(shape), kind if kept else None)


def _change(
    name: str, architecture: Architecture, config: dict[str, Any]
) -> Callable[[Float32 | Bytes], Float32 | Bytes] | None:
    """Return the function that reverts what the converter did to a tensor; None if it did nothing."""
    if architecture.permuted and ".attn_q." in name:
        return lambda weight: _unpermute(weight, config["num_attention_heads"])
    if architecture.permuted and ".attn_k." in name:
        return lambda weight: _unpermute(weight, config["num_key_value_heads"])
    if architecture.norms_plus_one and name.endswith("norm.weight"):
        return lambda weight: weight - 1
    return None


def _weights(outputs: Collection[_Output], progress: Progress | None) -> Iterator[Float32 | Bytes]:
    total = sum(output.elements for output in outputs)
    done = 0
    for output in outputs:
        yield output.read()
        done += output.elements
        if progress is not None:
            progress("converting weights", done / total)


def _dequantize(tensor: ReaderTensor, part: npt.NDArray[Any] | None = None) -> Float32:
    """Return the values of a tensor, or of the part `part` of its data."""
    try:
        weight: Float32 = dequantize(tensor.data if part is None else part, tensor.tensor_type)
        return weight.astype(np.float32, copy=False)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"tensor {tensor.name} is stored as {kind}, which cannot be dequantized.") from error


def _unpermute(weight: Float32 | Bytes, heads: int) -> Float32 | Bytes:
    """Reorder the q and k rows of Llama as checkpoints store them.

    GGUF stores the two rows of a RoPE pair next to each other; checkpoints store all first rows of a head, then all
    second rows.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(path: Path, folder: Path, tokens: list[str], progress: Progress | None) -> None:
    if progress is not None:
        progress("converting the tokenizer; loading transformers takes some seconds, once for a file", 0.0)
    try:
        # The chat template goes into tokenizer_config.json, which every reader reads.
        _tokenizer(path, tokens).save_pretrained(folder, save_jinja_files=False)
    except ModelError:
        raise
    # Code of another library may fail in any way on an unknown file.
    except Exception as error:
        raise ModelError(f"its tokenizer cannot be converted ({error}).") from error
    if progress is not None:
        progress("checking the converted files", 1.0)


def _tokenizer(path: Path, tokens: list[str]) -> Any:
    """Return the tokenizer that transformers makes of a file, or else the one in the same folder.

    `tokens` are the file's tokens, with which the tokenizer in the folder must agree.
    """
    # Imported here, because it takes seconds and only conversions need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:
        if not (path.parent / "tokenizer.json").is_file():
            raise ModelError(
                f"its tokenizer cannot be converted ({error}); put tokenizer.json and tokenizer_config.json of the"
                " model from which it was made into its folder."
            ) from error
    tokenizer = AutoTokenizer.from_pretrained(path.parent)
    # Files list unused ids after the tokenizer's last token.
    known = tokenizer.convert_ids_to_tokens(list(range(min(len(tokenizer), len(tokens)))))
    if not known or known != tokens[: len(known)]:
        raise ModelError(f"{path.parent / 'tokenizer.json'} has other tokens than the file; it is of another model.")
    return tokenizer
