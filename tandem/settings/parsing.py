"""Values of options that are no plain numbers or texts; each function takes the option's name and its value."""

from collections.abc import Sequence
from pathlib import Path

from tandem.settings.invalid import refuse

_PORT_MAX = 65535


def resolved(_option: str, path: Path) -> Path:
    """Returns the absolute path, without links."""
    return path.resolve()


def absolute(_option: str, path: Path) -> Path:
    """Returns the absolute path, whose links may change while the cluster runs."""
    return path.absolute()


def existing(option: str, path: Path) -> Path:
    """Returns the absolute path; InvalidArgument if there is none."""
    if not path.exists():
        refuse(option, f"{path} does not exist")
    return path.resolve()


def named_path(option: str, text: str) -> tuple[str, Path]:
    """Returns the name and the absolute path of NAME=PATH; InvalidArgument for anything else."""
    name, _, path = text.partition("=")
    if not name or not path or not name.isprintable():
        refuse(option, f"{text!r} is not NAME=PATH")
    return name, Path(path).resolve()


def named_paths(option: str, texts: Sequence[str]) -> tuple[tuple[str, Path], ...]:
    """Returns the names and paths of several NAME=PATH; InvalidArgument also for a name that is given twice."""
    paths: dict[str, Path] = {}
    for text in texts:
        name, path = named_path(option, text)
        if name in paths:
            refuse(option, f"has the name {name!r} twice")
        paths[name] = path
    return tuple(paths.items())


def names(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """Returns the names; InvalidArgument for one that is empty or given twice."""
    if "" in texts or len({*texts}) < len(texts):
        refuse(option, "has an empty name, or one twice; give each model name once")
    return tuple(texts)


def check_port(name: str, port: int) -> None:
    """Raises InvalidArgument unless the number is a port, or 0, any free one."""
    if not 0 <= port <= _PORT_MAX:
        refuse(name, f"{port} is not a port (0 to {_PORT_MAX})")


def check_key(name: str, key: str) -> None:
    """Raises InvalidArgument for `name` unless `key` is visible ASCII without spaces, as headers require."""
    if not key:
        refuse(name, "is empty, and an empty key would let everybody in; give a key or leave it out")
    if not all("!" <= char <= "~" for char in key):
        refuse(name, "must be ASCII letters, digits and signs without spaces; choose another key")
