"""`tandem mode`: changes the mode of a running cluster."""

from typing import Annotated

import typer

from tandem.cli.connection.options import ControllerOptions, Grace, checked_grace
from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.start.setting_options import OPTIONS


@plain_errors
@option_groups
def mode(
    name: Annotated[str, typer.Argument(help="disaggregated, colocated or adaptive.")],
    *,
    prefill: Annotated[
        int | None, typer.Option(help="Workers that prefill when disaggregated; default: half of all.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(help="Workers that decode when disaggregated; default: the rest.")
    ] = None,
    step_policy: Annotated[
        str, typer.Option(help="unchunked, chunked or decode-priority, as in `tandem up`; default: unchanged.")
    ] = "",
    step_budget: Annotated[int | None, typer.Option(help=OPTIONS["step_budget"].help)] = None,
    itl_target_ms: Annotated[
        float | None,
        typer.Option(help="Maximum inter-token latency of any request, 0 = no limit; default: unchanged."),
    ] = None,
    grace: Grace = 30.0,
    controller: ControllerOptions,
) -> None:
    """Change roles and mode while requests run: workers keep weights and graphs, and no request is lost."""
    import asyncio

    from tandem.protocol.errors import InvalidArgument

    for option, value in (("--prefill", prefill), ("--decode", decode), ("--step-budget", step_budget)):
        if value is not None and value < 1:
            raise InvalidArgument(option, f"{value} is less than 1")
    if itl_target_ms is not None and not itl_target_ms >= 0:
        raise InvalidArgument("--itl-target-ms", f"{itl_target_ms:g} is below 0")
    target_s = 0.0 if itl_target_ms is None else itl_target_ms / 1e3 or -1.0
    workers, seconds = asyncio.run(
        controller.client().set_mode(
            name,
            prefill=prefill or 0,
            decode=decode or 0,
            step_policy=step_policy,
            step_budget=step_budget or 0,
            itl_target_s=target_s,
            grace_s=checked_grace(grace),
        )
    )
    for info in workers:
        print(f"{info.peer.worker_id}: {info.role}, {info.assignment.steps if info.assignment else 'as started'}")
    print(f"the cluster is {name} now, after {seconds:.1f} s")
