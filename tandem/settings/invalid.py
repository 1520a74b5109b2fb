"""The error of a wrong setting, imported late: it imports gRPC, which `tandem --help` does without."""

from typing import NoReturn


def refuse(name: str, problem: str) -> NoReturn:
    """Raises InvalidArgument for the setting `name`."""
    from tandem.protocol.errors import InvalidArgument

    raise InvalidArgument(name, problem)
