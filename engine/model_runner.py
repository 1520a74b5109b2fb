"""The engine: one model, one paged cache, one step at a time, on whatever device it was loaded on."""

import os

import torch
from torch import Tensor

from engine.batch import Draw, StepBatch, StepResult, StepRow
from engine.cache.page_pool import PagePool
from engine.cache.paged_cache import PagedCache
from engine.config import EngineConfig
from engine.kernels.base import Kernels
from engine.kernels.reference import ReferenceKernels
from engine.models.config import ModelConfig
from engine.models.llama import LlamaModel
from engine.models.parameters import allocate_parameters, destinations
from engine.sampler import sample
from engine.step_packer import StepLimits, StepPacker
from engine.weights.checkpoint import Progress, check_model, load_weights, revision_hash, stored_dtype
from wire.errors import InvalidArgument
from wire.messages import ModelFacts, SamplingParams

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_PAGE_TOKENS, _GPU_PAGE_TOKENS = 16, 128
_WARM_UP_TOKENS = 64


class ModelRunner:
    """Computes steps. Not thread-safe but for `pool`: one thread runs it. Owns weights and cache for its lifetime."""

    def __init__(
        self, config: ModelConfig, model: LlamaModel, cache: PagedCache, facts: ModelFacts, revision: str
    ) -> None:
        """Use `load`. `revision` names the weights, for `compatibility_facts`."""
        device = cache.tensor.device
        self.model_config = config
        self.facts = facts
        self.cache = cache
        self.pool = PagePool(cache.pages)
        self.page_tokens = cache.page_tokens
        self.device_name = _device_name(device)
        self._model = model
        self._revision = revision
        limits = StepLimits(config.vocab_size, facts.max_context, cache.pages, cache.page_tokens)
        self._packer = StepPacker(limits, device)

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        name: str | None = None,
        kernels: Kernels | None = None,
    ) -> "ModelRunner":
        """Reads the model and allocates the cache; `name` is what clients call it, by default the folder's name.

        `kernels` are by default the fastest for the device.

        Raises ModelError for a model that cannot be served, InvalidArgument for a setting that cannot be met.
        """
        device = _parse_device(config.device)
        page_tokens = _parse_page_tokens(config, device)
        model_config = check_model(config.model)
        dtype = _parse_dtype(config, device, model_config)
        if device.type == "cpu":
            torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        # Outside of inference mode: the transfer and tests write into the cache as well.
        cache = PagedCache(model_config, page_tokens, config.kv_cache_bytes, dtype, device)
        with torch.inference_mode():
            parameters = allocate_parameters(model_config, dtype, device)
            load_weights(config.model, model_config, destinations(parameters, model_config), progress)
            # A request that outgrows the whole pool could never finish.
            max_context = min(model_config.max_context, cache.pages * page_tokens)
            model = LlamaModel(
                model_config, parameters, kernels or _choose_kernels(device, dtype, config.threads), max_context
            )
        facts = ModelFacts(
            name=name or config.model.resolve().name,
            vocab_size=model_config.vocab_size,
            max_context=max_context,
            eos_token_ids=model_config.eos_token_ids,
            dtype=cache.dtype,
        )
        runner = cls(model_config, model, cache, facts, revision_hash(config.model))
        runner._warm_up(progress)
        return runner

    def run(self, batch: StepBatch) -> StepResult:
        """Stores the KV of every row and samples where a draw is asked for; raises Internal for a malformed batch."""
        with torch.inference_mode():
            logits = self._forward(batch)
            if logits is None:
                return StepResult([None] * len(batch.rows))
            sampled = iter(sample(logits, [row.draw for row in batch.rows if row.draw is not None]).tolist())
        return StepResult([None if row.draw is None else next(sampled) for row in batch.rows])

    def logits(self, batch: StepBatch) -> Tensor:
        """As `run`, but the logits [rows with a draw, vocab] themselves, in the model's dtype, on the device."""
        with torch.inference_mode():
            logits = self._forward(batch)
            if logits is None:
                return torch.empty(0, self.model_config.vocab_size)
            return logits

    def compatibility_facts(self) -> tuple[tuple[str, str], ...]:
        """What two workers must share, as (name, value), before KV may move between them."""
        cache = self.cache
        return (
            ("model", self._revision),
            ("dtype", cache.dtype),
            ("layout", f"pages,{cache.layers} layers,k v,{cache.kv_heads} heads,tokens,{cache.head_dim} dims"),
            ("page_tokens", str(cache.page_tokens)),
        )

    def _warm_up(self, progress: Progress | None) -> None:
        """Run a prompt and a decode step, so that no user waits for kernels to be compiled or threads to start.

        They write to page 0 while nobody owns it, and leave it as it was.
        """
        if progress is not None:
            progress("compiling kernels", 0.0)
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9)
        tokens = min(self.page_tokens, _WARM_UP_TOKENS)
        for row in (StepRow([0] * tokens, 0, [0], None), StepRow([0], 0, [0], Draw(sampling, 0))):
            self.run(StepBatch([row]))
        self.cache.tensor[0].zero_()
        if progress is not None:
            progress("compiling kernels", 1.0)

    def _forward(self, batch: StepBatch) -> Tensor | None:
        step = self._packer.pack(batch)
        return self._model.forward(step.token_ids, step.layout, self.cache.tensor, step.drawn)


def _choose_kernels(device: torch.device, dtype: torch.dtype, threads: int | None) -> Kernels:
    if device.type == "cpu" and dtype in {torch.float32, torch.bfloat16}:
        # Compiling takes seconds; processes on GPUs need none of it.
        from engine.kernels.cpu import CpuKernels

        # The kernels bring their own threads; PyTorch's would spin on the same cores after every operation.
        torch.set_num_threads(1)
        return CpuKernels(dtype, threads)
    return ReferenceKernels()


def _parse_device(name: str) -> torch.device:
    kind, _, ordinal = name.partition(":")
    if kind not in {"cpu", "cuda"} or (ordinal and not (kind == "cuda" and ordinal.isdecimal())):
        raise InvalidArgument("device", f"{name!r} is not known; use cpu, cuda or cuda:N.")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(ordinal or 0)
    if index >= count:
        raise InvalidArgument("device", f"{name!r} is not there: PyTorch sees {count} CUDA devices; use cpu.")
    return torch.device("cuda", index)


def _parse_dtype(config: EngineConfig, device: torch.device, model: ModelConfig) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else model.dtype or stored_dtype(config.model)
    if name not in _DTYPES:
        raise InvalidArgument("dtype", f"{name!r} is not supported; use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def _parse_page_tokens(config: EngineConfig, device: torch.device) -> int:
    default = _CPU_PAGE_TOKENS if device.type == "cpu" else _GPU_PAGE_TOKENS
    page_tokens = default if config.page_tokens is None else config.page_tokens
    if page_tokens < 1:
        raise InvalidArgument(
            "page_tokens", f"{page_tokens} is not a page size; use {default} or another power of two."
        )
    return page_tokens


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else f"{device} {torch.cuda.get_device_name(device)}"
