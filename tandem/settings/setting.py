"""A setting is a dataclass field with its help, limits and command-line option; a `Settings` is a tree of settings."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, fields, replace
from enum import Enum, StrEnum
from typing import Any, Self, TypeVar, cast, get_args

from tandem.settings.invalid import refuse

T = TypeVar("T")
_S = TypeVar("_S", bound="Settings")

_KEY = "setting"
FIELD_DEFAULT = object()
"""Value of `Setting.automatic` for an option that has the same default as its field."""
AUTO = "auto"
"""Value of --mode and --device with which `tandem up` chooses by the hardware and the other options."""


class Topic(StrEnum):
    """The groups of settings in `tandem up --help` and the docs, in the order in which they appear."""

    FIRST = "First settings"
    MODEL = "Model"
    ENGINE = "Engine"
    STEPS = "Steps"
    SPECULATION = "Speculative decoding"
    ADAPTERS = "Adapters (LoRA)"
    KV_TRANSFER = "KV transfer"
    LISTENERS = "Listeners"
    ACCESS = "Keys and TLS"
    REQUESTS = "Requests"
    LIMITS = "Limits of clients"
    HOSTS = "Ray and hosts"
    FAILURES = "Starts, failures and stops"
    PLANNER = "Planner"
    OBSERVABILITY = "Logs, metrics and traces"


@dataclass(frozen=True, slots=True)
class Setting:
    """The description of one setting. Without a `topic`, it has no option and can only be set in code."""

    help: str = ""
    topic: Topic | None = None
    position: int = 0
    """Position of the option in its topic's help; options with the same position are in the order of the tree."""
    option: str = ""
    """Name of the option without the leading dashes; empty = the field's name without the suffix `_s`."""
    variable: str = ""
    """Environment variable; empty = TANDEM_ followed by the option's name."""
    aliases: tuple[str, ...] = ()
    """Further names of the option: vLLM's names for the same option."""
    metavar: str | None = None
    kind: Any = None
    """Type of the option's value; None = the field's type."""
    parse: Callable[[str, Any], Any] | None = None
    """Function that converts the option's value to the field's; its first argument is the option's name for errors."""
    automatic: Any = FIELD_DEFAULT
    """Default of the option if it differs from the field's; `choose_hardware` replaces AUTO by a chosen value."""
    secret: bool = False
    """True if the value may also come from a file, whose path a second option with the suffix -file takes."""
    choices: Collection[str] | type[StrEnum] = ()
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    """Exclusive lower limit; `least` and `most` are inclusive."""
    unit: float = 1.0
    """Factor from the option's unit to the field's: 1e-3 if the option is in milliseconds and the field in seconds."""
    check: Callable[[str, Any], None] | None = None
    """Additional check of the field's value; its first argument is the setting's name for errors."""

    def checked(self, name: str, value: Any) -> Any:
        """Check a value, and return it, converted to an enum member if `choices` is an enum. None is always valid.

        Raises InvalidArgument for an invalid value; the error refers to the setting as `name`.
        """
        if value is None:
            return value
        if self.choices and value not in list(self.choices):
            known = [*self.choices, *([AUTO] if self.automatic == AUTO else [])]
            refuse(name, f"{value!r} is not one of {', '.join(known)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_number(name, value)
        if self.check is not None:
            self.check(name, value)
        is_enum = isinstance(self.choices, type) and issubclass(self.choices, Enum)
        return cast(type[StrEnum], self.choices)(value) if is_enum else value

    def _check_number(self, name: str, value: float) -> None:
        """Raise InvalidArgument for a value outside the limits; infinity and NaN are never valid."""
        if math.isfinite(value) and value > self.above and self.least <= value <= self.most:
            return
        shown, above, least, most = (f"{number / self.unit:g}" for number in (value, self.above, self.least, self.most))
        if self.above > -math.inf:
            refuse(name, f"{shown} is not above {above}" + (f" and at most {most}" if self.most < math.inf else ""))
        if self.most < math.inf:
            refuse(name, f"{shown} is not between {least} and {most}")
        refuse(name, f"{shown} is less than {least}" if value < self.least else f"{shown} is no finite number")


def setting(default: T, **description: Any) -> T:
    """Return a dataclass field with this default, described by the arguments of `Setting`."""
    made = Setting(**description)
    return dataclasses.field(default=default, metadata={_KEY: made}, repr=not made.secret)


def required(**description: Any) -> Any:
    """Return a dataclass field without a default, described by the arguments of `Setting`."""
    return dataclasses.field(metadata={_KEY: Setting(**description)})


def setting_of(field: Field[Any]) -> Setting | None:
    """Return the description of a field, or None if the field is not a setting."""
    return field.metadata.get(_KEY)


NameOf = Callable[[Field[Any]], str]
"""Function that returns the name of a field in errors: the field's own name or its option."""


def field_name(field: Field[Any]) -> str:
    """Return the field's own name, the default `NameOf`."""
    return field.name


class Settings:
    """Base class of the dataclasses of the settings tree; a field is a setting or a branch, again a `Settings`."""

    __slots__ = ()

    def values(self) -> dict[str, Any]:
        """Return the values of the fields by name, to create a process's configuration, which has the same fields."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    def with_fields(self, **values: Any) -> Self:
        """Return a copy with the given fields replaced; a field may belong to any branch of the tree.

        Raises TypeError for an unknown name.
        """
        named = fields_by_name(type(self))
        if unknown := values.keys() - named.keys():
            raise TypeError(f"{', '.join(sorted(unknown))}: no such setting")
        return _replaced(self, {named[name][0]: value for name, value in values.items()})

    def check(self, name_of: NameOf = field_name) -> None:
        """Check each setting of this branch and its sub-branches, and convert names to enum members.

        Raises InvalidArgument for a wrong setting; `name_of` returns its name in the error.
        """
        for field in fields(cast(Any, self)):
            description, value = setting_of(field), getattr(self, field.name)
            if isinstance(value, Settings):
                value.check(name_of)
            elif description is not None:
                object.__setattr__(self, field.name, description.checked(name_of(field), value))


def branch_of(field: Field[Any]) -> type[Settings] | None:
    """Return the class of a field that is a branch of the tree, or None if the field is a setting."""
    kinds = [
        kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type) and issubclass(kind, Settings)
    ]
    return kinds[0] if kinds else None


def fields_by_name(tree: Any) -> dict[str, tuple[str, Field[Any]]]:
    """Return the fields of the tree by name, each with its dotted path, such as `engine.page_tokens` for `page_tokens`.

    Of several fields with the same name, the one closest to the root is returned; if several are equally close, the
    name is left out.
    """
    named: dict[str, tuple[str, Field[Any]]] = {}
    level = [("", tree)]
    while level:
        located = [(f"{path}{field.name}", field) for path, branch in level for field in fields(branch)]
        counts = Counter(field.name for _, field in located)
        # Levels are visited from the root down, so a name that is already known wins over the same name further down.
        named = {field.name: (path, field) for path, field in located if counts[field.name] == 1} | named
        level = [(f"{path}.", branch) for path, field in located if (branch := branch_of(field)) is not None]
    return named


def _replaced(settings: _S, values: Mapping[str, Any]) -> _S:
    """Return a copy of the settings with the fields at these dotted paths replaced."""
    made: dict[str, Any] = {path: value for path, value in values.items() if "." not in path}
    for branch in {path.partition(".")[0] for path in values.keys() - made.keys()}:
        prefix = f"{branch}."
        inner = {path.removeprefix(prefix): value for path, value in values.items() if path.startswith(prefix)}
        made[branch] = _replaced(getattr(settings, branch), inner)
    return replace(cast(Any, settings), **made)  # type: ignore[no-any-return]
