"""Loads an engine: chooses the device, and creates the weights, the KV cache and the stepper."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tandem.engine.adapters.load import LoadedAdapters, load_adapters, slot_bytes
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.cache.paged_cache import PagedCache, page_bytes
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.config.sharding import (
    ALONE,
    PagePart,
    Rank,
    check_token_division,
    computed_spec,
    own_spec,
    page_parts,
)
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.device import (
    check_weights,
    choose_kernels,
    choose_updates,
    parse_device,
    parse_dtype,
    parse_kv_dtype,
    parse_pages,
)
from tandem.engine.expert_tokens import ExpertTokens
from tandem.engine.grammar_masks import AllowedDrafts, GrammarMasks
from tandem.engine.graph_use import GraphUse
from tandem.engine.host_stepper import Forward, HostStepper
from tandem.engine.kernels.base import Kernels, is_cpu
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.memory import GIB, check_host_memory, ran_out_of_memory
from tandem.engine.model_summary import model_summary
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.load_spec import bounded, load_spec, quantized_at_load
from tandem.engine.models.rank_parameters import allocate_rank, rank_bytes
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.step_stream import RankStep
from tandem.engine.sampler import sample
from tandem.engine.speculation.draft_folder import draft_bytes, reads_output_layer
from tandem.engine.speculation.load_draft import (
    KvMemory,
    MakeProposer,
    ModelWithDraft,
    draft_model_of,
    head_proposer,
    model_with_draft,
    split_kv,
)
from tandem.engine.speculation.load_draft_model import LoadModel
from tandem.engine.steps.batch import PendingStep, StepBatch
from tandem.engine.steps.sampling_metadata import History
from tandem.engine.steps.step_packer import StepPacker, step_limits
from tandem.engine.warm_up import COMPILING
from tandem.engine.weights.checkpoint import Progress, check_model, load_weights, revision_hash
from tandem.engine.weights.random_weights import fill_randomly, random_revision
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.messages import ModelFacts
from tandem.settings.engine import CPU_KV_CACHE_BYTES
from tandem.tokenizers.grammars import LazyGrammars, shared_grammars


class Stepper(Protocol):
    """Runs steps on one kind of device. Only the engine's thread calls it."""

    @property
    def asynchronous(self) -> bool:
        """True if `launch` returns before the step has run."""

    @property
    def graph_use(self) -> GraphUse:
        """The counters of steps with and without CUDA graphs."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch a step and return a function that waits for its result."""

    @property
    def step_graphs(self) -> Sequence[StepGraph]:
        """The CUDA graphs; those of the ranks of a group are in the same order."""

    def logits(self, batch: StepBatch, *, every_token: bool = False) -> Tensor | None:
        """Return the logits [sampled rows, vocab] of a step; None if no row samples a token.

        With `every_token` they are [tokens, vocab].
        """


