"""The configuration of one engine."""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.engine import EngineSettings

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""The default numbers of tokens in a KV page on CPUs and on GPUs; prefill attention on GPUs is fast with 128."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load at the start: the model name that clients use, and the adapter folder."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig(EngineSettings):
    """The settings of an engine, and the values that its worker adds, such as device, memory share and weights."""

    model: Path
    """The model folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    tokenizer: Path | None = None
    """The folder with the tokenizer; None = the model folder."""
    device: str = "cpu"
    """The device: `cpu`, `cuda` or `cuda:N`."""
    memory_fraction: float = 0.9
    """The fraction of the GPU's memory, 0 to 1, that this process may use for everything.

    It must be lower if processes share a GPU.
    """
    max_batch_requests: int = 64
    """Maximum number of requests in a decode step."""
    quantization: str | None = None
    """`int8`, `fp8` or `int4`: the type to which the layers' 16-bit weights are quantized at load; None = as stored."""
    adapters: tuple[AdapterSource, ...] = ()
    """The adapters to load at the start; the first gets adapter number 1."""
    cuda_graphs: bool = True
    """True to replay steps on a GPU as CUDA graphs where one fits; False only to measure the benefit of graphs."""
    draft_graphs: bool = False
    """True to capture CUDA graphs of steps that verify draft tokens.

    Only workers with speculative decoding need these graphs.
    """
    keep_hidden: bool = False
    """True to keep the hidden states of rows that sample a token even without `draft`, to train heads."""

    @property
    def has_loras(self) -> bool:
        """True if steps can apply adapters."""
        return self.runtime_loras or bool(self.adapters)
