"""Converts a GGUF file once into a model folder in the user's cache, so that the engine has only one loader.

All weights become float32. With `codes`, tensors of the types in `GGUF_SCHEMES` keep their quantized blocks instead.
"""

import fcntl
import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, ReaderField, ReaderTensor, dequantize

from tandem.engine.models.load_spec import parse_spec
from tandem.engine.models.quantization_config import GGUF_SCHEMES
from tandem.engine.user_cache import user_cache
from tandem.engine.weights.checkpoint import Progress, check_model
from tandem.engine.weights.gguf_config import ROPE_FACTORS, eos_token_ids, huggingface_config, huggingface_name
from tandem.engine.weights.safetensors_file import write_tensors
from tandem.protocol.errors import ModelError

Float32 = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_MAGIC = b"GGUF"
_VERSION = b"1"
"""A part of the cache key, which is changed when the converter's output changes, so that old folders are not used."""
_DTYPE = "bfloat16"
"""The dtype of activations and KV of a quantized model on GPUs, because the file does not state one."""
_HASHED_BYTES = 1 << 20
_PLAIN_TYPES = {"F64", "F32", "F16", "BF16"}
"""The GGUF types of weights that are not quantized."""


def prepare_model(
    path: Path, cache_dir: Path | None = None, progress: Progress | None = None, *, codes: bool = False
) -> Path:
    """Return a checked folder in Hugging Face layout: `path` itself if it is a folder, or the converted GGUF file.

    With `codes`, the converted folder keeps the file's quantized codes, which only Tandem can read; otherwise all
    weights are float32. The folder is below `cache_dir` (by default tandem/models in the XDG cache folder), has the
    name of the file, and appears there atomically. Raises ModelError for anything that cannot be served.
    """
    if path.is_dir():
        check_model(path)
        return path
    if not path.is_file():
        raise ModelError(
            f"{path} does not exist; give a folder in Hugging Face layout, a GGUF file, or "
            "ORG/NAME of a repository on the Hugging Face Hub."
        )
    home = (cache_dir or default_cache()) / _fingerprint(path, codes=codes)
    folder = home / path.stem
    try:
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            # Two simultaneous starts must not convert twice: the second waits for the first.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_sound(folder):
                _convert(path, folder, progress, codes=codes)
    except OSError as error:
        raise ModelError(f"{path} cannot be converted into {folder}: {error}.") from error
    return folder


def refuse_codes(path: Path) -> None:
    """Raise ModelError if a GGUF file has quantized weights, which would lose much accuracy if quantized again.

    Only the header is read. Other problems with the path are reported by `prepare_model`.
    """
    if not path.is_file() or _beginning(path)[: len(_MAGIC)] != _MAGIC:
        return
    try:
        types = {str(tensor.tensor_type.name) for tensor in _open(path).tensors} - _PLAIN_TYPES
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


def _fingerprint(path: Path, *, codes: bool) -> str:
    """Return a name for the conversion of a GGUF file, from the file's size, modification time and first MiB."""
    status = path.stat()
    version = _VERSION + (b" codes" if codes else b"")
    digest = hashlib.blake2b(version + f"{status.st_size} {status.st_mtime_ns}".encode(), digest_size=8)
    start = _beginning(path)
    if not start.startswith(_MAGIC):
        raise ModelError(f"{path} is not a GGUF file; give a GGUF file or a folder in Hugging Face layout.")
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


