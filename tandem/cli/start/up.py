"""`tandem up`: starts a cluster, answers a first prompt and serves until Ctrl-C."""

from pathlib import Path
from typing import Annotated

import typer

from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.start.limit_options import LimitOptions
from tandem.cli.start.lora_options import LoraOptions
from tandem.cli.start.settings import read_settings
from tandem.cli.start.speculation_options import SpeculationOptions
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
    EngineOptions,
    HardwareOptions,
    ModelOptions,
    RoleOptions,
    StepOptions,
    TransferOptions,
)


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
    from tandem.cli.start.hardware_choice import choose_hardware
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
