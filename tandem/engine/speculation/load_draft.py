"""Loading of the weights that propose drafts, beside the model that verifies them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from tandem.engine.cache.paged_cache import PagedCache
from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.device import parse_device, parse_kv_dtype
from tandem.engine.kernels.base import Kernels
from tandem.engine.kernels.lora.adapted_products import AdaptedProducts
from tandem.engine.memory import kv_cache_bytes
from tandem.engine.models.decoder import DecoderModel
from tandem.engine.models.parameters import Parameters
from tandem.engine.speculation.draft_folder import DraftKind, draft_bytes, draft_kind
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.folder import read_eagle
from tandem.engine.speculation.eagle.model import EagleModel, load_eagle
from tandem.engine.speculation.eagle.proposer import EagleProposer, TargetStates
from tandem.engine.speculation.eagle.runner import EagleRunner, Launcher
from tandem.engine.speculation.heads.hidden_states import HiddenStateModel, hidden_rows
from tandem.engine.speculation.heads.medusa import load_medusa_heads
from tandem.engine.speculation.heads.proposer import HeadsProposer
from tandem.engine.speculation.load_draft_model import (
    LoadModel,
    draft_config,
    kv_share,
    load_draft_model,
    memory_of,
    share_of,
)
from tandem.engine.speculation.proposer import Proposer
from tandem.engine.warm_up import warm_up

MakeKernels = Callable[[EngineConfig, ModelSpec], Kernels]
"""Returns the kernels of a model."""
StartModel = Callable[[EngineConfig, DecoderModel], tuple[PagedCache, Launcher]]
"""Allocates the KV pages of a model; returns them, and what launches its steps."""
MakeProposer = Callable[[], Proposer]
"""Returns a new proposer, which belongs to the engine's thread."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The bytes of KV pages, None = what the GPU has left once everything else is there."""

    target: int | None
    both: int | None
    """The bytes of both models' pages."""


def split_kv(
    config: EngineConfig, spec: ModelSpec, page_tokens: int, device: torch.device, default: int | None
) -> KvMemory:
    """Divide the KV memory of `config`, by default `default` bytes, between the model and what drafts with KV."""
    both = default if config.kv_cache_bytes is None else config.kv_cache_bytes
    if both is None:
        return KvMemory(None, None)
    return KvMemory(both - int(both * _kv_share(config, spec, page_tokens, device)), both)


def _kv_share(config: EngineConfig, spec: ModelSpec, page_tokens: int, device: torch.device) -> float:
    """Return the part of the KV memory with which drafts have KV of as many tokens as the model; 0 if they need none.

    That of an EAGLE head has the dtype of the model's.
    """
    kind = None if config.draft is None else draft_kind(config.draft)
    if config.draft is None or kind is DraftKind.HEADS:
        return 0.0
    if kind is DraftKind.MODEL:
        return kv_share(config, spec, page_tokens, device)
    dtype = parse_kv_dtype(config, device, spec)
    return share_of((spec, dtype), (read_eagle(config.draft, spec).spec, dtype), page_tokens)


@dataclass(frozen=True, slots=True)
class ModelWithDraft:
    """A model, and what is loaded beside it for drafts."""

    model: DecoderModel
    proposer: MakeProposer | None = None
    drawn_hidden: Tensor | None = None
    """See `HiddenStateModel`; None where nobody needs hidden states."""
    eagle: EagleModel | None = None
    """An EAGLE head, which gets a stepper of its own."""
    states: TargetStates | None = None
    """The hidden states and the final norm of the model, which an EAGLE head reads."""


def model_with_draft(
    config: EngineConfig,
    spec: ModelSpec,
    parameters: Parameters,
    kernels: Kernels,
    kernels_of: MakeKernels,
    *,
    adapted: AdaptedProducts | None = None,
) -> ModelWithDraft:
    """Return the model, with the heads of `config.draft` if it has such; ModelError if they do not fit.

    `adapted` as in `DecoderModel`. A head with a layer of its own gets other `kernels_of`.
    """
    kind = None if config.draft is None else draft_kind(config.draft)
    if kind in {None, DraftKind.MODEL} and not config.keep_hidden:
        return ModelWithDraft(DecoderModel(spec, parameters, kernels, spec.max_context, adapted=adapted))
    model = HiddenStateModel(spec, parameters, kernels, spec.max_context, hidden_rows(config), adapted=adapted)
    loaded = ModelWithDraft(model, drawn_hidden=model.drawn_hidden)
    if config.draft is None or kind is DraftKind.MODEL:
        return loaded
    if kind is DraftKind.HEADS:
        heads = load_medusa_heads(config.draft, spec, parameters, kernels)
        memory_bytes = draft_bytes(config, spec, parameters.dtype, parameters.embedding.device)
        return replace(loaded, proposer=partial(HeadsProposer, heads, model.drawn_hidden, memory_bytes))
    mine = draft_config(config)
    own = kernels_of(mine, read_eagle(config.draft, spec).spec)
    eagle = load_eagle(config.draft, spec, parameters, own, hidden_rows(mine))
    states = TargetStates(model.drawn_hidden, parameters.final_norm, spec.norm_eps)
    return replace(loaded, eagle=eagle, states=states)


def eagle_proposer(
    loaded: ModelWithDraft, start: StartModel, config: EngineConfig, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Start the EAGLE head of a model, if it has one, before the model's KV pages; returns its proposer."""
    head, states = loaded.eagle, loaded.states
    if head is None or states is None:
        return None
    device, spec = parse_device(config.device), loaded.model.spec
    total = kv_cache_bytes(device, config.memory_fraction, 0) if kv.both is None else kv.both
    share = int(total * _kv_share(config, spec, page_tokens, device))
    cache, stepper = start(replace(draft_config(config), kv_cache_bytes=share), head)
    runner = EagleRunner(head, cache, stepper)
    warm_up(runner.run, cache, runner.facts.max_context, None)
    memory = {"weights": draft_bytes(config, spec, head.dtype, device), "kv": cache.storage.nbytes}
    return lambda: EagleProposer(runner, states, memory)


def draft_model_of(
    load: LoadModel, config: EngineConfig, spec: ModelSpec, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Load the draft model of `config.draft`, if it has one, before the target's KV pages; returns its proposer.

    ModelError for one that cannot be served, or with other tokens.
    """
    if config.draft is None or draft_kind(config.draft) is not DraftKind.MODEL:
        return None
    runner = load_draft_model(load, config, spec, page_tokens, kv.both)
    return lambda: DraftModel(runner, memory_of(runner))
