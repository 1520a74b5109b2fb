"""Settings of `tandem up` and `tandem serve` from a file and from the environment, and vLLM's names of options.

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

PREFIX = "TANDEM_"
_CONFIG = "config"
_NEAR = 0.8
"""Names count as one with a slip if at least this share of their characters is common to both (difflib's ratio)."""
_LONGEST = 100
"""Most characters of a name that are compared."""
ALIASES: Mapping[str, Sequence[str]] = {
    "http_port": ("--port",),
    "memory_fraction": ("--gpu-memory-utilization",),
    "page_tokens": ("--block-size",),
    "max_step_tokens": ("--max-num-batched-tokens",),
    "max_batch_requests": ("--max-num-seqs",),
    "prefix_cache": ("--enable-prefix-caching",),
    "lora": ("--lora-modules",),
}
"""vLLM's names, by the option's own."""
OFF_ALIASES: Mapping[str, Sequence[str]] = {"prefix_cache": ("--no-enable-prefix-caching",)}
"""The same for the other side of a switch."""
SEVERAL = frozenset({"--served-model-name", "--lora-modules"})
"""Options that take several values, as in vLLM."""
VARIABLES: Mapping[str, str] = {"address": "TANDEM_RAY_ADDRESS"}
"""Environment variables that are not named after their option: clients read TANDEM_ADDRESS as a router's address."""


class SettingsCommand(TyperCommand):
    """A command whose options are also read from `--config FILE` and from variables TANDEM_…, and have other names."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **given: Any) -> None:
        """Adds names and variables to `params`; see `TyperCommand`."""
        for option in params or ():
            if isinstance(option, TyperOption) and option.name is not None:
                if aliases := ALIASES.get(option.name, ()):
                    option.help = f"{option.help} vLLM's name: {', '.join(aliases)}."
                option.opts += aliases
                option.secondary_opts += OFF_ALIASES.get(option.name, ())
                option.envvar = option.envvar or VARIABLES.get(option.name, PREFIX + option.name.upper())
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
        options = [option for option in self.params if isinstance(option, TyperOption)]
        names = [(option, option.opts, option.secondary_opts) for option in options]
        try:
            for option, on, off in names:
                option.opts = [each for each in on if each not in ALIASES.get(str(option.name), ())]
                option.secondary_opts = [each for each in off if each not in OFF_ALIASES.get(str(option.name), ())]
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
    for name, (alias, *_) in ALIASES.items():
        if "-" in alias.lstrip("-"):
            settings[alias.lstrip("-").replace("-", "_").upper()] = VARIABLES.get(name, PREFIX + name.upper())
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


def read_settings(ctx: typer.Context, file: Path | None) -> Path | None:
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
