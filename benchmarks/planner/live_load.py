"""A load of a real cluster's day, all of whose requests have the same class."""

from collections.abc import Callable
from dataclasses import replace

from benchmarks.load.command import show
from tandem.cli.load.report import LoadReport
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.slo import SloCell
from tandem.cli.load.target import Target
from tandem.cli.load.workload import Workload


def ask(
    target: Target,
    workload: Workload,
    cell: SloCell,
    settings: LoadSettings,
    *,
    where: str,
    on_start: Callable[[float], None] | None = None,
) -> LoadReport:
    """Runs the load and prints a line with `where` and the results."""
    print(f"{where:>9} {workload.name:>14} ", end="", flush=True)
    return show(run_load(target, workload, [cell], replace(settings, slo_class=cell.name), on_start=on_start))
