"""Settings of one engine."""

from dataclasses import dataclass
from pathlib import Path

CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""Tokens of a KV page unless somebody says otherwise; on GPUs the size that attention of prompts takes fast."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What to load and how much of the machine to use."""

    model: Path
    """Folder in Hugging Face layout: config.json, safetensors, tokenizer."""
    device: str = "cpu"
    """`cpu`, `cuda` or `cuda:N`."""
    dtype: str = "auto"
    """`auto`, `float32`, `bfloat16` or `float16`, of weights and KV; auto = float32 on CPU, the checkpoint's on GPU."""
    page_tokens: int | None = None
    """Tokens a KV page holds; None = the size that suits the device."""
    kv_cache_bytes: int | None = None
    """Size of the KV page pool and of one page beside it, rounded down to whole pages; None = 1 GiB on CPU, on a GPU
    what is left of `memory_fraction`."""
    memory_fraction: float = 0.9
    """Part of the GPU's memory this process may use for everything, 0 to 1: less where processes share a GPU."""
    max_step_tokens: int = 2048
    """Most tokens of one step over all its rows: the chunk budget of prefill."""
    max_batch_requests: int = 64
    """Most requests of one decode step."""
    random_weights: bool = False
    """Whether weights are drawn at random instead of read: the model's folder then needs nothing but config.json."""
    cuda_graphs: bool = True
    """Whether steps on a GPU are replayed as CUDA graphs, where one fits; off only to measure what they bring."""
    threads: int | None = None
    """CPU threads of the engine; None = all cores this process may use."""
