"""A setting: a field of a dataclass with its help, its limits and the option by which users set it."""

import dataclasses
import math
from collections.abc import Callable, Collection
from dataclasses import Field, dataclass, fields
from enum import Enum, StrEnum
from typing import Any, TypeVar, cast, get_args

from tandem.settings.invalid import refuse

T = TypeVar("T")

_KEY = "setting"
FIELD_DEFAULT = object()
"""The default of an option that has the default of its field."""


class Topic(StrEnum):
    """The topics by which `tandem up --help` and the docs group settings, in their order."""

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
    """The description of one setting; without a `topic` it has no option, and only code and tests set it."""

    help: str = ""
    topic: Topic | None = None
    option: str = ""
    """Name of the option without dashes in front; empty = the field's name without its unit, `_s`."""
    variable: str = ""
    """Environment variable; empty = TANDEM_ and the option's name."""
    aliases: tuple[str, ...] = ()
    """vLLM's names of the option."""
    metavar: str | None = None
    kind: Any = None
    """Type of the option's value; None = that of the field."""
    parse: Callable[[str, Any], Any] | None = None
    """Makes the field's value of the option's name and value; InvalidArgument names the option."""
    automatic: Any = FIELD_DEFAULT
    """Default of the option where `tandem up` chooses the value unless it is given (`choose_hardware`)."""
    secret: bool = False
    """True if the value may also come from a file, which the option with the suffix -file names."""
    choices: Collection[str] | type[StrEnum] = ()
    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    """Exclusive lower limit."""
    unit: float = 1.0
    """The option's unit in units of the field."""
    check: Callable[[str, Any], None] | None = None
    """A further check of the field's value; its InvalidArgument has the name that it is given."""

    def checked(self, name: str, value: Any) -> Any:
        """Returns the value, as a member if the choices are an enum. InvalidArgument calls the setting `name`."""
        if value is None:
            return value
        if self.choices and value not in list(self.choices):
            refuse(name, f"{value!r} is none of {', '.join(self.choices)}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            self._check_number(name, value)
        if self.check is not None:
            self.check(name, value)
        is_enum = isinstance(self.choices, type) and issubclass(self.choices, Enum)
        return cast(type[StrEnum], self.choices)(value) if is_enum else value

    def _check_number(self, name: str, value: float) -> None:
        """Raises InvalidArgument for a value beyond the limits; infinity and NaN are beyond every limit."""
        if math.isfinite(value) and value > self.above and self.least <= value <= self.most:
            return
        shown, above, least, most = (f"{each / self.unit:g}" for each in (value, self.above, self.least, self.most))
        if self.above > -math.inf:
            refuse(name, f"{shown} is not above {above}" + (f" and at most {most}" if self.most < math.inf else ""))
        if self.most < math.inf:
            refuse(name, f"{shown} is not between {least} and {most}")
        refuse(name, f"{shown} is less than {least}" if value < self.least else f"{shown} is no finite number")


def setting(default: T, **description: Any) -> T:
    """Returns a dataclass field with this default and a `Setting`'s description."""
    made = Setting(**description)
    return dataclasses.field(default=default, metadata={_KEY: made}, repr=not made.secret)


def required(**description: Any) -> Any:
    """Returns a dataclass field without a default, with a `Setting`'s description."""
    return dataclasses.field(metadata={_KEY: Setting(**description)})


def setting_of(field: Field[Any]) -> Setting | None:
    """Returns the description of a field; None = the field is no setting."""
    return field.metadata.get(_KEY)


NameOf = Callable[[Field[Any]], str]
"""Makes the name by which errors call a field: its own, or its option."""


def field_name(field: Field[Any]) -> str:
    """Returns the field's own name."""
    return field.name


class Settings:
    """Base of the dataclasses of the tree: their fields are settings, or further such dataclasses."""

    __slots__ = ()

    def values(self) -> dict[str, Any]:
        """Returns the fields by name, for a process's record, which has the same fields."""
        return {field.name: getattr(self, field.name) for field in fields(cast(Any, self))}

    def check(self, name_of: NameOf = field_name) -> None:
        """Checks each setting of this branch and of those in it, and turns names into enum members.

        InvalidArgument names a wrong setting by `name_of`.
        """
        for field in fields(cast(Any, self)):
            description, value = setting_of(field), getattr(self, field.name)
            if isinstance(value, Settings):
                value.check(name_of)
            elif description is not None:
                object.__setattr__(self, field.name, description.checked(name_of(field), value))


def branch_of(field: Field[Any]) -> type[Settings] | None:
    """Returns the class of a field that is a branch of the tree; None = it is a setting."""
    kinds = [
        kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type) and issubclass(kind, Settings)
    ]
    return kinds[0] if kinds else None
