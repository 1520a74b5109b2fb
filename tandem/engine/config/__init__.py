"""What one engine starts with."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.engine import EngineSettings

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""Default tokens of a KV page; on GPUs the size for which prefill attention is fast."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load: the name that clients use, and its folder (`tandem/engine/adapters/folder.py`)."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """An engine's settings, and what depends on its worker: the device and its share of it, and the weights."""

    model: Path
    """Folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    tokenizer: Path | None = None
    """Folder with the tokenizer; None = `model`."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    memory_fraction: float = 0.9
    """Part of the GPU's memory this process may use for everything, 0 to 1: less where processes share a GPU."""
    max_batch_requests: int = 64
    """Maximum requests of one decode step."""
    quantization: str | None = None
    """`int8`, `fp8` or `int4`: the codes to which the layers' 16-bit weights are rounded at load; None = as stored."""
    adapters: tuple[AdapterSource, ...] = ()
    """Low-rank adapters that requests may name, in the order of their numbers from 1."""
    cuda_graphs: bool = True
    """True to replay steps on a GPU as CUDA graphs, where one fits; off only to measure their benefit."""
    draft_graphs: bool = False
    """True to capture CUDA graphs of steps that verify drafts, which only workers with speculative decoding need."""
    keep_hidden: bool = False
    """True to keep the hidden states of drawn rows without `draft`, as the training of heads needs."""

    @property
    def has_loras(self) -> bool:
        """True if steps compute updates of adapters."""
        return self.runtime_loras or bool(self.adapters)
