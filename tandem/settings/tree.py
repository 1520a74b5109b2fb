"""Access to the fields of the settings tree by their name, without the branch that they belong to."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import Field, fields, replace
from typing import Any, TypeVar, cast

from tandem.settings.setting import Settings, branch_of

S = TypeVar("S", bound=Settings)


def fields_by_name(tree: Any) -> dict[str, tuple[str, Field[Any]]]:
    """Return the fields of the tree by name, each with its dotted path, such as `engine.page_tokens` for `page_tokens`.

    Of several fields with the same name, the one closest to the root is returned; if several are equally close, the
    name is left out.
    """
    named: dict[str, tuple[str, Field[Any]]] = {}
    level = [("", tree)]
    while level:
        found = [(f"{path}{field.name}", field) for path, branch in level for field in fields(branch)]
        counts = Counter(field.name for _, field in found)
        # Levels are visited from the root down, so a name that is already known wins over the same name further down.
        named = {field.name: (path, field) for path, field in found if counts[field.name] == 1} | named
        level = [(f"{path}.", branch) for path, field in found if (branch := branch_of(field)) is not None]
    return named


def replace_fields(settings: S, values: Mapping[str, Any]) -> S:
    """Return a copy of the settings with the named fields replaced; a field may belong to any branch.

    Raises TypeError for an unknown name.
    """
    named = fields_by_name(type(settings))
    if unknown := values.keys() - named.keys():
        raise TypeError(f"{', '.join(sorted(unknown))}: no such setting")
    return _replaced(settings, {named[name][0]: value for name, value in values.items()})


def _replaced(settings: S, values: Mapping[str, Any]) -> S:
    """Return a copy of the settings with the fields at these dotted paths replaced."""
    made: dict[str, Any] = {path: value for path, value in values.items() if "." not in path}
    for branch in {path.partition(".")[0] for path in values.keys() - made.keys()}:
        prefix = f"{branch}."
        inner = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
        made[branch] = _replaced(getattr(settings, branch), inner)
    return replace(cast(Any, settings), **made)  # type: ignore[no-any-return]
