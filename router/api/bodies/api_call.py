"""A parsed body of the Responses or the Messages API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from router.requests.request import ClientRequest
from tandem.protocol.errors import ContextLengthExceeded, InvalidArgument

_MESSAGE = re.compile(r"messages\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The client's names of the fields that errors of the internal chat request name."""

    turns: tuple[str, ...]
    """The field from which each message of the internal request was made."""
    renamed: Mapping[str, str]
    """The client's names of other fields."""

    def error(self, error: InvalidArgument) -> InvalidArgument:
        """Return the same error about the client's field."""
        found = _MESSAGE.match(error.field)
        if found and int(found[1]) < len(self.turns):
            field = self.turns[int(found[1])] + error.field[found.end() :]
        else:
            field = self.renamed.get(error.field, error.field)
        if isinstance(error, ContextLengthExceeded):
            return ContextLengthExceeded(field, error.message, error.lengths)
        return InvalidArgument(field, error.problem)


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A parsed body: the internal chat request, and the requested form of the reply."""

    request: ClientRequest
    stream: bool
    ignored: tuple[str, ...]
    """Names of the ignored fields, fit for a header (`UnknownFields`)."""
    names: FieldNames
    echo: str = ""
    """The members of the JSON reply that repeat the request, each followed by a comma."""
    namespaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The namespace, and the name within it, of the functions in namespaces, by the names that the model gets."""
