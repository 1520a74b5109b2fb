"""`tandem plan`: how many workers of which role a load takes, from the cost model that routers and workers use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.plain_errors import plain_errors

if TYPE_CHECKING:
    from cli.plan_question import Question
    from costs.devices import DeviceKind
    from engine.models.config import ModelConfig
    from wire.cost_parameters import CostParameters

_CUSTOM_GIB = 80.0


@plain_errors
def plan(
    *,
    shape: Annotated[str, typer.Option(help="A model's shape: llama-3-8b, qwen3-32b, …")] = "llama-3-8b",
    model: Annotated[Path | None, typer.Option(help="In place of it, a model's folder; config.json is read.")] = None,
    gpu: Annotated[str, typer.Option(help="Of each worker: B200, H200, H100, A100-80, A100-40, L40S or L4.")] = "H200",
    ceilings: Annotated[str, typer.Option(help="TFLOPS:GBPS by its maker, for another GPU; with --memory-gib.")] = "",
    memory_gib: Annotated[float | None, typer.Option(help="Its memory; default: that of the GPU, or 80.")] = None,
    slo_ttft: Annotated[float, typer.Option(help="Milliseconds to the first token.")] = 1000.0,
    slo_itl: Annotated[float, typer.Option(help="Milliseconds between tokens, of 99 in 100 gaps.")] = 25.0,
    prompt_tokens: Annotated[float, typer.Option(help="Mean tokens of a prompt.")] = 2000.0,
    answer_tokens: Annotated[float, typer.Option(help="Mean tokens of an answer.")] = 500.0,
    cached: Annotated[float, typer.Option(help="Part of prompt tokens that prefix caches hold, 0 to 1.")] = 0.0,
    rate: Annotated[float, typer.Option(help="Requests a second.")] = 10.0,
    workers: Annotated[int | None, typer.Option(help="Default: the fewest that leave room.")] = None,
    costs: Annotated[
        Path | None, typer.Option("--from", help="JSON with fitted costs of a step, in place of the roofline's.")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="Take the fitted costs of the running cluster.")] = False,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Find each strategy's knee by short simulated loads.")
    ] = True,
    check: Annotated[
        Path | None, typer.Option(help="Compare knees with a measured table of benchmarks.strategies, and do no more.")
    ] = None,
) -> None:
    """Size a cluster: prefill:decode ratio, memory, latencies, and which wall binds first."""
    import sys

    from rich.console import Console

    from cli.plan_question import Question
    from cli.plan_trials import trials
    from cli.plan_view import lines, strategy_table, what_if_lines
    from cli.status import WIDE
    from planner.demand import Demand, Promise
    from wire.errors import InvalidArgument

    for option, value in (
        ("--slo-ttft", slo_ttft),
        ("--slo-itl", slo_itl),
        ("--prompt-tokens", prompt_tokens),
        ("--answer-tokens", answer_tokens),
        ("--rate", rate),
        ("--workers", 1 if workers is None else workers),
    ):
        if not 0 < value < float("inf"):
            raise InvalidArgument(option, f"{value:g} is not above 0")
    if not 0 <= cached < 1:
        raise InvalidArgument("--cached", f"{cached:g} is not 0 or more and below 1")
    question = Question(
        name=shape if model is None else model.name,
        model=_model(shape, model),
        device=_device(gpu, ceilings, memory_gib),
        demand=Demand(rate, prompt_tokens, answer_tokens, cached),
        promise=Promise(slo_ttft / 1e3, slo_itl / 1e3),
        workers=workers,
        cost=_costs(costs, live=live),
    )
    if check is not None:
        _check(check, question)
        return
    question.check()
    split = question.split()
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    for line in lines(question, split):
        console.print(line, highlight=False)
    console.print("what would change it, by the cost model:")
    for line in what_if_lines(question, split):
        console.print(line, highlight=False)
    if simulate:
        with console.status("simulating"):
            found = list(trials(question, split))
        console.print(strategy_table(found, rate))


def _model(shape: str, folder: Path | None) -> ModelConfig:
    import json

    from engine.models.config import parse_model_config
    from engine.models.shapes import shape_config
    from wire.errors import InvalidArgument

    if folder is None:
        return shape_config(shape)
    try:
        return parse_model_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), {})
    except (OSError, ValueError) as error:
        raise InvalidArgument("--model", f"{folder} has no config.json that can be read: {error}") from None


def _device(gpu: str, ceilings: str, memory_gib: float | None) -> DeviceKind:
    from dataclasses import replace

    from costs.devices import DeviceKind, device_kind
    from costs.roofline import parse_ceilings

    if ceilings:
        given = parse_ceilings("--ceilings", ceilings)
        return DeviceKind(given.flops, given.bytes_per_s, memory_gib or _CUSTOM_GIB)
    found = device_kind("--gpu", gpu)
    return found if memory_gib is None else replace(found, memory_gib=memory_gib)


def _costs(file: Path | None, *, live: bool) -> CostParameters | None:
    import asyncio

    from cli.options import metrics_door
    from cli.top import scrape
    from planner.reading import fitted
    from simulation.hardware import read_costs
    from wire.errors import FailedPrecondition

    if file is not None:
        return read_costs(file, "--from")
    if not live:
        return None
    found = fitted(asyncio.run(scrape(*metrics_door("", ""))))
    if found is None:
        raise FailedPrecondition("the running cluster has not measured prompts and answers yet; send it some requests")
    return found


def _check(file: Path, question: Question) -> None:
    """One row and cell a line, and how many are near."""
    from cli.plan_check import check

    found = []
    for each in check(file, question.hardware):
        found.append(each)
        print(each.text, flush=True)
    print(f"{sum(each.near for each in found)} of {len(found)} knees within 20 % of the measured ones")
