"""The weights that propose draft tokens: those of the folder of `--draft`, or the model's own MTP layer.

The config.json of the folder says of which kind its weights are.
"""

from enum import Enum
from pathlib import Path

import torch

from tandem.engine.config import EngineConfig
from tandem.engine.config.model import ModelSpec
from tandem.engine.kernels.base import is_cpu
from tandem.engine.models.load_spec import load_spec, read_json
from tandem.engine.speculation.eagle.folder import EagleFolder, is_eagle, read_eagle
from tandem.engine.speculation.eagle.mtp import MtpLayer
from tandem.engine.speculation.heads.folder import CONFIG, read_heads
from tandem.engine.speculation.heads.hidden_states import hidden_rows
from tandem.engine.speculation.load_draft_model import (
    check_draft_model,
    draft_config,
    draft_model_bytes,
    draft_path,
)
from tandem.protocol.errors import ModelError

_HEADS_FIELD = "medusa_num_heads"
_STATES_A_ROW = 2
"""The number of hidden states that a row of a head's steps needs: its input and its output."""


class DraftKind(Enum):
    """The kind of trained weights that propose draft tokens."""

    HEADS = "heads"
    """Medusa heads, which read the model's own hidden states."""
    EAGLE = "eagle"
    """An EAGLE head: a decoder layer that reads the model's own hidden states."""
    MODEL = "model"
    """A complete, smaller model with the same vocabulary."""
    MTP = "mtp"
    """The multi-token prediction layer of the model's checkpoint, a decoder layer like an EAGLE head."""


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


def kind_of(config: EngineConfig) -> DraftKind | None:
    """Return the kind of the weights that propose draft tokens; None without such weights.

    Raises ModelError as `draft_kind` does.
    """
    if config.mtp:
        return DraftKind.MTP
    return None if config.draft is None else draft_kind(config.draft)


def read_head(config: EngineConfig, spec: ModelSpec) -> EagleFolder | MtpLayer | None:
    """Return the description of the EAGLE head or MTP layer of `config`; None if the drafts come from others.

    `spec` is that of the whole target model. Raises ModelError if the head does not fit it, or if its family has no MTP
    layer.
    """
    kind = kind_of(config)
    if kind is DraftKind.MTP:
        return MtpLayer.of(spec, None if config.random_weights else config.served.model)
    return read_eagle(draft_path(config), spec) if kind is DraftKind.EAGLE else None


def reads_output_layer(config: EngineConfig, spec: ModelSpec) -> bool:
    """Return True if heads of `config` predict tokens with the output layer of the whole model `spec`."""
    if kind_of(config) is DraftKind.HEADS:
        return not read_heads(draft_path(config), spec).own_projection
    head = read_head(config, spec)
    return head is not None and not (isinstance(head, EagleFolder) and head.own_projection)


def draft_bytes(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the memory in bytes that drafts need in addition to the target model, not counting KV.

    `spec` and `dtype` are those of the whole target model. Returns 0 without weights for drafts. A draft model needs
    its weights; Medusa heads need their weights and the hidden states that they read; an EAGLE head or MTP layer needs
    its weights and the hidden states of the head and of the target model.
    """
    kind = kind_of(config)
    if kind is None:
        return 0
    if kind is DraftKind.MODEL:
        return draft_model_bytes(config, device)
    hidden = hidden_rows(config) * spec.hidden_size * dtype.itemsize
    head = read_head(config, spec)
    if head is None:
        return read_heads(draft_path(config), spec).memory_bytes(spec, dtype.itemsize) + hidden
    states = max(len(head.target_layers), 1) * hidden
    states += _STATES_A_ROW * hidden_rows(draft_config(config)) * spec.hidden_size * dtype.itemsize
    return head.memory_bytes(dtype, on_cpu=is_cpu(device)) + states
