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
from tandem.engine.speculation.draft_folder import DraftKind, draft_bytes, kind_of, read_head
from tandem.engine.speculation.draft_model import DraftModel
from tandem.engine.speculation.eagle.folder import EagleFolder
from tandem.engine.speculation.eagle.loading import load_head
from tandem.engine.speculation.eagle.model import HeadModel
from tandem.engine.speculation.eagle.mtp import MtpLayer
from tandem.engine.speculation.eagle.proposer import EagleProposer
from tandem.engine.speculation.eagle.runner import EagleRunner, Launcher
from tandem.engine.speculation.heads.hidden_states import HiddenStateModel, HiddenStateRankModel, hidden_rows
from tandem.engine.speculation.heads.medusa import load_medusa_heads
from tandem.engine.speculation.heads.proposer import HeadsProposer
from tandem.engine.speculation.load_draft_model import (
    LoadModel,
    draft_config,
    draft_path,
    kv_share,
    load_draft_model,
    memory_of,
    share_of,
)
from tandem.engine.speculation.proposer import Proposer, ProposerName
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
    config: EngineConfig,
    spec: ModelSpec,
    page_tokens: int,
    device: torch.device,
    default: int | None,
    *,
    whole: ModelSpec,
) -> KvMemory:
    """Split the KV memory between the target, of which this rank has the part `spec` of `whole`, and a draft with KV.

    The memory to split is `kv_cache_bytes` of `config` or, if that is None, `default`.
    """
    both = default if config.kv_cache_bytes is None else config.kv_cache_bytes
    if both is None:
        return KvMemory(None, None)
    share = _kv_share(config, spec, read_head(config, whole), page_tokens, device)
    return KvMemory(both - int(both * share), both)


def _kv_share(
    config: EngineConfig, spec: ModelSpec, head: EagleFolder | MtpLayer | None, page_tokens: int, device: torch.device
) -> float:
    """Return the share of the KV memory that the draft needs to have KV for as many tokens as the target.

    The share is 0 if the draft has no KV. The KV of a head has the dtype of the target's KV.
    """
    if head is not None:
        dtype = parse_kv_dtype(config, device, spec)
        return share_of((spec, dtype), (head.spec, dtype), page_tokens)
    return kv_share(config, spec, page_tokens, device) if kind_of(config) is DraftKind.MODEL else 0.0


@dataclass(frozen=True, slots=True)
class ModelWithDraft:
    """A model, and the weights loaded with it to propose draft tokens."""

    model: DecoderModel
    proposer: MakeProposer | None = None
    drawn_hidden: Tensor | None = None
    """The buffer `HiddenStateModel.drawn_hidden`; None if nothing reads hidden states."""
    head: HeadModel | None = None
    """The EAGLE head or MTP layer, which gets a separate stepper; None if the draft is of another kind."""


def model_with_draft(
    config: EngineConfig,
    spec: ModelSpec,
    parameters: Parameters,
    kernels: Kernels,
    kernels_of: MakeKernels,
    *,
    whole: ModelSpec,
    adapted: AdaptedProducts | None = None,
    collectives: Collectives | None = None,
) -> ModelWithDraft:
    """Return the model, together with the Medusa heads, the EAGLE head or the MTP layer of `config`, if any.

    Raises ModelError if they do not fit the model. `adapted` is that of `DecoderModel`. `kernels_of` creates the
    kernels of a head. With `collectives`, the model is one rank's part, with the spec `spec` of the model `whole`; the
    heads are not divided, and only the first rank has them.
    """
    plain: Callable[..., DecoderModel] = DecoderModel
    keeping: Callable[..., HiddenStateModel] = HiddenStateModel
    kind = kind_of(config)
    if collectives is not None and collectives.rank.divides_tokens:
        if kind is not None or config.keep_hidden:
            raise InvalidArgument(
                "draft", "ranks that divide the tokens of prompts do not decode; leave it out, or choose 1 such rank."
            )
        plain = partial(ContextModel, collectives=collectives)
    elif collectives is not None:
        plain = partial(RankModel, collectives=collectives)
        keeping = partial(HiddenStateRankModel, collectives=collectives)
    if kind in {None, DraftKind.MODEL} and not config.keep_hidden:
        return ModelWithDraft(plain(spec, parameters, kernels, spec.max_context, adapted=adapted))
    head = read_head(config, whole)
    before = () if head is None else head.target_layers
    model = keeping(spec, parameters, kernels, spec.max_context, hidden_rows(config), before=before, adapted=adapted)
    loaded = ModelWithDraft(model, drawn_hidden=model.drawn_hidden)
    if kind is DraftKind.HEADS:
        heads = load_medusa_heads(draft_path(config), spec, parameters, kernels)
        memory_bytes = draft_bytes(config, whole, parameters.dtype, parameters.final_norm.device)
        return replace(loaded, proposer=partial(HeadsProposer, heads, model.drawn_hidden, memory_bytes))
    if head is None:
        return loaded
    head_config = draft_config(config)
    own = kernels_of(head_config, head.spec)
    return replace(loaded, head=load_head(head, spec, parameters, own, hidden_rows(head_config)))


def head_proposer(
    loaded: ModelWithDraft,
    start: StartModel,
    config: EngineConfig,
    page_tokens: int,
    kv: KvMemory,
    *,
    whole: ModelSpec,
) -> MakeProposer | None:
    """Start the EAGLE head or MTP layer, and return a function that creates its proposer; None if there is neither.

    It must be called before the KV pages of the target are allocated. `whole` is the spec of the whole target model.
    """
    head, drawn_hidden = loaded.head, loaded.drawn_hidden
    if head is None or drawn_hidden is None:
        return None
    device, spec = parse_device(config.device), loaded.model.spec
    total = kv_cache_bytes(device, config.gpu_memory_fraction, 0) if kv.both is None else kv.both
    share = int(total * _kv_share(config, spec, read_head(config, whole), page_tokens, device))
    cache, stepper = start(replace(draft_config(config), kv_cache_bytes=share), head)
    runner = EagleRunner(head, cache, stepper)
    warm_up(runner.run, cache, runner.facts.max_context, None)
    memory = {"weights": draft_bytes(config, whole, head.dtype, device), "kv": cache.storage.nbytes}
    name = ProposerName.MTP if config.mtp else ProposerName.EAGLE
    return lambda: EagleProposer(runner, drawn_hidden, memory, name)


def draft_model_of(
    load: LoadModel, config: EngineConfig, spec: ModelSpec, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Load the draft model of `config.draft`, and return a function that creates its proposer.

    Returns None if `config` has no draft model. It must be called before the KV pages of the target are
    allocated. Raises ModelError if the draft model cannot be served, or has another vocabulary.
    """
    if kind_of(config) is not DraftKind.MODEL:
        return None
    runner = load_draft_model(load, config, spec, page_tokens, kv.both)
    return lambda: DraftModel(runner, memory_of(runner))
