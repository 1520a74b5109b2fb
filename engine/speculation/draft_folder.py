"""The folder of `--draft`: weights that propose drafts; its config.json says of which kind they are."""

from enum import Enum
from pathlib import Path

from engine.config.model import ModelSpec
from engine.models.load_spec import load_spec, read_json
from engine.speculation.draft_runner import check_draft_model
from engine.speculation.heads.folder import CONFIG, read_heads
from wire.errors import ModelError

_HEADS_FIELD = "medusa_num_heads"


class DraftKind(Enum):
    """The kinds of trained weights."""

    HEADS = "heads"
    """Medusa heads over the model's own hidden states."""
    MODEL = "model"
    """A complete model with the same vocabulary."""


def draft_kind(folder: Path) -> DraftKind:
    """Return the kind of weights that config.json describes; ModelError if there is none that is served."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; --draft needs the folder of a model, or of heads.")
    config = read_json(folder / CONFIG)
    if _HEADS_FIELD in config or config.get("model_type") == "medusa":
        return DraftKind.HEADS
    try:
        load_spec(folder)
    except ModelError as error:
        described = config.get("architectures") or config.get("model_type") or "no known weights"
        raise ModelError(
            f"{folder / CONFIG} describes {described}; served as drafts are complete models, and Medusa heads"
            f" ({_HEADS_FIELD})."
        ) from error
    return DraftKind.MODEL


def check_draft_folder(folder: Path, spec: ModelSpec, tokenizer: Path) -> None:
    """Check the headers of all files; ModelError says what does not fit the model, or is missing.

    `tokenizer` is the folder with the tokenizer of the model.
    """
    if draft_kind(folder) is DraftKind.HEADS:
        read_heads(folder, spec)
    else:
        check_draft_model(folder, spec, tokenizer)
