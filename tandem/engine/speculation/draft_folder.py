"""The folder that `--draft` names: weights that propose draft tokens. Its config.json says of which kind they are."""

from enum import Enum
from pathlib import Path

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import load_spec, read_json
from tandem.engine.speculation.eagle.folder import STATES_A_ROW, is_eagle, read_eagle
from tandem.engine.speculation.heads.folder import CONFIG, read_heads
from tandem.engine.speculation.heads.hidden_states import hidden_rows
from tandem.engine.speculation.load_draft_model import check_draft_model, draft_config, draft_model_bytes
from tandem.protocol.errors import ModelError

_HEADS_FIELD = "medusa_num_heads"


class DraftKind(Enum):
    """The kind of trained weights that propose draft tokens."""

    HEADS = "heads"
    """Medusa heads, which read the model's own hidden states."""
    EAGLE = "eagle"
    """An EAGLE head: a decoder layer that reads the model's own hidden states."""
    MODEL = "model"
    """A complete, smaller model with the same vocabulary."""


def draft_kind(folder: Path) -> DraftKind:
    """Return the kind of weights that a folder's config.json describes.

    Raises ModelError if it describes no supported kind.
    """
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; --draft needs the folder of a model, or of heads.")
    config = read_json(folder / CONFIG)
    if _HEADS_FIELD in config or config.get("model_type") == "medusa":
        return DraftKind.HEADS
    if is_eagle(folder, config):
        return DraftKind.EAGLE
    try:
        load_spec(folder)
    except ModelError as error:
        described = config.get("architectures") or config.get("model_type") or "no known weights"
        raise ModelError(
            f"{folder / CONFIG} describes {described}; served as drafts are complete models, Medusa heads"
            f" ({_HEADS_FIELD}), and EAGLE heads (fc.weight)."
        ) from error
    return DraftKind.MODEL


def check_draft_folder(folder: Path, spec: ModelSpec, tokenizer: Path) -> None:
    """Check the headers of the folder's weight files, without reading weights.

    Raises ModelError, which says what is missing or does not fit the model. `tokenizer` is the folder with the
    tokenizer of the model.
    """
    kind = draft_kind(folder)
    if kind is DraftKind.HEADS:
        read_heads(folder, spec)
    elif kind is DraftKind.EAGLE:
        read_eagle(folder, spec)
    else:
        check_draft_model(folder, spec, tokenizer)


def drafting_model(folder: Path, spec: ModelSpec) -> ModelSpec | None:
    """Return the spec of the draft model, or of an EAGLE head as a model of one layer; None for Medusa heads.

    Medusa heads need no KV. `spec` is that of the target model, which verifies the draft tokens.
    """
    kind = draft_kind(folder)
    if kind is DraftKind.HEADS:
        return None
    return read_eagle(folder, spec).spec if kind is DraftKind.EAGLE else load_spec(folder)


def reads_output_layer(config: EngineConfig, spec: ModelSpec) -> bool:
    """Return True if `config.draft` is heads that predict tokens with the output layer of the model `spec`."""
    if config.draft is None:
        return False
    kind = draft_kind(config.draft)
    heads = kind is DraftKind.HEADS and not read_heads(config.draft, spec).own_projection
    return heads or kind is DraftKind.EAGLE


def draft_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the memory in bytes that `config.draft` needs in addition to the target model, not counting KV.

    `spec` and `dtype` are those of the target model. Returns 0 without a draft. A draft model needs its weights; Medusa
    heads need their weights and the hidden states that they read; an EAGLE head needs its weights and the hidden states
    of the head and of the target model.
    """
    if config.draft is None:
        return 0
    kind = draft_kind(config.draft)
    if kind is DraftKind.MODEL:
        return draft_model_bytes(config, device)
    hidden = hidden_rows(config) * spec.hidden_size * dtype.itemsize
    if kind is DraftKind.EAGLE:
        its = STATES_A_ROW * hidden_rows(draft_config(config)) * spec.hidden_size * dtype.itemsize
        return read_eagle(config.draft, spec).memory_bytes(dtype.itemsize) + hidden + its
    return read_heads(config.draft, spec).memory_bytes(spec, dtype.itemsize) + hidden
