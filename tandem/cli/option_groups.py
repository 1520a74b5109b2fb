"""Groups of command options: each group is a dataclass whose fields are the options.

Typer only supports a flat list of parameters, which commands with the same options would have to repeat.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

R = TypeVar("R")


def option_groups(command: Callable[..., R]) -> Callable[..., R]:
    """Wrap `command` for Typer: replace each parameter that is an option group by the options of the group.

    When the wrapper is called with the options, it creates the groups and passes them to `command`.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options = []
    for parameter in inspect.signature(command).parameters.values():
        group = groups.get(parameter.name)
        options += [parameter.replace(annotation=hints[parameter.name])] if group is None else _options(group)

    @functools.wraps(command)
    def flat(*arguments: Any, **given: Any) -> R:
        made = {
            name: group(**{option.name: given.pop(option.name) for option in fields(group)})
            for name, group in groups.items()
        }
        return command(*arguments, **given, **made)

    # Typer reads the options from the function's annotations and signature.
    flat.__annotations__ = {option.name: option.annotation for option in options}
    flat.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            option.name, inspect.Parameter.KEYWORD_ONLY, default=option.default, annotation=hints[option.name]
        )
        for option in fields(group)
    ]
