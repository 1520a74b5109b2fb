"""The configuration that one engine starts with."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.engine import EngineSettings

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""The default tokens of a KV page. On GPUs this is the size for which prefill attention is fast."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load: the name that clients use, and its folder (`tandem/engine/adapters/folder.py`)."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """The settings of an engine, and what depends on its worker: the device, the share of it, and the weights."""

    model: Path
    """The model folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    tokenizer: Path | None = None
    """The folder with the tokenizer; None = `model`."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    memory_fraction: float = 0.9
    """The fraction of the GPU's memory that this process may use for everything, 0 to 1.

    Lower if processes share a GPU.
    """
    max_batch_requests: int = 64
    """The most requests in one decode step."""
    quantization: str | None = None
    """`int8`, `fp8` or `int4`: the codes to which the layers' 16-bit weights are rounded at load; None = as stored."""
    adapters: tuple[AdapterSource, ...] = ()
    """The adapters that requests may name, in the order of their numbers, from 1."""
    cuda_graphs: bool = True
    """True to replay a GPU's steps as CUDA graphs if one fits; turned off only to measure their benefit."""
    draft_graphs: bool = False
    """True to capture CUDA graphs of steps that verify draft tokens.

    Only workers with speculative decoding need them.
    """
    keep_hidden: bool = False
    """True to keep the hidden states of sampling rows even without `draft`, for the training of heads."""

    @property
    def has_loras(self) -> bool:
        """True if steps apply adapters."""
        return self.runtime_loras or bool(self.adapters)
