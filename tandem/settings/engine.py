"""Settings of the engine of each worker."""

import re
from dataclasses import dataclass
from pathlib import Path

from tandem.settings.invalid import refuse
from tandem.settings.parsing import NamedPath, named_paths, resolved
from tandem.settings.setting import AUTO, Settings, Topic, setting

GIB = 1 << 30
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "int8", "fp8")
QUANTIZATIONS = ("int8", "fp8", "int4")
CPU_KV_CACHE_BYTES = GIB
GPU_MEMORY_FRACTION = 0.9
"""Fraction of a GPU's memory that all workers on this GPU may use together."""
RANKS_MAX = 64
"""The maximum number of ranks of a worker."""
CPU_BATCH_REQUESTS, GPU_BATCH_REQUESTS = 64, 256
CPU_PAGE_TOKENS, GPU_PAGE_TOKENS = 16, 128
"""The default numbers of tokens in a KV page on CPUs and on GPUs; prefill attention on GPUs is fast with 128."""


def _check_device(name: str, device: str) -> None:
    if device == AUTO:
        refuse(name, "auto is for `tandem up` and `tandem serve`; give cpu, cuda or cuda:N")
    if re.fullmatch(r"cpu|cuda(:[0-9]+)?", device) is None:
        refuse(name, f"{device!r} is not one of auto, cpu, cuda and cuda:N")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Settings):
    """The settings of an engine.

    The controller replaces `device`, `memory_fraction` and `quantization` by the values of a worker's slot and role.
    """

    device: str = setting(
        "cpu",
        help="cpu, cuda, cuda:N, or auto: cuda where PyTorch finds a usable GPU.",
        topic=Topic.FIRST,
        position=1,
        automatic=AUTO,
        check=_check_device,
    )
    """The device of all workers: `cuda` spreads them over the GPUs of the host, `cuda:N` places them on one GPU."""
    memory_fraction: float | None = setting(
        None,
        help=f"Fraction of its GPU's memory each worker may use; default: {GPU_MEMORY_FRACTION}, shared equally by a"
        " GPU's workers.",
        topic=Topic.ENGINE,
        position=-1,
        aliases=("--gpu-memory-utilization",),
        above=0,
        most=1,
    )
    max_batch_requests: int | None = setting(
        None,
        help=f"Maximum requests of one decode step; default: {CPU_BATCH_REQUESTS} on CPU, {GPU_BATCH_REQUESTS} on"
        " GPUs.",
        topic=Topic.ENGINE,
        position=-1,
        aliases=("--max-num-seqs",),
        least=1,
    )
    quantization: str | None = setting(
        None,
        help="Quantize the layers' weights while they are loaded: int8, fp8 or int4; default: as they are stored.",
        topic=Topic.ENGINE,
        position=-1,
        choices=QUANTIZATIONS,
    )
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
    tensor_parallel_size: int = setting(
        1,
        help="GPUs of each worker, among which the model is divided; on CPUs, processes.",
        topic=Topic.ENGINE,
        aliases=("-tp",),
        least=1,
        most=RANKS_MAX,
    )
    """A worker's processes are its ranks: the first serves, and the others run the same steps."""
    pipeline_parallel_size: int = setting(
        1,
        help="Pipeline stages of each prefill worker, among which the model's layers are divided; two stages compute"
        " successive chunks at the same time. A stage has as many GPUs as --tensor-parallel-size says.",
        topic=Topic.ENGINE,
        option="prefill-pipeline-size",
        aliases=("-pp",),
        least=1,
        most=RANKS_MAX,
    )
    """Decode workers have one stage: the first stage would not know the tokens that the last one has just sampled."""
    context_parallel_size: int = setting(
        1,
        help="GPUs of each prefill worker, among which the tokens of each prompt chunk are divided; each has the whole"
        " model. Excludes other sizes than 1 of --tensor-parallel-size and --prefill-pipeline-size on these workers.",
        topic=Topic.ENGINE,
        option="prefill-context-parallel-size",
        aliases=("-pcp",),
        least=1,
        most=RANKS_MAX,
    )
    """Every rank computes steps without a prompt chunk as a whole, so more ranks would not make decoding faster."""
    page_tokens: int | None = setting(
        None,
        help=f"Tokens per KV page; default: {CPU_PAGE_TOKENS} on CPU, {GPU_PAGE_TOKENS} on GPUs, or more if a page is"
        " too small for the states of state layers.",
        topic=Topic.ENGINE,
        aliases=("--block-size",),
        least=1,
        most=1024,
    )
    kv_cache_bytes: int | None = setting(
        None,
        help=f"KV page pool of each worker, or of each rank of a worker; default: {CPU_KV_CACHE_BYTES // GIB} on CPU;"
        " on GPUs what is left of --memory-fraction.",
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
        help="Maximum tokens of one step over all its rows: the chunk size of prefill. With"
        " --prefill-context-parallel-size, those of each rank.",
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
        " memory, a head of EAGLE-1 or EAGLE-3, likewise, or Medusa heads; its config.json says which.",
        topic=Topic.SPECULATION,
        parse=resolved,
    )
    loras: tuple[NamedPath, ...] = setting(
        (),
        help="A low-rank adapter as peft saves it, for requests whose model is NAME; may be given several times.",
        topic=Topic.ADAPTERS,
        option="lora",
        aliases=("--lora-modules",),
        metavar="NAME=PATH",
        parse=named_paths,
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

    @property
    def on_cpu(self) -> bool:
        """True if the engine computes on the CPU."""
        return self.device == "cpu"

    @property
    def ranks(self) -> int:
        """The number of ranks of a worker: those of all of its pipeline stages, or those that divide tokens."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def ranks_of_device(self) -> int:
        """The number of a worker's ranks that share one device: all ranks on a CPU, one on a GPU."""
        return self.ranks if self.on_cpu else 1

    @property
    def kv_pool_bytes(self) -> int | None:
        """The effective `kv_cache_bytes`; None = each worker measures the free memory of its GPU."""
        return CPU_KV_CACHE_BYTES if self.kv_cache_bytes is None and self.on_cpu else self.kv_cache_bytes

    @property
    def gpu_memory_fraction(self) -> float:
        """The effective `memory_fraction` of a worker that does not share its GPU."""
        return GPU_MEMORY_FRACTION if self.memory_fraction is None else self.memory_fraction

    @property
    def batch_requests(self) -> int:
        """The effective `max_batch_requests`: the setting, or the default of the device."""
        default = CPU_BATCH_REQUESTS if self.on_cpu else GPU_BATCH_REQUESTS
        return default if self.max_batch_requests is None else self.max_batch_requests

    @property
    def has_loras(self) -> bool:
        """True if steps can apply adapters."""
        return self.runtime_loras or bool(self.loras)
