"""`tandem plan`: sizes the roles of a cluster for a load, with the cost model that routers and workers use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.planning.plan_options import (
    CostOptions,
    DemandOptions,
    GpuOptions,
    PromiseOptions,
    ShapeOptions,
    check_above_0,
)

if TYPE_CHECKING:
    from tandem.cli.planning.plan_question import Question
    from tandem.cli.planning.plan_speculation import Drafting


@plain_errors
@option_groups
def plan(
    *,
    shape: ShapeOptions,
    gpu: GpuOptions,
    promised: PromiseOptions,
    asked: DemandOptions,
    workers: Annotated[int | None, typer.Option(help="Number of workers; default: the fewest with headroom.")] = None,
    costs: CostOptions,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Find each strategy's knee by short simulated loads.")
    ] = True,
    speculate: Annotated[
        str | None,
        typer.Option(
            help="The drafts of speculative decoding: ACCEPTANCE,DRAFTS,COST, where COST is the time to propose a draft"
            " ÷ a decode step of one request; by default that of the model of --draft by the roofline, else 0."
            " With this option simulated workers draft, too, where it pays; without, 0.7,3 is assessed alone."
        ),
    ] = None,
    check: Annotated[
        Path | None, typer.Option(help="Only compare knees with a measured table of benchmarks.strategies.")
    ] = None,
) -> None:
    """Size a cluster: prefill:decode ratio, memory, latencies, and which bottleneck binds first."""
    from dataclasses import replace

    from tandem.cli.planning.plan_question import Question
    from tandem.cli.planning.plan_speculation import Drafting

    promise, demand = promised.promise(), asked.demand()
    if workers is not None:
        check_above_0("--workers", workers)
    model = shape.config()
    question = Question(
        name=shape.name,
        model=model,
        device=gpu.kind(),
        demand=demand,
        promise=promise,
        workers=workers,
        cost=costs.fitted(),
        kv_element_bytes=shape.kv_element_bytes(model),
        draft=shape.draft_memory(model),
    )
    drafting = Drafting.parse("0.7,3" if speculate is None else speculate, question.draft_step_ratio)
    if speculate is not None:
        question = replace(question, drafting=drafting)
    if check is None:
        _answer(question, drafting, simulate=simulate)
    else:
        _check(check, question)


def _answer(question: Question, drafting: Drafting, *, simulate: bool) -> None:
    """Prints the split by the cost model, the changes that would affect it, and the results of each strategy."""
    import sys

    from rich.console import Console

    from tandem.cli.observe.status import WIDE
    from tandem.cli.planning.plan_speculation import speculation_lines
    from tandem.cli.planning.plan_trials import trials
    from tandem.cli.planning.plan_view import lines, strategy_table, what_if_lines
    from tandem.cost_model.step_cost import StepCost

    question.check()
    split = question.split()
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    for line in lines(question, split):
        console.print(line, highlight=False)
    console.print("effects of changes, by the cost model:")
    for line in what_if_lines(question, split):
        console.print(line, highlight=False)
    fitted = None if question.cost is None else StepCost(question.cost)
    context = round(question.demand.context_tokens)
    for line in speculation_lines(drafting, StepCost(question.predicted_costs), context, fitted):
        console.print(line, highlight=False)
    if simulate:
        with console.status("simulating"):
            found = list(trials(question, split))
        console.print(strategy_table(found, question.demand.per_s))


def _check(file: Path, question: Question) -> None:
    """Prints one line per row and cell, and the number of knees near the measured ones."""
    from tandem.cli.planning.plan_check import check

    found = []
    for each in check(file, question.hardware):
        found.append(each)
        print(each.text, flush=True)
    print(f"{sum(each.near for each in found)} of {len(found)} knees within 20 % of the measured ones")
