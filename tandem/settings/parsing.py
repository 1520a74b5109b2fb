"""Parsers of option values that are not plain numbers or texts.

Each function takes the option's name, for errors, and the value.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tandem.settings.invalid import refuse

_PORT_MAX = 65535


class NamedPath(NamedTuple):
    """A path, and the name by which it was given."""

    name: str
    path: Path


def resolved(_option: str, path: Path) -> Path:
    """Return the absolute path with symbolic links resolved."""
    return path.resolve()


def absolute(_option: str, path: Path) -> Path:
    """Return the absolute path with symbolic links kept, because they may change while the cluster runs."""
    return path.absolute()


def existing(option: str, path: Path) -> Path:
    """Return the absolute path. Raises InvalidArgument if nothing exists there."""
    if not path.exists():
        refuse(option, f"{path} does not exist")
    return path.resolve()


def named_path(option: str, text: str) -> NamedPath:
    """Parse "NAME=PATH" into the name and the absolute path. Raises InvalidArgument for any other form."""
    name, _, path = text.partition("=")
    if not name or not path or not name.isprintable():
        refuse(option, f"{text!r} is not NAME=PATH")
    return NamedPath(name, Path(path).resolve())


def named_paths(option: str, texts: Sequence[str]) -> tuple[NamedPath, ...]:
    """Parse several texts "NAME=PATH". Raises InvalidArgument for a wrong form, or a name that is given twice."""
    paths: dict[str, Path] = {}
    for text in texts:
        name, path = named_path(option, text)
        if name in paths:
            refuse(option, f"has the name {name!r} twice")
        paths[name] = path
    return tuple(NamedPath(*item) for item in paths.items())


def names(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the names. Raises InvalidArgument for a name that is empty or given twice."""
    if "" in texts or len({*texts}) < len(texts):
        refuse(option, "has an empty name, or one twice; give each model name once")
    return tuple(texts)


def check_port(name: str, port: int) -> None:
    """Raise InvalidArgument unless the number is a port, or 0 for any free port."""
    if not 0 <= port <= _PORT_MAX:
        refuse(name, f"{port} is not a port (0 to {_PORT_MAX})")


def check_key(name: str, key: str) -> None:
    """Raise InvalidArgument, which names `name`, unless `key` is visible ASCII without spaces.

    HTTP headers require such keys.
    """
    if not key:
        refuse(name, "is empty, and an empty key would let everybody in; give a key or leave it out")
    if not all("!" <= char <= "~" for char in key):
        refuse(name, "must be ASCII letters, digits and signs without spaces; choose another key")