@dataclass(frozen=True, slots=True)
class LoadedParts:
    """The parts from which a `ModelRunner` is created."""

    spec: ModelSpec
    computed_spec: ModelSpec
    """The spec of the matrices that this process computes: `spec`, whose vocabulary is divided among the ranks."""
    cache: PagedCache
    page_parts: tuple[PagePart, ...]
    """For each group of layers, the part of a page of the whole model that the cache has."""
    dtype: torch.dtype
    """The dtype of activations, and of weights that are not quantized."""
    facts: ModelFacts
    revision: str
    """A name that identifies the weights."""
    adapters: AdapterSlots
    """The adapter slots, with the adapters that are loaded at the start."""
    stepper: Stepper
    expert_tokens: ExpertTokens
    begin_answer: Callable[[History, str], None]
    """`GrammarMasks.begin`: compiles a request's grammar and computes its first mask."""
    allowed_drafts: AllowedDrafts
    """`GrammarMasks.allowed_drafts`: returns how many draft tokens a grammar allows."""
    draft_proposer: MakeProposer | None
    """Creates the proposer that uses the weights of a draft or of the MTP layer; None without such weights."""
    drawn_hidden: Tensor | None
    """The hidden states of sampling rows (`HiddenStateModel.drawn_hidden`); None if nothing reads them."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """The spec of the model to load, its device, and the dtypes and page size chosen for both."""

    spec: ModelSpec
    device: torch.device
    page_tokens: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    given_kernels: Kernels | None
    """Kernels to use instead of the fastest for the device; the engine is then synchronous, without CUDA graphs."""
    collectives: Collectives | None
    """Exchanges tensors with the other ranks of the group; None = this process has the whole model."""

    @property
    def rank(self) -> Rank:
        """The rank whose part of the model this process has; the whole model if only tokens are divided."""
        if self.collectives is None or self.collectives.rank.divides_tokens:
            return ALONE
        return self.collectives.rank

    @property
    def own_spec(self) -> ModelSpec:
        """The spec of this rank's part of the model."""
        return own_spec(self.spec, self.rank)

    @classmethod
    def of(cls, config: EngineConfig, kernels: Kernels | None, collectives: Collectives | None) -> "_Setting":
        """Check that the device can serve the model, and choose dtypes and page size."""
        device = parse_device(config.device)
        stored = load_spec(config.served.model) if config.random_weights else check_model(config.served.model)
        spec = bounded(quantized_at_load(stored, config.quantization), config.max_model_len)
        spec, page_tokens = parse_pages(config, device, spec)
        dtype, kv_dtype = parse_dtype(config, device, spec), parse_kv_dtype(config, device, spec)
        check_weights(device, spec)
        if collectives is not None and collectives.rank.divides_tokens:
            check_token_division(spec, collectives.rank.count)
        return cls(spec, device, page_tokens, dtype, kv_dtype, kernels, collectives)

    @property
    def on_host(self) -> bool:
        """True if the engine uses the synchronous `HostStepper`: on a CPU, or on any device with `given_kernels`."""
        return is_cpu(self.device) or self.given_kernels is not None

    def page_bytes(self, spec: ModelSpec) -> int:
        """Return the bytes of a page of `spec`, the part of the model that a rank has."""
        return page_bytes(spec, self.page_tokens, self.kv_dtype, self.dtype)

    def kernels(self, config: EngineConfig, spec: ModelSpec) -> Kernels:
        """Return `given_kernels` or, if that is None, the fastest kernels for a model on this device."""
        return self.given_kernels or choose_kernels(
            config, spec, self.device, self.dtype, self.page_tokens, kv_dtype=self.kv_dtype
        )

    def prepare_device(self, config: EngineConfig) -> None:
        """Select the GPU, or check the free host memory and set the number of PyTorch's threads."""
        if is_cpu(self.device):
            check_host_memory(self.weight_bytes(config))
            torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
        else:
            torch.cuda.set_device(self.device)

    def kv_memory(self, config: EngineConfig) -> KvMemory:
        """Return the memory of the KV pages, which the target shares with a draft that has KV."""
        default = CPU_KV_CACHE_BYTES if is_cpu(self.device) else None
        return split_kv(config, self.own_spec, self.page_tokens, self.device, default, whole=self.spec)

    def weight_bytes(self, config: EngineConfig) -> int:
        """Return the memory in bytes of the weights, the adapter slots, and the draft weights."""
        whole_output = reads_output_layer(config, self.spec)
        on_cpu = is_cpu(self.device)
        weights = rank_bytes(self.spec, self.rank, self.dtype, on_cpu=on_cpu, whole_output=whole_output)
        drafts = draft_bytes(config, self.spec, self.dtype, self.device)
        return weights + slot_bytes(config, self.own_spec, self.dtype) + drafts


def load_parts(
    config: EngineConfig,
    progress: Progress | None,
    *,
    kernels: Kernels | None,
    load_another: LoadModel,
    collectives: Collectives | None = None,
    on_step: Callable[[RankStep], None] | None = None,
) -> LoadedParts:
    """Load the parts of a runner, as `ModelRunner.load` describes.

    `load_another` is `ModelRunner.load`, which loads a draft model as a second engine. `collectives` exchange tensors
    with the other ranks of the group; None = this process has the whole model. `on_step` is called with each step
    before it runs.
    """
    setting = _Setting.of(config, kernels, collectives)
    spec, page_tokens = setting.own_spec, setting.page_tokens
    setting.prepare_device(config)
    tokenizer, tokens = config.served.tokenizer_folder, (spec.vocab_size, tuple(spec.eos_token_ids))
    grammars = LazyGrammars(lambda: shared_grammars(tokenizer, *tokens))
    # Loaded in parallel with the weights: it holds the GIL for a third of a second or more, which must not delay a
    # request.
    loading = threading.Thread(target=grammars.load, name="tokenizer", daemon=True)
    loading.start()
    loaded, adapters = _load_model(config, setting, progress)
    kv = setting.kv_memory(config)
    masks = GrammarMasks(grammars, spec.eos_token_ids)

    start = partial(_start, masks=masks, progress=progress)
    # The draft is not divided among the ranks: it runs on the first rank alone, and its steps are not sent.
    start_head = partial(start, setting=replace(setting, collectives=None))
    proposer = (
        loaded.proposer
        or head_proposer(loaded, start_head, config, page_tokens, kv, whole=setting.spec)
        or draft_model_of(load_another, config, spec, page_tokens, kv)
    )
    cache, stepper = start(replace(config, kv_cache_bytes=kv.target), loaded.model, setting=setting, on_step=on_step)
    loading.join()
    return LoadedParts(
        spec,
        computed_spec(setting.spec, setting.rank),
        cache,
        page_parts(setting.spec, setting.rank),
        setting.dtype,
        _facts(config.served.name, setting, cache),
        random_revision(config.served.model) if config.random_weights else revision_hash(config.served.model),
        adapters.slots,
        stepper,
        loaded.model.expert_tokens,
        masks.begin,
        masks.allowed_drafts,
        proposer,
        loaded.drawn_hidden,
    )


