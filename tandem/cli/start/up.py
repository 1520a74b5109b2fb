"""`tandem up`: starts a cluster, answers a first prompt and serves until Ctrl-C."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.start.lora_options import LoraOptions
from tandem.cli.start.settings import read_settings
from tandem.cli.start.up_options import (
    ClusterOptions,
    FirstPromptOptions,
    ListenerOptions,
    OutlivingOptions,
    PlaceOptions,
    PlannerOptions,
    ServiceOptions,
)
from tandem.cli.start.worker_options import (
    AUTO,
    EngineOptions,
    HardwareOptions,
    ModelOptions,
    RoleOptions,
    StepOptions,
    TransferOptions,
)
from tandem.net.limits.listener_limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    from tandem.cli.start.worker_options import EngineOptions, RoleOptions
    from tandem.cluster.config import ClusterConfig


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Options of speculative decoding."""

    speculate: Annotated[
        str,
        typer.Option(
            help="Speculative decoding: ngram = verify what followed the last tokens when they occurred before, several"
            " tokens a step where that pays; suffix = also in earlier answers of the tenant; draft = what the"
            " model or heads of --draft propose; off; auto = ngram on a CPU, off on GPUs. Answers are the same."
        ),
    ] = "auto"
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of --speculate draft: a small model with the same tokens, which gets a part of the KV cache's"
            " memory, an EAGLE head, likewise, or Medusa heads; its config.json says which."
        ),
    ] = None

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings."""
        return replace(config, speculate=self.speculate, draft=None if self.draft is None else self.draft.resolve())


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of sizes, counts and durations at the ports for clients; see `tandem.net.limits.listener_limits`."""

    max_request_bytes: Annotated[int, typer.Option(help="Largest request, in bytes.")] = (
        DEFAULT_LIMITS.max_request_bytes
    )
    max_messages: Annotated[int, typer.Option(help="Maximum messages of a conversation.")] = 4096
    max_connections: Annotated[
        int, typer.Option(help="Maximum connections at each port, within the limit of open files.")
    ] = DEFAULT_LIMITS.max_connections
    max_calls: Annotated[int, typer.Option(help="Maximum calls in progress at each port; more are rejected, 429.")] = (
        DEFAULT_LIMITS.max_calls
    )
    header_timeout: Annotated[float, typer.Option(help="Seconds a client may take for a request's header.")] = (
        DEFAULT_LIMITS.header_timeout_s
    )
    body_timeout: Annotated[float, typer.Option(help="Seconds a client may take for a request's body.")] = (
        DEFAULT_LIMITS.body_timeout_s
    )
    idle_timeout: Annotated[float, typer.Option(help="Seconds that a connection may be open between requests.")] = (
        DEFAULT_LIMITS.idle_timeout_s
    )
    unread_timeout: Annotated[float, typer.Option(help="Seconds that a client may leave its answer unread.")] = (
        DEFAULT_LIMITS.unread_timeout_s
    )
    keepalive: Annotated[float, typer.Option(help="Seconds between keepalive pings to a silent client.")] = (
        DEFAULT_LIMITS.keepalive_s
    )

    def apply(self, config: ClusterConfig) -> ClusterConfig:
        """Returns the config with these settings. InvalidArgument names an option."""
        from tandem.net.limits.listener_limits import ListenerLimits
        from tandem.protocol.errors import InvalidArgument

        if self.max_messages < 1:
            raise InvalidArgument("--max-messages", f"is {self.max_messages}, it must be above 0")
        values = {each.name: getattr(self, each.name.removesuffix("_s")) for each in fields(ListenerLimits)}
        try:
            listeners = ListenerLimits(**values)
            return replace(config, listeners=listeners, max_messages=self.max_messages)
        except InvalidArgument as error:
            option = f"--{error.field.removesuffix('_s').replace('_', '-')}"
            raise InvalidArgument(option, error.message.partition(": ")[2]) from error


def choose_hardware(roles: RoleOptions, engine: EngineOptions, *, joined: bool) -> tuple[RoleOptions, EngineOptions]:
    """Returns the options without `auto`.

    The device is `cuda` where this host has a usable GPU, otherwise `cpu`. On GPUs every worker has a GPU of its own
    and does both prefill and decode, adaptive over two or more; on a CPU one worker prefills and one decodes.
    `--prefill`, `--decode` and `--workers` override this. `joined`: workers run on the nodes of another Ray cluster,
    whose GPUs are unknown here, so their number has to be given.
    """
    from tandem.engine.device import usable_gpus

    gpus = usable_gpus() if engine.device in {AUTO, "cuda"} else 0
    device = engine.device if engine.device != AUTO else "cuda" if gpus else "cpu"
    separate = roles.prefill is not None or roles.decode is not None
    mode = roles.mode
    if mode == AUTO:
        shared = roles.workers is not None or (device != "cpu" and not joined)
        mode = "disaggregated" if separate or not shared else "adaptive"
    workers = roles.workers
    if workers is None and device == "cuda" and not joined:
        workers = max(1, gpus)
    return replace(roles, mode=mode, workers=workers), replace(engine, device=device)


@plain_errors
@option_groups
def up(
    *,
    config: Annotated[
        Path | None,
        typer.Option(
            is_eager=True,
            callback=read_settings,
            help="YAML file with options, `http-port: 8080` a line; the command line and variables TANDEM_HTTP_PORT, …"
            " come first.",
        ),
    ] = None,
    model: ModelOptions,
    loras: LoraOptions,
    roles: RoleOptions,
    steps: StepOptions,
    engine: EngineOptions,
    speculation: SpeculationOptions,
    transfer: TransferOptions,
    hardware: HardwareOptions,
    places: PlaceOptions,
    planner: PlannerOptions,
    listeners: ListenerOptions,
    limits: LimitOptions,
    outliving: OutlivingOptions,
    service: ServiceOptions,
    answer: FirstPromptOptions,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    from tandem.cli.start.serving import serve
    from tandem.cluster.config import ClusterConfig

    model.check()
    engine.check()
    roles.check()
    sampling = answer.sampling
    roles, engine = choose_hardware(roles, engine, joined=bool(places.address))
    settings = ClusterConfig(Path())
    groups: tuple[ClusterOptions, ...]
    groups = (model, loras, roles, steps, engine, speculation, transfer, hardware, places, planner, listeners, limits)
    for group in (*groups, outliving, service):
        settings = group.apply(settings)
    first = answer.first(sampling)
    serve(settings, model.path(), first, once=answer.once)