def _convert(path: Path, folder: Path, progress: Progress | None, *, codes: bool) -> None:
    """Write a hidden folder next to `folder`, then rename it.

    Leftover hidden folders are removed first; no process uses them, because the caller holds the lock.
    """
    for leftover in [*folder.parent.glob(".partial-*"), folder]:
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    try:
        _write_folder(path, partial, progress, codes=codes)
        check_model(partial)
        partial.chmod(0o755)
        partial.rename(folder)
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_folder(path: Path, folder: Path, progress: Progress | None, *, codes: bool) -> None:
    reader = _open(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(ROPE_FACTORS, None)
    if "token_embd.weight" not in tensors:
        raise ModelError("it has no token embedding; convert the model to GGUF again.")

    def read(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    vocab_size = int(tensors["token_embd.weight"].shape[1])
    config = huggingface_config(read, vocab_size, tensors, None if factors is None else _dequantize(factors))
    generation = {"bos_token_id": config["bos_token_id"], "eos_token_id": eos_token_ids(read) or None}
    kept = {name for name, tensor in tensors.items() if codes and _has_codes(tensor)}
    if kept:
        types = _modules_by_type(tensors[name] for name in kept)
        config |= {"quantization_config": {"quant_method": "gguf", "types": types}, "torch_dtype": _DTYPE}
    parse_spec(config, generation)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    described = {huggingface_name(name): _described(tensor, kept=name in kept) for name, tensor in tensors.items()}
    write_tensors(folder / "model.safetensors", described, _weights(list(tensors.values()), kept, config, progress))
    _write_tokenizer(path, folder, progress)


def _modules_by_type(tensors: Iterable[ReaderTensor]) -> dict[str, list[str]]:
    """Return the names of the tensors' modules for each block type."""
    by_type: dict[str, list[str]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.tensor_type.name, []).append(huggingface_name(tensor.name).removesuffix(".weight"))
    return {kind: sorted(modules) for kind, modules in sorted(by_type.items())}


def _has_codes(tensor: ReaderTensor) -> bool:
    """Return True if the tensor's quantized blocks can be kept."""
    return tensor.tensor_type.name in GGUF_SCHEMES and tensor.name.endswith(".weight") and len(tensor.shape) == 2


def _described(tensor: ReaderTensor, kept: bool) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape with which a tensor is written."""
    # GGUF lists dimensions from the fastest-varying one, safetensors from the slowest-varying one.
    shape = tensor.data.shape if kept else tensor.shape[::-1]
    return "U8" if kept else "F32", tuple(map(int, shape))


class _Reader(GGUFReader):  # type: ignore[misc]  # its package has no types
    """A GGUF reader that checks the file's size against its header before it reads a field or maps the tensors.

    The library itself reads past the end of a file without an error, for as long as an array's stated length.
    """

    @property
    def data(self) -> npt.NDArray[Any]:
        """The bytes of the file.

        Each slice of a plain array takes a fraction of the time of a slice of numpy's memmap, and a header has 100,000.
        """
        return self._data

    @data.setter
    def data(self, mapped: np.memmap[Any, Any]) -> None:
        self._data = mapped.view(np.ndarray)

    def _get(self, offset: int, dtype: npt.DTypeLike, count: int = 1, **more: Any) -> npt.NDArray[Any]:
        if int(offset) + np.dtype(dtype).itemsize * int(count) > self.data.size:
            raise ModelError(
                f"the file is truncated: it has {self.data.size} bytes, its header speaks of more; download it again."
            )
        values: npt.NDArray[Any] = super()._get(offset, dtype, count, **more)
        return values

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        needed = max((start_offs + _end(field) for field in fields), default=start_offs)
        if self.data.size < needed:
            raise ModelError(
                f"the file is truncated: it has {self.data.size} bytes, its header speaks of {needed}; "
                "download it again."
            )
        super()._build_tensors(start_offs, fields)


def _end(field: ReaderField) -> int:
    """Return the end of a tensor, in bytes from the start of the first tensor."""
    _, _, _, dims, raw_type, offset = field.parts
    block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(raw_type[0])]
    return int(offset[0]) + int(math.prod(map(int, dims)) * type_size) // int(block_size)


def _open(path: Path) -> GGUFReader:
    try:
        return _Reader(path)
    except ModelError:
        raise
    # The library defines no error of its own: a truncated file may cause any exception.
    except Exception as error:
        size = path.stat().st_size
        raise ModelError(
            f"the file is truncated or corrupt: its header cannot be read, it has {size} bytes; download it again."
        ) from error


def _weights(
    tensors: list[ReaderTensor], kept: set[str], config: dict[str, Any], progress: Progress | None
) -> Iterator[Float32 | Bytes]:
    total = sum(int(tensor.n_elements) for tensor in tensors)
    done = 0
    for tensor in tensors:
        weight: Float32 | Bytes = tensor.data if tensor.name in kept else _dequantize(tensor)
        if config["model_type"] == "llama" and ".attn_q." in tensor.name:
            weight = _unpermute(weight, config["num_attention_heads"])
        elif config["model_type"] == "llama" and ".attn_k." in tensor.name:
            weight = _unpermute(weight, config["num_key_value_heads"])
        yield weight
        done += int(tensor.n_elements)
        if progress is not None:
            progress("converting weights", done / total)


def _dequantize(tensor: ReaderTensor) -> Float32:
    try:
        weight: Float32 = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"tensor {tensor.name} is stored as {kind}, which cannot be dequantized.") from error
    return weight


def _unpermute(weight: Float32 | Bytes, heads: int) -> Float32 | Bytes:
    """Reorder the q and k rows of Llama as checkpoints store them.

    GGUF stores the two rows of a RoPE pair next to each other; checkpoints store all first rows of a head, then all
    second rows.
    """
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _write_tokenizer(path: Path, folder: Path, progress: Progress | None) -> None:
    # Imported here, because it takes seconds and only conversions need it.
    from transformers import AutoTokenizer

    if progress is not None:
        progress("converting tokenizer", 0.0)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        # The chat template goes into tokenizer_config.json, which every reader reads.
        tokenizer.save_pretrained(folder, save_jinja_files=False)
    # Code of another library may fail in any way on an unknown file.
    except Exception as error:
        raise ModelError(f"its tokenizer cannot be converted ({error}).") from error
    if progress is not None:
        progress("converting tokenizer", 1.0)
