"""`tandem up`: start a cluster, answer a first prompt, serve until Ctrl-C."""

from pathlib import Path

from cli.option_groups import option_groups
from cli.plain_errors import plain_errors
from cli.up_options import (
    ClusterOptions,
    DoorOptions,
    FirstPromptOptions,
    OutlivingOptions,
    PlaceOptions,
    PlannerOptions,
    ServiceOptions,
)
from cli.worker_options import (
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
    model: ModelOptions,
    roles: RoleOptions,
    steps: StepOptions,
    engine: EngineOptions,
    transfer: TransferOptions,
    hardware: HardwareOptions,
    places: PlaceOptions,
    planner: PlannerOptions,
    doors: DoorOptions,
    outliving: OutlivingOptions,
    service: ServiceOptions,
    answer: FirstPromptOptions,
) -> None:
    """Start a cluster and serve until Ctrl-C."""
    from cli.serving import serve
    from cluster.config import ClusterConfig

    model.check()
    engine.check()
    roles.check()
    sampling = answer.sampling
    config = ClusterConfig(Path())
    groups: tuple[ClusterOptions, ...]
    groups = (model, roles, steps, engine, transfer, hardware, places, planner, doors, outliving, service)
    for group in groups:
        config = group.apply(config)
    first = answer.first(sampling)
    serve(config, model.path(), first, once=answer.once)
