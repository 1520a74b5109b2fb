"""Loads the weights that propose draft tokens, in addition to the target model, which verifies these tokens."""

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
from tandem.engine.parallel.collectives import Collectives
from tandem.engine.parallel.context_model import ContextModel
from tandem.engine.parallel.rank_model import RankModel
from tandem.engine.speculation.draft_folder import DraftKind, draft_bytes, draft_kind
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.folder import read_eagle
from tandem.engine.speculation.eagle.model import EagleModel, load_eagle
from tandem.engine.speculation.eagle.proposer import EagleProposer, TargetStates
from tandem.engine.speculation.eagle.runner import EagleRunner, Launcher
from tandem.engine.speculation.heads.hidden_states import HiddenStateModel, HiddenStateRankModel, hidden_rows
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
from tandem.protocol.errors import InvalidArgument

MakeKernels = Callable[[EngineConfig, ModelSpec], Kernels]
"""A function that creates the kernels of a model."""
StartModel = Callable[[EngineConfig, DecoderModel], tuple[PagedCache, Launcher]]
"""A function that allocates the KV pages of a model and returns them with the launcher of the model's steps."""
MakeProposer = Callable[[], Proposer]
"""A function that creates a proposer, which then belongs to the engine's thread."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory of KV pages in bytes; None = the memory left on the GPU after everything else is allocated."""

    target: int | None
    both: int | None
    """The memory of the target's and the draft's KV pages together."""


def split_kv(
    config: EngineConfig, spec: ModelSpec, page_tokens: int, device: torch.device, default: int | None
) -> KvMemory:
    """Split the KV memory between the target and a draft that has KV.

    The memory to split is `kv_cache_bytes` of `config` or, if that is None, `default`.
    """
    both = default if config.kv_cache_bytes is None else config.kv_cache_bytes
    if both is None:
        return KvMemory(None, None)
    return KvMemory(both - int(both * _kv_share(config, spec, page_tokens, device)), both)


def _kv_share(config: EngineConfig, spec: ModelSpec, page_tokens: int, device: torch.device) -> float:
    """Return the share of the KV memory that the draft needs to have KV for as many tokens as the target.

    The share is 0 if the draft has no KV. The KV of an EAGLE head has the dtype of the target's KV.
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
    """A model, and the weights loaded with it to propose draft tokens."""

    model: DecoderModel
    proposer: MakeProposer | None = None
    drawn_hidden: Tensor | None = None
    """The buffer `HiddenStateModel.drawn_hidden`; None if nothing reads hidden states."""
    eagle: EagleModel | None = None
    """The EAGLE head, which gets a separate stepper; None if the draft is of another kind."""
    states: TargetStates | None = None
    """The hidden states and the final norm of the model, which the EAGLE head reads; None without an EAGLE head."""


def model_with_draft(
    config: EngineConfig,
    spec: ModelSpec,
    parameters: Parameters,
    kernels: Kernels,
    kernels_of: MakeKernels,
    *,
    adapted: AdaptedProducts | None = None,
    collectives: Collectives | None = None,
) -> ModelWithDraft:
    """Return the model, together with the Medusa heads or the EAGLE head of `config.draft`, if any.

    Raises ModelError if they do not fit the model. `adapted` is that of `DecoderModel`. `kernels_of` creates the
    kernels of an EAGLE head. With `collectives`, the model is one rank's part; the heads are not divided, and only the
    first rank has them.
    """
    plain: Callable[..., DecoderModel] = DecoderModel
    keeping: Callable[..., HiddenStateModel] = HiddenStateModel
    if collectives is not None and collectives.rank.divides_tokens:
        if config.draft is not None or config.keep_hidden:
            raise InvalidArgument(
                "draft", "ranks that divide the tokens of prompts do not decode; leave it out, or choose 1 such rank."
            )
        plain = partial(ContextModel, collectives=collectives)
    elif collectives is not None:
        plain = partial(RankModel, collectives=collectives)
        keeping = partial(HiddenStateRankModel, collectives=collectives)
    kind = None if config.draft is None else draft_kind(config.draft)
    if kind in {None, DraftKind.MODEL} and not config.keep_hidden:
        return ModelWithDraft(plain(spec, parameters, kernels, spec.max_context, adapted=adapted))
    model = keeping(spec, parameters, kernels, spec.max_context, hidden_rows(config), adapted=adapted)
    loaded = ModelWithDraft(model, drawn_hidden=model.drawn_hidden)
    if config.draft is None or kind is DraftKind.MODEL:
        return loaded
    if kind is DraftKind.HEADS:
        heads = load_medusa_heads(config.draft, spec, parameters, kernels)
        memory_bytes = draft_bytes(config, spec, parameters.dtype, parameters.final_norm.device)
        return replace(loaded, proposer=partial(HeadsProposer, heads, model.drawn_hidden, memory_bytes))
    head_config = draft_config(config)
    own = kernels_of(head_config, read_eagle(config.draft, spec).spec)
    eagle = load_eagle(config.draft, spec, parameters, own, hidden_rows(head_config))
    states = TargetStates(model.drawn_hidden, parameters.final_norm, spec.norm_eps)
    return replace(loaded, eagle=eagle, states=states)


def eagle_proposer(
    loaded: ModelWithDraft, start: StartModel, config: EngineConfig, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Start the EAGLE head, and return a function that creates its proposer; None if there is no EAGLE head.

    It must be called before the KV pages of the target are allocated.
    """
    head, states = loaded.eagle, loaded.states
    if head is None or states is None:
        return None
    device, spec = parse_device(config.device), loaded.model.spec
    total = kv_cache_bytes(device, config.gpu_memory_fraction, 0) if kv.both is None else kv.both
    share = int(total * _kv_share(config, spec, page_tokens, device))
    cache, stepper = start(replace(draft_config(config), kv_cache_bytes=share), head)
    runner = EagleRunner(head, cache, stepper)
    warm_up(runner.run, cache, runner.facts.max_context, None)
    memory = {"weights": draft_bytes(config, spec, head.dtype, device), "kv": cache.storage.nbytes}
    return lambda: EagleProposer(runner, states, memory)


def draft_model_of(
    load: LoadModel, config: EngineConfig, spec: ModelSpec, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Load the draft model of `config.draft`, and return a function that creates its proposer.

    Returns None if `config.draft` is not a draft model. It must be called before the KV pages of the target are
    allocated. Raises ModelError if the draft model cannot be served, or has another vocabulary.
    """
    if config.draft is None or draft_kind(config.draft) is not DraftKind.MODEL:
        return None
    runner = load_draft_model(load, config, spec, page_tokens, kv.both)
    return lambda: DraftModel(runner, memory_of(runner))
