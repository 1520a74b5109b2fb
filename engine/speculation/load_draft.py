"""Loading of the weights that propose drafts, beside the model that verifies them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.config.model import ModelSpec
from engine.kernels.base import Kernels
from engine.models.decoder import DecoderModel
from engine.models.parameters import Parameters
from engine.speculation.draft_folder import DraftKind, draft_bytes, draft_kind
from engine.speculation.draft_model import DraftModel
from engine.speculation.draft_runner import LoadModel, kv_share, load_draft_runner, memory_of
from engine.speculation.heads.hidden_states import HiddenStateModel, hidden_rows
from engine.speculation.heads.medusa import load_medusa_heads
from engine.speculation.heads.proposer import HeadsProposer
from engine.speculation.proposer import Proposer

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
    """Divide the KV memory of `config`, by default `default` bytes, between the model and a draft model, if any."""
    both = default if config.kv_cache_bytes is None else config.kv_cache_bytes
    if both is None or config.draft is None or draft_kind(config.draft) is not DraftKind.MODEL:
        return KvMemory(both, both)
    return KvMemory(both - int(both * kv_share(config, spec, page_tokens, device)), both)


@dataclass(frozen=True, slots=True)
class ModelWithDraft:
    """A model, and what is loaded beside it for drafts."""

    model: DecoderModel
    proposer: MakeProposer | None = None
    drawn_hidden: Tensor | None = None
    """See `HiddenStateModel`; None where nobody needs hidden states."""


def model_with_draft(config: EngineConfig, spec: ModelSpec, parameters: Parameters, kernels: Kernels) -> ModelWithDraft:
    """Return the model, with the proposer of its heads if `config.draft` has such; ModelError if they do not fit."""
    heads_folder = config.draft if config.draft and draft_kind(config.draft) is DraftKind.HEADS else None
    if heads_folder is None and not config.keep_hidden:
        return ModelWithDraft(DecoderModel(spec, parameters, kernels, spec.max_context))
    heads = None if heads_folder is None else load_medusa_heads(heads_folder, spec, parameters, kernels)
    model = HiddenStateModel(spec, parameters, kernels, spec.max_context, hidden_rows(config))
    if heads is None:
        return ModelWithDraft(model, drawn_hidden=model.drawn_hidden)
    memory_bytes = draft_bytes(config, spec, parameters.dtype, parameters.embedding.device)
    return ModelWithDraft(model, partial(HeadsProposer, heads, model.drawn_hidden, memory_bytes), model.drawn_hidden)


def draft_model_of(
    load: LoadModel, config: EngineConfig, spec: ModelSpec, page_tokens: int, kv: KvMemory
) -> MakeProposer | None:
    """Load the draft model of `config.draft`, if it has one, before the target's KV pages; returns its proposer.

    ModelError for one that cannot be served, or with other tokens.
    """
    if config.draft is None or draft_kind(config.draft) is not DraftKind.MODEL:
        return None
    runner = load_draft_runner(load, config, spec, page_tokens, kv.both)
    return lambda: DraftModel(runner, memory_of(runner))
