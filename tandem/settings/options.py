"""The command-line options of a settings tree, and the conversion of their values into settings."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from enum import StrEnum
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin

from tandem.settings.invalid import refuse
from tandem.settings.setting import FIELD_DEFAULT, Setting, Settings, Topic, branch_of, setting_of

S = TypeVar("S", bound=Settings)

_UNIT = "_s"
_PREFIX = "TANDEM_"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of `tandem up`, which is also a key of its YAML file and an environment variable."""

    field: Field[Any]
    setting: Setting
    file: bool = False
    """True for a secret's second option, with the suffix -file: its value is the path of a file with the secret."""

    @property
    def name(self) -> str:
        """The name of the option's parameter, with underscores, such as `kv_lease`."""
        name = self.setting.option.replace("-", "_") or self.field.name.removesuffix(_UNIT)
        return f"{name}_file" if self.file else name

    @property
    def flag(self) -> str:
        """The option on the command line, such as `--kv-lease`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def flags(self) -> tuple[str, ...]:
        """All names on the command line; a switch that is on by default has names like `--name/--no-name`."""
        if self.kind is not bool or not self.default:
            return self.flag, *self.setting.aliases
        names = (self.flag, *self.setting.aliases)
        return tuple(f"{name}/--no-{name.removeprefix('--')}" for name in names)

    @property
    def variable(self) -> str:
        """The environment variable, such as `TANDEM_KV_LEASE`."""
        if self.setting.variable:
            return f"{self.setting.variable}_FILE" if self.file else self.setting.variable
        return _PREFIX + self.name.upper()

    @property
    def topic(self) -> Topic:
        """The topic under which the help lists the option."""
        assert self.setting.topic is not None
        return self.setting.topic

    @property
    def help(self) -> str:
        """The option's help text."""
        return (
            f"File with it, where {self.flag.removesuffix('-file')} is not given." if self.file else self.setting.help
        )

    @property
    def kind(self) -> Any:
        """The Python type of the option's value, such as `list[str] | None`."""
        kind: Any = self.setting.kind or self.field.type
        if self.file:
            return str | None
        if get_origin(kind) is tuple:
            return list[str] | None
        if isinstance(kind, type) and issubclass(kind, StrEnum):
            kind = str
        if NoneType in get_args(kind):
            return kind
        return kind | None if self.setting.parse or self.setting.automatic is None else kind

    @property
    def default(self) -> Any:
        """The option's value if the user does not give it; None if the default is that of the settings field."""
        if self.setting.automatic is not FIELD_DEFAULT:
            return self.setting.automatic
        if NoneType in get_args(self.kind):
            return None
        return str(self.field.default) if self.kind is str else self.field.default

    def read(self, value: Any) -> Any:
        """Convert the option's value to the settings field's value. Raises InvalidArgument, which names the option."""
        if self.setting.parse is not None:
            return self.setting.parse(self.flag, value)
        if self.setting.unit != 1.0:
            scaled = self.setting.checked(self.flag, value * self.setting.unit)
            return int(scaled) if int in (self.field.type, *get_args(self.field.type)) else scaled
        if isinstance(value, list):
            return tuple(dict.fromkeys(value))
        return value


def options_of(tree: type[Settings]) -> tuple[Option, ...]:
    """Return all options of a settings tree, grouped by topic."""
    topics = list(Topic)
    return tuple(sorted(_options(tree), key=lambda option: (topics.index(option.topic), option.setting.position)))


def _options(tree: Any) -> Iterator[Option]:
    for field in fields(tree):
        branch, description = branch_of(field), setting_of(field)
        if branch is not None:
            yield from _options(branch)
        elif description is not None and description.topic is not None:
            yield Option(field, description)
            if description.secret:
                yield Option(field, description, file=True)


def option_of(field: Field[Any]) -> str:
    """Return the command-line option of a settings field, or the field's name if it has no option."""
    description = setting_of(field)
    return field.name if description is None or description.topic is None else Option(field, description).flag


def read_options(tree: type[S], given: Mapping[str, Any]) -> S:
    """Create the settings of a tree from option values, which are given by option name.

    If a value equals the option's default, the field keeps its own default. Raises InvalidArgument, which names the
    option.
    """
    return tree(**_values(tree, given))


def _values(tree: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(tree):
        branch, description = branch_of(field), setting_of(field)
        if branch is not None:
            inner = _values(branch, given)
            if inner:
                _require(branch, inner)
                values[field.name] = branch(**inner)
        elif description is not None and description.topic is not None:
            option = Option(field, description)
            value = given.get(option.name, option.default)
            if value != option.default:
                values[field.name] = option.read(value)
    return values


def _require(branch: Any, values: Mapping[str, Any]) -> None:
    """Raise InvalidArgument if a required field of the branch is missing although other fields are given."""
    needed = [field for field in fields(branch) if field.default is MISSING and field.default_factory is MISSING]
    for field in needed:
        if field.name not in values:
            together = " and ".join(option_of(other) for other in needed)
            refuse(option_of(field), f"is missing; {together} belong together")
