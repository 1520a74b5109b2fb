"""`tandem up`: start a cluster, answer a first prompt, serve until Ctrl-C."""

from pathlib import Path

from cli.option_groups import option_groups
from cli.plain_errors import plain_errors
from cli.up_options import DoorOptions, FirstPromptOptions, PlaceOptions, PlannerOptions, ServiceOptions
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
    config = ClusterConfig(
        model=Path(model.model or ""),
        mode=roles.mode,
        prefill=1 if roles.prefill is None else roles.prefill,
        decode=1 if roles.decode is None else roles.decode,
        workers=1 if roles.workers is None else roles.workers,
        step_policy=steps.step_policy,
        step_budget=steps.step_budget,
        itl_target_s=steps.itl_target_s,
        device=engine.device,
        dtype=engine.dtype,
        page_tokens=engine.page_tokens,
        kv_cache_bytes=engine.kv_cache_bytes,
        memory_fraction=engine.memory_fraction,
        max_step_tokens=engine.max_step_tokens,
        max_batch_requests=engine.max_batch_requests,
        prefix_cache=engine.prefix_cache,
        kv_checksum_rate=transfer.kv_checksum_rate,
        kv_direction=transfer.kv_direction,
        kv_lease_s=transfer.kv_lease,
        kv_transfer_deadline_s=transfer.kv_transfer_deadline,
        kv_quarantine_share=transfer.kv_quarantine_share,
        ceilings=hardware.ceilings,
        threads=hardware.threads,
        ray_address=places.address,
        places_timeout_s=places.places_timeout,
        start_timeout_s=places.start_timeout,
        host=doors.host,
        grpc_port=doors.grpc_port,
        http_port=doors.http_port,
        metrics_port=doors.metrics_port,
        metrics_key=doors.metrics_key,
        controller_port=doors.controller_port,
        token=doors.token,
        otlp_endpoint=doors.otlp_endpoint,
        log_format=doors.log_format,
        slo_classes=service.slo_classes,
        default_slo_class=service.default_slo_class,
        api_keys=tuple(service.api_key or ()),
        random_weights=model.random_weights is not None,
        planner=planner.config,
    )
    first = answer.first(sampling)
    serve(config, model.path(), first, once=answer.once)
