"""The options of `tandem up`, generated from the settings tree, and the conversion of their values to settings."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandem.settings.cluster import ClusterSettings
from tandem.settings.options import Option, options_of, read_options
from tandem.settings.setting import Topic

if TYPE_CHECKING:
    from tandem.settings.router import RouterSettings

OPTIONS = {option.name: option for option in options_of(ClusterSettings)}
"""All options of the settings tree by parameter name, in the order of `--help`."""


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Add all options of the settings tree to `command`, which gets their values by name in the argument `given`."""
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "given"]

    @functools.wraps(command)
    def flat(*arguments: Any, **given: Any) -> None:
        values = {name: given.pop(name) for name in OPTIONS}
        command(*arguments, **given, given=values)

    parameters = [*own, *(_parameter(option) for option in OPTIONS.values())]
    # Typer reads the options from the function's annotations and signature.
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return flat


def _parameter(option: Option) -> inspect.Parameter:
    aliases = option.setting.aliases
    described = typer.Option(
        *option.flags,
        envvar=option.variable,
        help=f"{option.help} vLLM's name: {', '.join(aliases)}." if aliases else option.help,
        metavar=option.setting.metavar,
        rich_help_panel=None if option.topic is Topic.FIRST else option.topic.value,
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=option.default,
        annotation=Annotated[option.kind, described],
    )


def settings_of(given: Mapping[str, Any]) -> ClusterSettings:
    """Return the cluster's settings from the options' values. Raises InvalidArgument, which names an option.

    Secrets are read from their files. Files and names that the router would reject at its start are rejected here.
    """
    from tandem.cli.connection.secret_files import one_key

    values = {**given, "model": given["model"] or ""}
    for option in OPTIONS.values():
        if option.file:
            secret = option.name.removesuffix("_file")
            values[secret] = one_key(option.flag, given[secret], given[option.name] or "")
    settings = read_options(ClusterSettings, values)
    _check_router(settings.router)
    return settings


def _check_router(router: RouterSettings) -> None:
    """Raise InvalidArgument, before anything starts, for settings that the router would reject at its start."""
    from router.observability.otlp import check_endpoint
    from router.text.answer_syntax.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
    from router.workers.kv_events import check_libraries
    from tandem.cli.connection.secret_files import check_key_file
    from tandem.net.security.server_tls import load
    from tandem.protocol.errors import InvalidArgument

    for option, name, names in (
        ("--tool-call-parser", router.tool_call_parser, TOOL_CALL_PARSERS),
        ("--reasoning-parser", router.reasoning_parser, REASONING_PARSERS),
    ):
        if name not in ("auto", "none", *names):
            raise InvalidArgument(option, f"{name!r} is not one of auto, none, {', '.join(names)}")
    check_endpoint(router.otlp_endpoint)
    if router.kv_events_endpoint:
        check_libraries()
    if router.api_key_file is not None:
        check_key_file("--api-key-file", router.api_key_file)
    if router.tls is not None:
        load(router.tls)
