"""Loading of the trained weights that propose drafts, beside the model that verifies them."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.config.model import ModelSpec
from engine.kernels.base import Kernels
from engine.models.decoder import DecoderModel
from engine.models.parameters import Parameters
from engine.speculation.draft_folder import draft_kind
from engine.speculation.heads.hidden_states import HiddenStateModel
from engine.speculation.heads.medusa import load_medusa_heads
from engine.speculation.heads.proposer import HeadsProposer
from engine.speculation.proposer import BatchProposer

MakeProposer = Callable[[], BatchProposer]
"""Returns a new proposer, which belongs to the engine's thread."""


def model_with_draft(
    config: EngineConfig, spec: ModelSpec, parameters: Parameters, kernels: Kernels
) -> tuple[DecoderModel, MakeProposer | None]:
    """Return the model, and its proposer if `config.draft` names one; ModelError for a folder that does not fit."""
    if config.draft is None:
        return DecoderModel(spec, parameters, kernels, spec.max_context), None
    draft_kind(config.draft)
    heads = load_medusa_heads(config.draft, spec, parameters, kernels)
    # Every row of a step may draw, and a step of prompts may have as many rows as tokens.
    rows = max(config.max_batch_requests, config.max_step_tokens)
    model = HiddenStateModel(spec, parameters, kernels, spec.max_context, rows)
    return model, lambda: HeadsProposer(heads, model.drawn_hidden)
