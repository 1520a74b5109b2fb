"""The file of `--plot`, and the module that plots, which needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_SUFFIXES = (".svg", ".png")


def check_picture(file: Path) -> None:
    """Raise InvalidArgument if a picture cannot be drawn in `file`."""
    from tandem.protocol.errors import InvalidArgument

    if not file.absolute().parent.is_dir():
        raise InvalidArgument("--plot", f"{file.parent} is no folder; make it first")
    if file.suffix not in _SUFFIXES:
        raise InvalidArgument("--plot", f"{file.name} ends in neither .svg nor .png")
    pictures()


def pictures() -> ModuleType:
    """Import the module that plots. Raises InvalidArgument if matplotlib is missing."""
    from tandem.protocol.errors import InvalidArgument
    from tandem.version import install_command

    try:
        from tandem.cli.load import pictures as module
    except ModuleNotFoundError:
        raise InvalidArgument("--plot", f"needs matplotlib; {install_command('plots')}") from None
    return module
