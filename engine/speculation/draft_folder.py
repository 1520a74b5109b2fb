"""The folder of `--draft`: trained weights that propose drafts; its config.json says of which kind they are."""

from enum import Enum
from pathlib import Path

from engine.config.model import ModelSpec
from engine.models.load_spec import read_json
from engine.speculation.heads.folder import CONFIG, read_heads
from wire.errors import ModelError

_HEADS_FIELD = "medusa_num_heads"


class DraftKind(Enum):
    """The kinds of trained weights."""

    HEADS = "heads"
    """Medusa heads over the model's own hidden states."""


def draft_kind(folder: Path) -> DraftKind:
    """Return the kind of weights that config.json describes; ModelError if there is none that is served."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; --draft needs the folder that `tandem train-draft` wrote.")
    config = read_json(folder / CONFIG)
    if _HEADS_FIELD in config or config.get("model_type") == "medusa":
        return DraftKind.HEADS
    described = config.get("architectures") or config.get("model_type") or "no known weights"
    raise ModelError(f"{folder / CONFIG} describes {described}; served as drafts are Medusa heads ({_HEADS_FIELD}).")


def check_draft_folder(folder: Path, spec: ModelSpec) -> None:
    """Check the headers of all files; ModelError says what does not fit the model, or is missing."""
    draft_kind(folder)
    read_heads(folder, spec)
