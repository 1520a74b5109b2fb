"""The config.json files of well-known models, for performance runs with random weights."""

import json
from pathlib import Path

from tandem.engine.config.model import ModelSpec
from tandem.engine.models.load_spec import parse_spec
from tandem.protocol.errors import InvalidArgument

_HERE = Path(__file__).parent


def shape_names() -> list[str]:
    """Return the names that `shape_file` accepts."""
    return sorted(file.stem for file in _HERE.glob("*.json"))


def shape_file(name: str) -> Path:
    """Return the config.json of the model `name` ("llama-3-8b"). Raises InvalidArgument, which lists all names."""
    if name not in shape_names():
        raise InvalidArgument("random_weights", f"{name!r} is no known shape; choose {', '.join(shape_names())}.")
    return _HERE / f"{name}.json"


def shape_config(name: str) -> ModelSpec:
    """Return the spec of the model of this shape. Raises InvalidArgument as `shape_file` does."""
    return parse_spec(json.loads(shape_file(name).read_text(encoding="utf-8")))


def write_shape(name: str, folder: Path) -> Path:
    """Write a model folder of this shape, without weights and tokenizer, to `folder`; return `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(shape_file(name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder
