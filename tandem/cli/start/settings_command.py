"""The command whose options, those of `tandem up` and `tandem serve`, are also read from a file and the environment.

An option on the command line comes before the environment, the environment before the file, the file before the
default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from tandem.cli.start.setting_options import OPTIONS

PREFIX = "TANDEM_"
_CONFIG = "config"
_NEAR = 0.8
"""Names count as one with a slip if at least this share of their characters is common to both (difflib's ratio)."""
_LONGEST = 100
"""Most characters of a name that are compared."""
SEVERAL = frozenset({"--served-model-name", "--lora-modules"})
"""Options that take several values, as in vLLM."""


class SettingsCommand(TyperCommand):
    """A command whose options are also read from `--config FILE` and from variables TANDEM_…."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **given: Any) -> None:
        """Gives those of `params` a variable that are no settings; see `TyperCommand`."""
        for option in params or ():
            if isinstance(option, TyperOption) and option.name is not None:
                option.envvar = option.envvar or PREFIX + option.name.upper()
        super().__init__(*args, params=params, **given)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line, in which an option of `SEVERAL` may have several values.

        BadParameter for a variable whose name is nearly that of an option.
        """
        rest = super().parse_args(ctx, _repeated(args))
        if not ctx.resilient_parsing:
            _check_variables(ctx, os.environ)
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes the help, which names aliases in the texts of options, since their column is narrow."""
        options = [option for option in self.params if isinstance(option, TyperOption) and option.name in OPTIONS]
        names = [(option, option.opts, option.secondary_opts) for option in options]
        try:
            for option, on, off in names:
                option.opts, option.secondary_opts = on[:1], off[:1]
            super().format_help(ctx, formatter)
        finally:
            for option, on, off in names:
                option.opts, option.secondary_opts = on, off


def _check_variables(ctx: typer.Context, environment: Mapping[str, str]) -> None:
    """Raises BadParameter for a variable TANDEM_… that is none of an option, but nearly has the name of one.

    Others belong to other programs: Kubernetes, for one, makes TANDEM_PORT and more for a service of the name tandem.
    """
    commands = getattr(ctx.find_root().command, "commands", {})
    known = {_variable(option) for each in (ctx.command, *commands.values()) for option in each.params}
    settings = {_variable(option).removeprefix(PREFIX): _variable(option) for option in ctx.command.params}
    for option in OPTIONS.values():
        for alias in option.setting.aliases:
            if "-" in alias.lstrip("-"):
                settings[alias.lstrip("-").replace("-", "_").upper()] = option.variable
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), settings, 1, _NEAR)
            if near:
                hint = f"did you mean {settings[near[0]]}? Unset it, or rename it"
                raise typer.BadParameter(f"is no setting; {hint}", param_hint=f"variable {name}")


def _variable(option: Any) -> str:
    return option.envvar if isinstance(option, TyperOption) and isinstance(option.envvar, str) else ""


def _repeated(args: Sequence[str]) -> list[str]:
    """Returns `--name A --name B` for `--name A B`."""
    found: list[str] = []
    option = ""
    for word in args:
        if option and not word.startswith("-") and found[-1] != option:
            found.append(option)
        found.append(word)
        if word.startswith("-"):
            option = word if word in SEVERAL else ""
    return found


def with_model_argument(up: Callable[..., None]) -> Callable[..., None]:
    """Returns `up` as a command that takes the model as an argument, too: `tandem serve MODEL`."""

    @functools.wraps(up)
    def serve(ctx: typer.Context, served_model: str | None = None, model: str | None = None, **given: Any) -> None:
        if served_model is not None:
            source = ctx.get_parameter_source("model")
            if source is not None and source.name == "COMMANDLINE":
                raise typer.BadParameter("is given twice, as an argument and as --model", param_hint="MODEL")
            model = served_model
        up(model=model, **given)

    hint = Annotated[str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)]
    argument = inspect.Parameter("served_model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)
    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    options = [context, argument, *inspect.signature(up).parameters.values()]
    serve.__annotations__ = {option.name: option.annotation for option in options}
    serve.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return serve


def read_config_file(ctx: typer.Context, file: Path | None) -> Path | None:
    """Makes the settings in a YAML file the defaults of the other options; the callback of `--config`."""
    if file is not None:
        found = [option for option in ctx.command.params if isinstance(option, TyperOption)]
        options = {option.name: option for option in found if option.name != _CONFIG}
        ctx.default_map = _named(_read(file), options, file)
    return file


def _read(file: Path) -> Mapping[str, Any]:
    import yaml

    try:
        settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise typer.BadParameter(f"{file} cannot be read ({reason})", param_hint="--config") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise typer.BadParameter(f"{file} has no settings; write one a line, as option: value", param_hint="--config")
    return settings


def _named(settings: Mapping[str, Any], options: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Returns the settings by the names of their options. BadParameter for names of none.

    Names may have dashes or underscores, and may be vLLM's.
    """
    names = {spelled.lstrip("-").replace("-", "_"): name for name, option in options.items() for spelled in option.opts}
    found: dict[str, Any] = {}
    for given, value in settings.items():
        spelled = str(given).lstrip("-").replace("-", "_")
        name = names.get(spelled)
        if name is None:
            near = difflib.get_close_matches(spelled[:_LONGEST], names, 1, _NEAR)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise typer.BadParameter(f"{file} has {given!s:.60}, which is no option{hint}", param_hint="--config")
        if name in found:
            raise typer.BadParameter(f"{file} has {given!s:.60} twice, by two names", param_hint="--config")
        option = options[name]
        many = isinstance(option, TyperOption) and option.multiple
        if isinstance(value, bool) and not (isinstance(option, TyperOption) and option.is_flag):
            raise typer.BadParameter(f"{file} has true or false for {given!s:.60}", param_hint="--config")
        if isinstance(value, list | dict) and not (many and isinstance(value, list)):
            raise typer.BadParameter(f"{file} has several values for {given!s:.60}", param_hint="--config")
        if value is not None:
            found[name] = [value] if many and not isinstance(value, list) else value
    return found
