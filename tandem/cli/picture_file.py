"""The file of `--plot`, and the module that plots, which needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

_SUFFIXES = (".svg", ".png")


def check_picture(option: str, file: Path) -> None:
    """Raise InvalidArgument, which names the option, if a picture cannot be drawn in `file`."""
    from tandem.protocol.errors import InvalidArgument

    if not file.absolute().parent.is_dir():
        raise InvalidArgument(option, f"{file.parent} is no folder; make it first")
    if file.suffix not in _SUFFIXES:
        raise InvalidArgument(option, f"{file.name} ends in neither .svg nor .png")
    pictures(option)


def pictures(option: str) -> ModuleType:
    """Import the module that plots. Raises InvalidArgument, which names the option, if matplotlib is missing."""
    from tandem.protocol.errors import InvalidArgument
    from tandem.version import install_command

    try:
        from tandem.cli.load import pictures as module
    except ModuleNotFoundError:
        raise InvalidArgument(option, f"needs matplotlib; {install_command('plots')}") from None
    return module
