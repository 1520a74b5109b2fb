"""Settings of the engine of each worker.

The cluster adds what depends on a worker's device and role; see `EngineConfig`.
"""

from dataclasses import dataclass
from pathlib import Path

from tandem.settings.parsing import resolved
from tandem.settings.setting import Settings, Topic, setting

GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8", "fp8")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Settings):
    """The engine settings that depend neither on the worker's device nor on its role; see `EngineConfig`."""

    max_model_len: int | None = setting(
        None,
        help="Longest context in tokens, prompt and answer together; default: the model's.",
        topic=Topic.MODEL,
        least=1,
    )
    random_weights: bool = setting(
        False,
        help="For performance runs: the shape (llama-3-8b, qwen3-0.6b, …) of a model of random weights.",
        topic=Topic.MODEL,
        kind=str,
        parse=lambda _option, _shape: True,
    )
    """True if weights are initialized at random instead of being read; the folder then needs only config.json."""
    dtype: str = setting(
        "auto", help="Of weights and KV: auto, float32, bfloat16 or float16.", topic=Topic.ENGINE, choices=DTYPES
    )
    """`auto` = float32 on CPUs and the checkpoint's dtype on GPUs."""
    kv_cache_dtype: str = setting(
        "auto",
        help="Of the KV cache: auto (as --dtype), or int8 or, on GPUs, fp8, which hold up to twice the tokens.",
        topic=Topic.ENGINE,
        choices=KV_DTYPES,
    )
    page_tokens: int | None = setting(
        None,
        help="Tokens per KV page; default: 16 on CPU, 128 on GPUs.",
        topic=Topic.ENGINE,
        aliases=("--block-size",),
        least=1,
        most=1024,
    )
    kv_cache_bytes: int | None = setting(
        None,
        help="KV page pool of each worker; default: 1 on CPU; on GPUs what is left of --memory-fraction.",
        topic=Topic.ENGINE,
        option="kv-cache-gib",
        kind=float | None,
        unit=GIB,
        least=1 << 20,
        most=1 << 50,
    )
    """Size of the KV page pool in bytes, including one scratch page, rounded down to whole pages."""
    max_step_tokens: int = setting(
        2048,
        help="Maximum tokens of one step over all its rows: the chunk size of prefill.",
        topic=Topic.ENGINE,
        aliases=("--max-num-batched-tokens",),
        least=1,
    )
    threads: int | None = setting(
        None, help="CPU threads of each worker; default: all cores.", topic=Topic.ENGINE, least=1
    )
    draft: Path | None = setting(
        None,
        help="Folder of --speculate draft: a small model with the same tokens, which gets a part of the KV cache's"
        " memory, an EAGLE head, likewise, or Medusa heads; its config.json says which.",
        topic=Topic.SPECULATION,
        parse=resolved,
    )
    runtime_loras: bool = setting(
        False,
        help="Let operators load and unload adapters while the cluster serves, from any folder that the workers can"
        " read. Workers keep memory for --max-loras adapters of --max-lora-rank. Without API keys every client is an"
        " operator.",
        topic=Topic.ADAPTERS,
        option="allow-runtime-lora-updating",
    )
    max_loras: int = setting(8, help="Most adapters.", topic=Topic.ADAPTERS, least=1)
    max_lora_rank: int = setting(16, help="Highest rank of an adapter.", topic=Topic.ADAPTERS, least=1)
