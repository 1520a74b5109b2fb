"""Chooses device, dtypes, page size and kernels for the engine's settings on this machine."""

import importlib.util
import logging

import torch

from tandem.engine.cache.paged_cache import choose_pages
from tandem.engine.config import EngineConfig
from tandem.engine.config.kv import KvGroup, kv_groups
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.lora.adapted_products import LoraUpdates
from tandem.engine.kernels.lora.plain_updates import PlainUpdates
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.weights.checkpoint import stored_dtype
from tandem.protocol.errors import InvalidArgument
from tandem.settings.engine import CPU_PAGE_TOKENS, GPU_PAGE_TOKENS
from tandem.version import install_command

log = logging.getLogger(__name__)

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_FLOAT8_CAPABILITY = (8, 9)
"""Minimum compute capability of GPUs that convert 8-bit floating-point numbers."""
_KV_SCALE_ITEMS = 4
"""In an 8-bit cache, the head dimension must be a multiple of this number.

The keys of a token and head are then whole 32-bit words, like the scales, and checksums are sums over these words.
"""
_CAPABILITY = (8, 0)
"""Minimum supported compute capability: older GPUs lack bfloat16 and asynchronous copies."""


def usable_gpus() -> int:
    """Return the number of GPUs that can be used: by index, all GPUs before the first that is too old."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    too_old = (index for index in range(count) if torch.cuda.get_device_capability(index) < _CAPABILITY)
    return next(too_old, count)


def why_no_gpu_kernels() -> str | None:
    """Return which packages the GPU kernels lack and how to install them; None if nothing is missing."""
    if importlib.util.find_spec("triton") is not None:
        return None
    return f"its kernels need triton, which is not installed; {install_command('gpu')}, or use cpu."


def parse_device(name: str) -> torch.device:
    """Return the device with this name (`cpu`, `cuda` or `cuda:N`).

    Raises InvalidArgument if it is unknown, absent or too old, or if its kernels are not installed.
    """
    kind, _, ordinal = name.partition(":")
    if kind not in {"cpu", "cuda"} or (ordinal and not (kind == "cuda" and ordinal.isdecimal())):
        raise InvalidArgument("device", f"{name!r} is not known; use cpu, cuda or cuda:N.")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(ordinal or 0)
    if index >= count:
        raise InvalidArgument("device", f"{name!r} is not there: PyTorch sees {count} CUDA devices; use cpu.")
    capability = torch.cuda.get_device_capability(index)
    if capability < _CAPABILITY:
        has, needs = ".".join(map(str, capability)), ".".join(map(str, _CAPABILITY))
        raise InvalidArgument(
            "device", f"{name!r} has compute capability {has}; the kernels need {needs} or newer; use cpu."
        )
    if (missing := why_no_gpu_kernels()) is not None:
        raise InvalidArgument("device", f"{name!r}: {missing}")
    return torch.device("cuda", index)


def parse_dtype(config: EngineConfig, device: torch.device, model: ModelSpec) -> torch.dtype:
    """Return the dtype of weights and activations. Raises InvalidArgument if it is unknown."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype or _stored_dtype(config)
    if name not in _DTYPES:
        raise InvalidArgument("dtype", f"{name!r} is not supported; use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def parse_kv_dtype(config: EngineConfig, device: torch.device, model: ModelSpec) -> torch.dtype:
    """Return the dtype of the KV cache.

    Raises InvalidArgument if it is unknown, or not supported for this model and device.
    """
    dtype = quantized_kv_dtype(config.kv_cache_dtype, model)
    if dtype is None:
        return parse_dtype(config, device, model)
    if dtype == torch.float8_e4m3fn:
        _check_float8_kv(device)
    return dtype


def quantized_kv_dtype(name: str, model: ModelSpec) -> torch.dtype | None:
    """Return the 8-bit dtype that `--kv-cache-dtype` names; None for `auto`.

    Raises InvalidArgument if it is unknown, or if the model's KV cannot be stored in 8 bits.
    """
    if name == "auto":
        return None
    if name not in _KV_DTYPES:
        raise InvalidArgument("kv_cache_dtype", f"{name!r} is not supported; use auto, {', '.join(_KV_DTYPES)}.")
    if model.sparse_shapes:
        raise InvalidArgument("kv_cache_dtype", f"the latents of sparse attention are not cached as {name}; use auto.")
    if any(
        isinstance(group, KvGroup) and any(dim % _KV_SCALE_ITEMS for dim in group.dims) for group in kv_groups(model)
    ):
        raise InvalidArgument("kv_cache_dtype", f"{name} needs heads of a multiple of {_KV_SCALE_ITEMS} dimensions.")
    return _KV_DTYPES[name]


def check_weights(device: torch.device, model: ModelSpec) -> None:
    """Raise InvalidArgument for FP8 weights on a GPU that cannot convert FP8 numbers."""
    if device.type == "cuda" and model.quantization is not None and model.quantization.has_float8:
        _check_float8("quantization", device, "weights of the checkpoint in 16 bits, or in 8 or 4 bits as integers")


def _check_float8_kv(device: torch.device) -> None:
    """Raise InvalidArgument for a device without kernels for FP8 KV."""
    if device.type == "cpu":
        raise InvalidArgument("kv_cache_dtype", "fp8 is served on GPUs only; use int8, which is as small, or auto.")
    _check_float8("kv_cache_dtype", device, "int8 or auto")


def _check_float8(setting: str, device: torch.device, instead: str) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLOAT8_CAPABILITY:
        has, needs = ".".join(map(str, capability)), ".".join(map(str, _FLOAT8_CAPABILITY))
        raise InvalidArgument(
            setting, f"fp8 needs a GPU of compute capability {needs}, this one has {has}; use {instead}."
        )


def parse_pages(config: EngineConfig, device: torch.device, model: ModelSpec) -> tuple[ModelSpec, int]:
    """Return the model with the number of layers per KV page (`choose_pages`), and the number of tokens per page.

    Raises InvalidArgument if the number of tokens is below 1, or too small for the states of the model.
    """
    default = CPU_PAGE_TOKENS if device.type == "cpu" else GPU_PAGE_TOKENS
    page_tokens = default if config.page_tokens is None else config.page_tokens
    if page_tokens < 1:
        raise InvalidArgument(
            "page_tokens", f"{page_tokens} is not a page size; use {default} or another power of two."
        )
    dtypes = parse_kv_dtype(config, device, model), parse_dtype(config, device, model)
    return choose_pages(model, config.page_tokens, default, *dtypes)


def choose_kernels(
    config: EngineConfig,
    model: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    page_tokens: int,
    *,
    kv_dtype: torch.dtype,
) -> Kernels:
    """Return the fastest kernels for the device. Raises InvalidArgument for a model that they cannot compute."""
    if device.type == "cuda":
        from tandem.engine.kernels.cuda import CudaKernels

        return CudaKernels(model, device, dtype, page_tokens, config.batch_requests, kv_dtype)
    if dtype in {torch.float32, torch.bfloat16}:
        # Imported here, because compiling takes seconds and processes on GPUs do not need it.
        from tandem.engine.kernels.cpu.kernels import CpuKernels

        # These kernels have their own threads; PyTorch's would spin on the same cores after every operation.
        torch.set_num_threads(1)
        return CpuKernels(dtype, config.threads)
    return ReferenceKernels()


def choose_updates(device: torch.device) -> LoraUpdates:
    """Return the fastest implementation of adapter updates for the device.

    On CPUs this is PyTorch's, because the products are small and each is needed for only a few tokens of a step.
    """
    if device.type != "cuda":
        return PlainUpdates()
    from tandem.engine.kernels.lora.triton_updates import TritonUpdates

    return TritonUpdates()


def device_name(device: torch.device) -> str:
    """Return a readable name of the device: `cpu`, or the number and product name of the GPU."""
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"


def _stored_dtype(config: EngineConfig) -> str:
    return "bfloat16" if config.random_weights else stored_dtype(config.served.model)
