"""The text of --help: options in groups, of which --help shows the first and --help-all every one.

An option without a `rich_help_panel` belongs to the first group. The text is plain and at most 80 columns wide; a name
that is too long for its column has a line of its own.
"""

import functools
import inspect
import shutil
import textwrap
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

_FIRST = ("Arguments", "Options")
_SHOWS_ALL = "tandem.help_all"
_WIDTH = 80
_NAME_COLUMNS = 26
"""Maximum width of the column of names; a longer name has a line of its own."""
_Groups = dict[str, list[tuple[str, str]]]
"""A dict of the names under each heading, each with its description."""


class GroupedHelp(TyperCommand):
    """A command whose --help shows the first options, and says which groups --help-all adds."""

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help, or of --help-all."""
        groups = _options(self, ctx)
        further = [] if ctx.meta.get(_SHOWS_ALL) else [heading for heading in groups if heading not in _FIRST]
        notes = []
        if further:
            count = sum(len(groups.pop(heading)) for heading in further)
            notes = [f"--help-all shows {count} more options: {'; '.join(further)}."]
        return _text(self, ctx, groups, notes)


class GroupedCommands(TyperGroup):
    """A group of commands, each listed under its `rich_help_panel` with the whole first paragraph of its help."""

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help."""
        groups = _options(self, ctx)
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            heading = command.rich_help_panel or "Commands"
            groups.setdefault(heading, []).append((name, command.help.partition("\n\n")[0]))
        return _text(self, ctx, groups, [])


def _options(command: Any, ctx: Any) -> _Groups:
    groups: _Groups = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            first = "Arguments" if parameter.param_type_name == "argument" else "Options"
            groups.setdefault(getattr(parameter, "rich_help_panel", None) or first, []).append(record)
    return groups


def _text(command: Any, ctx: Any, groups: _Groups, notes: list[str]) -> str:
    blocks = [command.get_usage(ctx), *(_filled(text, 2) for text in inspect.cleandoc(command.help).split("\n\n"))]
    for heading, records in groups.items():
        column = min(_NAME_COLUMNS, max(len(name) for name, _ in records)) + 4
        blocks.append("\n".join([f"{heading}:", *(_entry(name, text, column) for name, text in records)]))
    blocks += [_filled(text, 0) for text in (*notes, command.epilog) if text]
    return "\n\n".join(blocks)


def _entry(name: str, text: str, column: int) -> str:
    described, label = _filled(text, column), f"  {name}"
    if len(label) > column - 2:
        return f"{label}\n{described}"
    return label.ljust(column) + described.lstrip()


def _filled(text: str, indent: int) -> str:
    # Names of options are not divided at their hyphens.
    width = min(_WIDTH, shutil.get_terminal_size().columns)
    spaces = " " * indent
    wrapped = textwrap.wrap(
        " ".join(text.split()), width, initial_indent=spaces, subsequent_indent=spaces, break_on_hyphens=False
    )
    return "\n".join(wrapped)


def further_option(group: str) -> Callable[..., Any]:
    """Return `typer.Option` for options that only --help-all shows, in the group with this heading."""
    return functools.partial(typer.Option, rich_help_panel=group)


def with_help_all(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with the option --help-all if any of its options is in a further group."""
    signature = inspect.signature(command, eval_str=True)
    if not any(_is_further(parameter) for parameter in signature.parameters.values()):
        return command

    @functools.wraps(command)
    def with_option(*arguments: Any, help_all: bool, **given: Any) -> None:
        command(*arguments, **given)

    parameters = [*signature.parameters.values(), _HELP_ALL]
    # Typer reads the options from the function's annotations and signature.
    with_option.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    with_option.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return with_option


def _is_further(parameter: inspect.Parameter) -> bool:
    described = getattr(parameter.annotation, "__metadata__", ())
    return any(isinstance(option, OptionInfo) and option.rich_help_panel for option in described)


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[_SHOWS_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show this message with all options."),
    ],
)
