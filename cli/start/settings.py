"""Settings of `tandem up` and `tandem serve` from a file and from the environment, and vLLM's names of options.

An option on the command line comes before the environment, the environment before the file, the file before the
default.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

PREFIX = "TANDEM_"
_CONFIG = "config"
ALIASES: Mapping[str, Sequence[str]] = {
    "http_port": ("--port",),
    "memory_fraction": ("--gpu-memory-utilization",),
    "page_tokens": ("--block-size",),
    "max_step_tokens": ("--max-num-batched-tokens",),
    "max_batch_requests": ("--max-num-seqs",),
    "prefix_cache": ("--enable-prefix-caching",),
}
"""vLLM's names, by the option's own."""
OFF_ALIASES: Mapping[str, Sequence[str]] = {"prefix_cache": ("--no-enable-prefix-caching",)}
"""The same for the other side of a switch."""
SEVERAL = frozenset({"--served-model-name"})
"""Options that take several values, as in vLLM."""
VARIABLES: Mapping[str, str] = {"address": "TANDEM_RAY_ADDRESS"}
"""Environment variables that are not named after their option: clients read TANDEM_ADDRESS as a router's address."""


class SettingsCommand(TyperCommand):
    """A command whose options are also read from `--config FILE` and from variables TANDEM_…, and have other names."""

    def __init__(self, *args: Any, params: list[Any] | None = None, **given: Any) -> None:
        """Adds names and variables to `params`; see `TyperCommand`."""
        for option in params or ():
            if isinstance(option, TyperOption) and option.name is not None:
                option.opts += ALIASES.get(option.name, ())
                option.secondary_opts += OFF_ALIASES.get(option.name, ())
                option.envvar = option.envvar or VARIABLES.get(option.name, PREFIX + option.name.upper())
        super().__init__(*args, params=params, **given)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the command line, in which an option of `SEVERAL` may have several values."""
        return super().parse_args(ctx, _repeated(args))


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
        name = names.get(str(given).lstrip("-").replace("-", "_"))
        if name is None:
            raise typer.BadParameter(f"{file} has {given!s:.60}, which is no option", param_hint="--config")
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
