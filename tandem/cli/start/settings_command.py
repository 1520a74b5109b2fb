"""The command class of `tandem up` and `tandem serve`, whose options may also come from a file and the environment.

The command line takes precedence over the environment, the environment over the file, the file over the default.
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
from typer.core import TyperOption

from tandem.cli.help_text import GroupedHelp
from tandem.cli.start.setting_options import OPTIONS

PREFIX = "TANDEM_"
WAYS_TO_SET = (
    "Each option may also be a line of the YAML file that --config names, such as device: cpu, or an environment"
    " variable, such as TANDEM_DEVICE=cpu, unless the option shows another name."
)
_CONFIG = "config"
_NEAR = 0.8
"""Minimum similarity (difflib's ratio) with which an unknown name counts as a misspelling of a known one."""
_LONGEST = 100
"""Maximum number of characters of a name that are compared with known names."""
SEVERAL = frozenset({"--served-model-name", "--lora-modules"})
"""Options that take several values after one flag, as in vLLM."""


class SettingsCommand(GroupedHelp):
    """A command whose options may also come from `--config FILE` and from variables TANDEM_…."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **given: Any) -> None:
        """Create the command; an option in `params` without an environment variable gets TANDEM_ followed by its name.

        The help names only variables that have another name. The arguments are those of `TyperCommand`.
        """
        for option in params or ():
            if isinstance(option, TyperOption) and option.name is not None:
                usual = PREFIX + option.name.upper()
                option.envvar = option.envvar or usual
                option.show_envvar = option.envvar != usual
        super().__init__(*args, params=params, **given)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, in which an option of `SEVERAL` may have several values.

        Raises BadParameter for an environment variable whose name is a misspelling of an option's variable.
        """
        rest = super().parse_args(ctx, _repeated(args))
        if not ctx.resilient_parsing:
            _check_variables(ctx, os.environ)
        return rest

    def get_help(self, ctx: Any) -> str:
        """Return the help with only the first name of each setting's option.

        The option's help text mentions the other names, because the column of names is narrow.
        """
        options = [option for option in self.params if isinstance(option, TyperOption) and option.name in OPTIONS]
        names = [(option, option.opts, option.secondary_opts) for option in options]
        try:
            for option, on, off in names:
                option.opts, option.secondary_opts = on[:1], off[:1]
            return super().get_help(ctx)
        finally:
            for option, on, off in names:
                option.opts, option.secondary_opts = on, off


def _check_variables(ctx: typer.Context, environment: Mapping[str, str]) -> None:
    """Raise BadParameter for a variable TANDEM_… that belongs to no option but is similar to an option's variable.

    Other variables belong to other programs: Kubernetes, for example, sets TANDEM_PORT and more for a service named
    tandem.
    """
    commands = getattr(ctx.find_root().command, "commands", {})
    known = {_variable(option) for command in (ctx.command, *commands.values()) for option in command.params}
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
    """Rewrite `--name A B` as `--name A --name B`."""
    rewritten: list[str] = []
    option = ""
    for word in args:
        if option and not word.startswith("-") and rewritten[-1] != option:
            rewritten.append(option)
        rewritten.append(word)
        if word.startswith("-"):
            option = word if word in SEVERAL else ""
    return rewritten


def with_model_argument(up: Callable[..., None]) -> Callable[..., None]:
    """Return `up` as a command that also takes the model as an argument: `tandem serve MODEL`."""

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
    """Use the settings in a YAML file as defaults of the other options; this is the callback of `--config`."""
    if file is not None:
        typer_options = [option for option in ctx.command.params if isinstance(option, TyperOption)]
        options = {option.name: option for option in typer_options if option.name != _CONFIG}
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
    """Return the settings of the YAML file by the parameter names of their options.

    Names in the file may have dashes or underscores, and may be vLLM's names. Raises BadParameter for unknown names.
    """
    names = {spelled.lstrip("-").replace("-", "_"): name for name, option in options.items() for spelled in option.opts}
    values: dict[str, Any] = {}
    for given, value in settings.items():
        spelled = str(given).lstrip("-").replace("-", "_")
        name = names.get(spelled)
        if name is None:
            near = difflib.get_close_matches(spelled[:_LONGEST], names, 1, _NEAR)
            hint = f"; did you mean {near[0].replace('_', '-')}?" if near else ""
            raise typer.BadParameter(f"{file} has {given!s:.60}, which is no option{hint}", param_hint="--config")
        if name in values:
            raise typer.BadParameter(f"{file} has {given!s:.60} twice, by two names", param_hint="--config")
        option = options[name]
        many = isinstance(option, TyperOption) and option.multiple
        if isinstance(value, bool) and not (isinstance(option, TyperOption) and option.is_flag):
            raise typer.BadParameter(f"{file} has true or false for {given!s:.60}", param_hint="--config")
        if isinstance(value, list | dict) and not (many and isinstance(value, list)):
            raise typer.BadParameter(f"{file} has several values for {given!s:.60}", param_hint="--config")
        if value is not None:
            values[name] = [value] if many and not isinstance(value, list) else value
    return values
