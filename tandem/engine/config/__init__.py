"""Settings of one engine."""

from dataclasses import dataclass
from pathlib import Path

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""Default tokens of a KV page; on GPUs the size for which prefill attention is fast."""


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load: the name that clients use, and its folder (`tandem/engine/adapters/folder.py`)."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The model to load and the part of the machine to use."""

    model: Path
    """Folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    tokenizer: Path | None = None
    """Folder with the tokenizer; None = `model`."""
    max_model_len: int | None = None
    """The longest context in tokens, prompt and answer together; None = the model's."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`, of weights and KV; auto = float32 on CPU, the checkpoint's on GPU."""
    kv_cache_dtype: str = "auto"
    """`auto`, `int8` or, on GPUs, `fp8`, of KV; auto = that of the weights."""
    quantization: str | None = None
    """`int8`, `fp8` or `int4`: the codes to which the layers' 16-bit weights are rounded at load; None = as stored."""
    page_tokens: int | None = None
    """Tokens of a KV page; None = the default of the device."""
    kv_cache_bytes: int | None = None
    """Size of the KV page pool including one scratch page, rounded down to whole pages.

    None = 1 GiB on CPU, on a GPU the rest of `memory_fraction`.
    """
    memory_fraction: float = 0.9
    """Part of the GPU's memory this process may use for everything, 0 to 1: less where processes share a GPU."""
    max_step_tokens: int = 2048
    """Maximum tokens of one step over all its rows: the chunk budget of prefill."""
    max_batch_requests: int = 64
    """Maximum requests of one decode step."""
    random_weights: bool = False
    """True to draw weights at random instead of reading them: the model's folder then needs only config.json."""
    cuda_graphs: bool = True
    """True to replay steps on a GPU as CUDA graphs, where one fits; off only to measure their benefit."""
    draft_graphs: bool = False
    """True to capture CUDA graphs of steps that verify drafts, which only workers with speculative decoding need."""
    draft: Path | None = None
    """Folder of a model, or of heads, that propose drafts (`tandem/engine/speculation/draft_folder.py`); None =
    none."""
    keep_hidden: bool = False
    """True to keep the hidden states of drawn rows without `draft`, as the training of heads needs."""
    threads: int | None = None
    """CPU threads of the engine; None = all cores this process may use."""
    adapters: tuple[AdapterSource, ...] = ()
    """Low-rank adapters that requests may name, in the order of their numbers from 1."""
    runtime_loras: bool = False
    """True to keep `max_loras` slots of rank `max_lora_rank`, into which adapters are loaded while the engine runs."""
    max_loras: int = 8
    """Most adapters."""
    max_lora_rank: int = 16
    """Highest rank of an adapter."""

    @property
    def has_loras(self) -> bool:
        """True if steps compute updates of adapters."""
        return self.runtime_loras or bool(self.adapters)
