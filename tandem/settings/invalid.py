"""Raises the error of a wrong setting.

The error's module is imported on use, because it imports gRPC, which `tandem --help` does not need.
"""

from typing import NoReturn


def refuse(name: str, problem: str) -> NoReturn:
    """Raise InvalidArgument for the setting `name`."""
    from tandem.protocol.errors import InvalidArgument

    raise InvalidArgument(name, problem)
