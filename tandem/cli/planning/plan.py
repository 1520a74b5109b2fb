"""`tandem plan`: sizes the roles of a cluster for a load, with the cost model that routers and workers use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tandem.cli.option_groups import option_groups
from tandem.cli.picture_file import pictures
from tandem.cli.plain_errors import plain_errors
from tandem.cli.planning.plan_options import (
    CostOptions,
    DemandOptions,
    GpuOptions,
    ReportOptions,
    ShapeOptions,
    TargetOptions,
    check_above_0,
    method_option,
)

if TYPE_CHECKING:
    from rich.console import Console

    from tandem.capacity.plan.inputs import PlanInputs
    from tandem.capacity.plan.measured_knees import Compared
    from tandem.capacity.plan.speculation import Drafting
    from tandem.capacity.plan.trials import TrialResult
    from tandem.capacity.plan.worker_kind import WorkerKind
    from tandem.capacity.planner.decision import Split
    from tandem.capacity.planner.demand import Demand

BATCHES = (1, 8, 32, 64, 128, 256)
"""The batch sizes of decode steps for which the effect of draft tokens is printed."""
ACCEPTANCES = (0.5, 0.7, 0.9)
"""The acceptance probabilities of draft tokens for which `--plot` has a line."""
_MS = 1e3
_FULL = 1.0


def lines(inputs: PlanInputs, split: Split) -> Iterator[str]:
    """Yield the lines about the model, memory, step times, latency targets, cluster size and first bottleneck."""
    from tandem.capacity.planner.policy import TARGET_RATIO
    from tandem.capacity.simulation.hardware import ITEM_BYTES
    from tandem.cost_model.step_cost import StepCost
    from tandem.engine.model_summary import model_summary

    demand, computing, decoding = inputs.demand, inputs.prefill, inputs.decode
    prefill, decode = inputs.sizing.load_ratios(split)
    alone_s = demand.lone_prompt_seconds(StepCost(computing.costs), computing.facts(demand).chunk_tokens)
    for number, line in enumerate(model_summary(decoding.model, ITEM_BYTES, decoding.kv_element_bytes)):
        yield f"{'' if number else 'model':<10}{line}"
    if inputs.one_kind:
        yield memory_line(decoding, demand, "worker")
    else:
        yield memory_line(computing, demand, "prefill worker")
        yield memory_line(decoding, demand, "decode worker")
    yield (
        f"steps     {decoding.costs.base_s * _MS:.1f} ms to decode one answer, {alone_s * _MS:.0f} ms to compute a"
        f" prompt of {demand.computed_tokens:.0f} tokens ({'as fitted' if decoding.cost else 'by the roofline'})"
    )
    yield f"targets   {inputs.targets.text}"
    (worse, first), (better, second) = sorted(
        ((prefill, "prefill"), (decode, "decode")), key=lambda pair: pair[0].value, reverse=True
    )
    yield f"size      {size(inputs, split)}"
    if inputs.workers is None and worse.value <= _FULL:
        yield (
            f"headroom  no role is planned above {TARGET_RATIO:.0%} of its capacity, as arrivals come in bursts;"
            f" at 100%, {inputs.split(load_ratio=_FULL).workers} workers would do"
        )
    if split.shared:
        yield f"bottleneck  {worse.limit}, at {worse.value:.0%} of the worker's capacity"
    else:
        yield f"bottleneck  {first}, at {worse.text} of its capacity; {second} is at {better.text}"
    if worse.value > _FULL:
        yield f"          too few for {demand.per_s:g} requests/s: targets hold up to {demand.per_s / worse.value:.3g}"
    if computing.expert_parallel or decoding.expert_parallel:
        yield "note      experts over several hosts are planned and simulated only: `tandem up` does not divide them"


def memory_line(kind: WorkerKind, demand: Demand, what: str) -> str:
    """Return the line about the memory of workers of one kind, which `what` names."""
    from tandem.engine.memory import GIB

    memory, drafts = kind.memory(demand), ""
    if memory.draft_weight_bytes:
        kv = f" and {memory.draft_kv_bytes_per_token / 1024:.0f} KiB" if memory.draft_kv_bytes_per_token else ""
        drafts = f", for drafts {memory.draft_weight_bytes / GIB:.2f} GiB{kv}"
    each = f"on each of {kind.gpus} GPUs " if kind.gpus > 1 else ""
    part = f"GPU of a {what}" if kind.expert_parallel else what
    return (
        f"memory    {each}weights {memory.weight_bytes / GIB:.1f} GiB, {memory.kv_bytes_per_token / 1024:.0f} KiB of KV"
        f" a token{drafts}: {memory.kv_tokens:,.0f} tokens a {part}, {memory.kv_tokens / demand.kv_tokens:.0f} such"
        " requests"
    )


def size(inputs: PlanInputs, split: Split) -> str:
    """Return the numbers of workers and GPUs as text."""
    gpus = _count(inputs.gpus(split), "GPU")
    if split.shared:
        return f"1 worker of {gpus}, which computes prompts and decodes"
    if inputs.one_kind:
        each = _count(inputs.decode.gpus, "GPU")
        return f"{split.workers} workers of {each} = {gpus}, prefill:decode {split.text}"
    prefill, decode = _count(inputs.prefill.gpus, "GPU"), _count(inputs.decode.gpus, "GPU")
    if inputs.prefill.stages > 1:
        prefill += f" in {inputs.prefill.stages} stages"
    if inputs.prefill.context_ranks > 1:
        prefill += ", which divide the tokens of prompts,"
    workers = (
        f"{_count(split.prefill, 'prefill worker')} of {prefill} + {_count(split.decode, 'decode worker')} of {decode}"
    )
    return f"{workers} = {gpus}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def strategy_table(results: Iterable[TrialResult], demand: Demand, price_per_s: float | None = None) -> Table:
    """Return a table of simulated results with one row per strategy, under the planned load `demand`.

    `price_per_s` is the price of all GPUs for a second. The price of a million tokens, of prompts and answers, is that
    at the knee.
    """
    from tandem.capacity.simulation.knee import KEPT

    rate = demand.per_s
    title = f"simulated at {rate:g} requests/s; the knee is the highest rate with an SLO attainment of {KEPT:.0%}"
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for column in ("knee /s", "÷ load", "SLO attainment", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "missed by"):
        table.add_column(column, justify="right", no_wrap=True)
    if price_per_s is not None:
        table.add_column("price of 1M tokens", justify="right", no_wrap=True)
    for result in results:
        asked = result.asked
        worst = max(asked.missed, key=lambda kind: asked.missed[kind]) if asked.missed else ""
        table.add_row(
            result.strategy.name,
            f"{result.knee_rate:.3g}" if result.knee else "none",
            f"{result.knee_rate / rate:.2f}",
            f"{asked.share:.0%}",
            *(f"{seconds * _MS:.0f}" for seconds in (asked.ttft_p50_s, asked.ttft_p99_s)),
            *(f"{seconds * _MS:.1f}" for seconds in (asked.gap_p50_s, asked.gap_p99_s)),
            worst,
            *([] if price_per_s is None else [_price(price_per_s, result.knee_rate * demand.kv_tokens)]),
        )
    return table


def _price(price_per_s: float, tokens_per_s: float) -> str:
    return f"{price_per_s / tokens_per_s * 1e6:.3g}" if tokens_per_s else "none"


def what_if_lines(inputs: PlanInputs, split: Split) -> Iterator[str]:
    """Yield one line per quantized form of the model: the highest rate that the same workers serve with it."""
    from tandem.capacity.plan.what_if import changes
    from tandem.capacity.planner.policy import TARGET_RATIO

    for change in changes(inputs.sizing, split, inputs.quantized_forms()):
        per_s = inputs.demand.per_s / change.load_ratio
        enough = "too little" if change.load_ratio > _FULL else "enough"
        headroom = ", without headroom" if TARGET_RATIO < change.load_ratio <= _FULL else ""
        yield (
            f"  {change.name}: up to {per_s:.3g} requests/s, {change.rate:.2f} times as many as now, {enough} for the"
            f" load{headroom}; with {change.split.text}"
        )


def speculation_lines(inputs: PlanInputs, drafting: Drafting) -> Iterator[str]:
    """Yield lines with the predicted speedup of decoding by draft tokens.

    It is predicted with the step costs of the roofline and, if there are fitted step costs, also with those.
    """
    from tandem.cost_model.step_cost import StepCost

    context = round(inputs.demand.context_tokens)
    yield (
        f"speculative decoding with {drafting.drafts} drafts, each accepted with probability {drafting.acceptance:g}"
        f" and proposed in {drafting.cost:.3g} of a step: {drafting.tokens:.2f} tokens a step"
    )
    for name, costs in (
        ("by the roofline", inputs.decode.predicted_costs),
        ("by the measured steps", inputs.decode.cost),
    ):
        if costs is None:
            continue
        cost = StepCost(costs)
        speedups = ", ".join(f"{drafting.speedup(cost, batch, context):.2f} at {batch}" for batch in BATCHES)
        most = drafting.break_even(cost, context)
        yield f"  {name}, times as fast by decoding requests: {speedups}; it does not pay from {most} on"
    yield "  workers draft only where it pays"


def draw_break_even(inputs: PlanInputs, drafting: Drafting, file: Path) -> None:
    """Draw the predicted speedup by draft tokens over the number of requests that decode, a line an acceptance.

    The lines are of some usual acceptances and that of `drafting`. A line's label has the break-even point.
    """
    from dataclasses import replace

    from tandem.cost_model.step_cost import StepCost

    context, cost = round(inputs.demand.context_tokens), StepCost(inputs.decode.costs)
    lines = {}
    for acceptance in sorted({*ACCEPTANCES, drafting.acceptance}):
        each = replace(drafting, acceptance=acceptance)
        points = [(float(batch), each.speedup(cost, batch, context)) for batch in range(1, BATCHES[-1] + 1)]
        lines[f"{acceptance:g} accepted, pays below {each.break_even(cost, context)}"] = points
    title = f"{drafting.drafts} drafts, {inputs.decode.name}, context {context}"
    pictures().draw_lines(title, ("requests that decode", "times as many tokens/s"), lines, 1.0, file)


def comparison(knee: Compared) -> str:
    """Return one line that compares the predicted knee (highest rate that meets the targets) with the measured one."""
    upper = "more" if knee.lost is None else f"{knee.lost:g}"
    measured, mark = f"measured {knee.kept:g} to {upper}", "" if knee.near else "  <-- not near"
    return f"{knee.workload:>13} {knee.row:>18} {knee.cell:>9}  {measured:>22}  predicted {knee.predicted:.3g}{mark}"


@plain_errors
@option_groups
def plan(
    *,
    shape: ShapeOptions,
    gpu: GpuOptions,
    latency: TargetOptions,
    asked: DemandOptions,
    workers: Annotated[int | None, typer.Option(help="Number of workers; default: the fewest with headroom.")] = None,
    costs: CostOptions,
    report: ReportOptions,
    simulate: Annotated[
        bool, method_option("--simulate/--no-simulate", help="Find each strategy's knee by short simulated loads.")
    ] = True,
    speculate: Annotated[
        str | None,
        method_option(
            help="The drafts of speculative decoding: ACCEPTANCE,DRAFTS,COST, where COST is the time to propose a draft"
            " ÷ a decode step of one request; by default that of the model of --draft by the roofline, else 0."
            " With this option simulated workers draft, too, where it pays; without, 0.7,3 is assessed alone."
        ),
    ] = None,
    check: Annotated[
        Path | None, method_option(help="Only compare knees with a measured table of benchmarks.strategies.")
    ] = None,
) -> None:
    """Size a cluster: GPUs, prefill:decode ratio, memory, latencies, and which bottleneck binds first."""
    from dataclasses import replace

    from tandem.capacity.plan.inputs import PlanInputs
    from tandem.capacity.plan.speculation import Drafting
    from tandem.capacity.plan.worker_kind import GROUP_SIZES, WorkerKind

    targets, demand = latency.targets(), asked.demand()
    report.check()
    _print_workload(asked, demand)
    if workers is not None:
        check_above_0("--workers", workers)
    model, fitted = shape.config(), costs.fitted()
    searched = fitted is None and shape.draft is None and check is None
    kinds = [
        WorkerKind(
            name=shape.name,
            model=model,
            device=device,
            gpus=experts or (ranks or 1) * stages * context_ranks,
            stages=stages,
            context_ranks=context_ranks,
            group_sizes=GROUP_SIZES if searched and experts is None and ranks is None else (),
            expert_parallel=experts is not None,
            two_batch_overlap=gpu.two_batch_overlap,
            cost=fitted,
            kv_element_bytes=shape.kv_element_bytes(model),
            draft=shape.draft_memory(model),
        )
        for device, experts, ranks, stages, context_ranks in zip(
            gpu.kinds(),
            gpu.expert_parallel_sizes,
            gpu.tensor_parallel_sizes,
            (gpu.prefill_pipeline_size or 1, 1),
            (gpu.prefill_context_parallel_size or 1, 1),
            strict=True,
        )
    ]
    drafting = Drafting.parse("0.7,3" if speculate is None else speculate, kinds[1].draft_step_ratio(demand))
    if speculate is not None:
        kinds = [replace(kind, drafting=drafting) for kind in kinds]
    free = bool(kinds[0].group_sizes) and workers != 1
    inputs = PlanInputs(
        kinds[0],
        kinds[1],
        demand,
        targets,
        workers,
        compares_stages=free and gpu.prefill_pipeline_size is None and kinds[0].context_ranks == 1,
        compares_context_ranks=free and gpu.prefill_context_parallel_size is None and kinds[0].stages == 1,
    )
    _check_kinds(inputs, fitted=fitted is not None, compares=check is not None)
    if check is not None:
        _check(check, inputs)
    elif report.plot is not None:
        draw_break_even(inputs, drafting, report.plot)
        print(f"drew {report.plot}")
    elif report.roofline or report.kv_table:
        _print_tables(inputs, report)
    else:
        _answer(inputs.with_fewest_gpus(), drafting, report, simulate=simulate)


def _check_kinds(inputs: PlanInputs, *, fitted: bool, compares: bool) -> None:
    """Raise InvalidArgument if an option does not allow these kinds of workers."""
    from tandem.capacity.plan.worker_kind import GROUP_SIZES
    from tandem.protocol.errors import InvalidArgument

    stages, most = inputs.prefill.stages > 1, GROUP_SIZES[-1]
    context = inputs.prefill.context_ranks > 1
    too_many = any(kind.gpus > most and not kind.expert_parallel for kind in (inputs.prefill, inputs.decode))
    wide = inputs.prefill.expert_parallel or inputs.decode.expert_parallel
    special = wide or not inputs.one_kind
    equal = "is for equal workers on one host each; leave out the GPUs and expert parallelism of a role"
    for option, refused, why in (
        ("--from", fitted and special, equal),
        ("--check", compares and special, equal),
        (
            "--tensor-parallel-size",
            too_many,
            f"the GPUs of a worker, in all its stages, are on one host, which has up to {most}; give fewer, and more"
            " workers serve the load",
        ),
        ("--prefill-pipeline-size", stages and inputs.prefill.expert_parallel, "excludes expert parallelism"),
        (
            "--draft",
            stages and bool(inputs.prefill.draft.weight_bytes),
            "excludes --prefill-pipeline-size; leave one out",
        ),
        (
            "--prefill-context-parallel-size",
            context and (stages or inputs.prefill.tensor_ranks > 1 or inputs.prefill.expert_parallel),
            "excludes prefill workers that divide the model; give them tensor and pipeline sizes of 1",
        ),
        (
            "--draft",
            context and bool(inputs.prefill.draft.weight_bytes),
            "excludes --prefill-context-parallel-size; leave one out",
        ),
        ("--workers", inputs.workers == 1 and stages, "1 worker decodes, too, and has one stage; give 2"),
        ("--workers", inputs.workers == 1 and context, "1 worker decodes, too, and divides no tokens; give 2"),
        ("--workers", inputs.workers == 1 and not inputs.one_kind, "1 worker cannot have two kinds of GPUs; give 2"),
        ("--two-batch-overlap", inputs.decode.two_batch_overlap and not wide, "is for expert parallelism"),
    ):
        if refused:
            raise InvalidArgument(option, why)


def _print_workload(asked: DemandOptions, demand: Demand) -> None:
    """Print the distributions of the trace of --workload, if there is one."""
    from tandem.cli.planning.workload_file import workload_lines

    if (trace := asked.trace()) is not None:
        for line in workload_lines(trace, demand):
            _console().print(line, highlight=False)


def _print_tables(inputs: PlanInputs, report: ReportOptions) -> None:
    """Print the tables that `report` names, of the model on decode workers."""
    from tandem.cli.planning.walls_view import kv_table, roofline_table

    console, kind = _console(), inputs.decode
    for wanted, table in ((report.roofline, roofline_table), (report.kv_table, kv_table)):
        for part in table(kind, inputs.demand) if wanted else ():
            console.print(part, highlight=False)


def _console() -> Console:
    import sys

    from rich.console import Console

    from tandem.cli.observe.status import WIDE

    return Console() if sys.stdout.isatty() else Console(width=WIDE)


def _answer(inputs: PlanInputs, drafting: Drafting, report: ReportOptions, *, simulate: bool) -> None:
    """Print the split that the cost model recommends, and the predicted effects of changes and speculative decoding.

    With `simulate`, also print the simulated results of each strategy.
    """
    from tandem.capacity.plan.trials import trials
    from tandem.cli.planning.walls_view import transfer_line

    split, console = inputs.split(), _console()
    for line in lines(inputs, split):
        console.print(line, highlight=False)
    if not split.shared:
        console.print(transfer_line(inputs.decode, inputs.demand, report.network_gbps), highlight=False)
    console.print("what the same workers would serve, by the cost model:")
    for line in what_if_lines(inputs, split):
        console.print(line, highlight=False)
    for line in speculation_lines(inputs, drafting):
        console.print(line, highlight=False)
    if simulate:
        with console.status("simulating"):
            results = list(trials(inputs, split))
        gpu_s = None if report.price_per_hour is None else report.price_per_hour * inputs.gpus(split) / 3600
        console.print(strategy_table(results, inputs.demand, gpu_s))


def _check(file: Path, inputs: PlanInputs) -> None:
    """Compare predicted knees with the measured table in `file`.

    Print one line per row and SLO cell of the table, and the number of knees that are near the measured ones.
    """
    from tandem.capacity.plan.measured_knees import NEAR, check

    knees = []
    for knee in check(file, inputs.decode.hardware(inputs.demand)):
        knees.append(knee)
        print(comparison(knee), flush=True)
    print(f"{sum(knee.near for knee in knees)} of {len(knees)} knees within {NEAR:.0%} of the measured ones")