def load_rank(
    config: EngineConfig, collectives: Collectives, kernels: Kernels | None
) -> tuple[DecoderModel, PagedCache, tuple[PagePart, ...], AdapterSlots, Sequence[StepGraph]]:
    """Load a follower, a rank other than the first: its part of the model and of the adapters, and its CUDA graphs.

    Returns with the cache the parts of pages that it has. Drafts are proposed on the first rank alone. Raises as
    `load_parts` does.
    """
    setting = _Setting.of(config, kernels, collectives)
    config = replace(config, kv_cache_bytes=setting.kv_memory(config).target, draft=None, mtp=False, keep_hidden=False)
    setting.prepare_device(config)
    loaded, adapters = _load_model(config, setting, None)
    cache, stepper = _start(config, loaded.model, setting=setting, masks=None)
    parts = page_parts(setting.spec, setting.rank)
    return loaded.model, cache, parts, adapters.slots, stepper.step_graphs


def _load_model(
    config: EngineConfig, setting: _Setting, progress: Progress | None
) -> tuple[ModelWithDraft, LoadedAdapters]:
    spec = setting.own_spec
    if progress is not None and setting.given_kernels is None:
        progress(COMPILING, 0.0)
    kernels = setting.kernels(config, spec)
    try:
        with torch.inference_mode():
            parameters = allocate_rank(
                setting.spec,
                setting.rank,
                setting.dtype,
                setting.device,
                whole_output=reads_output_layer(config, setting.spec),
            )
            if config.random_weights:
                fill_randomly(parameters)
            else:
                load_weights(config.served.model, setting.spec, parameters, progress, setting.rank)
            adapters = load_adapters(config, setting.spec, parameters, setting.rank)
            adapted = None
            if adapters.tables:
                adapted = AdaptedProducts(kernels, choose_updates(setting.device), adapters.tables)
            loaded = model_with_draft(
                config,
                spec,
                parameters,
                kernels,
                setting.kernels,
                whole=setting.spec,
                adapted=adapted,
                collectives=setting.collectives,
            )
            return loaded, adapters
    except RuntimeError as error:
        if not ran_out_of_memory(error):
            raise
        size = setting.weight_bytes(config)
        raise InvalidArgument(
            "device",
            f"{setting.device} has no memory for the weights, {size / GIB:.2f} GiB; free memory there, or"
            " serve a smaller model.",
        ) from error


def _start(
    config: EngineConfig,
    model: DecoderModel,
    *,
    setting: _Setting,
    masks: GrammarMasks | None,
    progress: Progress | None = None,
    on_step: Callable[[RankStep], None] | None = None,
) -> tuple[PagedCache, Stepper]:
    """Allocate the KV cache and create the stepper, a synchronous one on a CPU or with kernels that were passed in."""
    if not setting.on_host:
        from tandem.engine.cuda.cuda_start import start_on_gpu

        return start_on_gpu(
            config,
            model,
            setting.page_tokens,
            setting.kv_dtype,
            setting.device,
            masks=masks,
            progress=progress,
            collectives=setting.collectives,
            on_step=on_step,
        )
    spec, cache = model.spec, _host_cache(config, setting, model.spec)
    draw = partial(sample, eos_token_ids=spec.eos_token_ids, masks=masks)
    forward = Forward(model, cache, on_step)
    return cache, HostStepper(StepPacker(step_limits(spec, cache)), forward, setting.device, draw)


def _host_cache(config: EngineConfig, setting: _Setting, spec: ModelSpec) -> PagedCache:
    # Allocated outside of inference mode, because the transfer and tests write into the cache as well.
    # The capacity is None only on a GPU with kernels that were passed in, that is in tests.
    capacity = CPU_KV_CACHE_BYTES if config.kv_cache_bytes is None else config.kv_cache_bytes
    if setting.collectives is not None:
        capacity = setting.collectives.pool_bytes(capacity, setting.page_bytes(spec))
    return PagedCache(
        spec,
        setting.page_tokens,
        capacity,
        setting.kv_dtype,
        setting.device,
        step_tokens=config.max_step_tokens,
        model_dtype=setting.dtype,
    )


def _facts(name: str, setting: _Setting, cache: PagedCache) -> ModelFacts:
    spec = setting.spec
    return ModelFacts(
        name=name,
        vocab_size=spec.vocab_size,
        max_context=step_limits(spec, cache).max_context,
        eos_token_ids=spec.eos_token_ids,
        dtype=str(setting.dtype).removeprefix("torch."),
        summary=model_summary(spec, setting.dtype.itemsize, cache.element_bytes, on_cpu=is_cpu(setting.device)),
        kv_windows=cache.kv_pages.windows,
        kv_step_tokens=cache.kv_pages.step_tokens,
    )
