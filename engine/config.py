"""Settings of one engine."""

from dataclasses import dataclass
from pathlib import Path


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
    """Tokens a KV page holds; None = 16 on CPU, 128 on GPUs."""
    kv_cache_bytes: int = 1 << 30
    """Size of the KV page pool in bytes, rounded down to whole pages."""
    max_step_tokens: int = 2048
    """Most tokens of one step over all its rows: the chunk budget of prefill."""
    max_batch_requests: int = 64
    """Most requests of one decode step."""
    threads: int | None = None
    """CPU threads of the engine; None = all cores this process may use."""
