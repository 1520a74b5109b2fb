"""`tandem advise`: from a symptom, or from the bottlenecks of a running cluster, to techniques with predicted gains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tandem.cli.option_groups import option_groups
from tandem.cli.plain_errors import plain_errors
from tandem.cli.planning.plan_options import DemandOptions, GpuOptions, ShapeOptions

if TYPE_CHECKING:
    from tandem.capacity.plan.advice import Advice, Adviser


@plain_errors
@option_groups
def advise(
    symptom: Annotated[
        str, typer.Argument(help='"first token slow", "stream slow", "does not fit", "bill" or "RAG slow".')
    ] = "",
    *,
    shape: ShapeOptions,
    gpu: GpuOptions,
    asked: DemandOptions,
    batch: Annotated[int, typer.Option(min=1, help="Requests that a worker decodes at once.")] = 32,
    live: Annotated[
        bool, typer.Option("--live", help="Advise on the bottlenecks of the running cluster's workers.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds to measure with --live.")] = 5.0,
) -> None:
    """Name the wall behind a symptom, and techniques in order: the predicted gain of each, and its trap."""
    from tandem.capacity.plan.advice import Adviser, Symptom
    from tandem.capacity.plan.worker_kind import WorkerKind
    from tandem.protocol.errors import InvalidArgument

    if live == bool(symptom):
        raise InvalidArgument("SYMPTOM", "is needed, or --live for the running cluster; give one of them")
    model, demand = shape.config(), asked.demand()
    (kind,) = WorkerKind(
        name=shape.name,
        model=model,
        device=gpu.kinds()[0],
        gpus=gpu.tensor_parallel_size or 1,
        kv_element_bytes=shape.kv_element_bytes(model),
        draft=shape.draft_memory(model),
    ).groups()
    adviser = Adviser(kind, demand, batch)
    for line in _live_lines(adviser, seconds) if live else lines(adviser.advice(Symptom.parse(symptom))):
        typer.echo(line)


def lines(advice: Advice) -> Iterator[str]:
    """Yield the wall, then each technique with its gain and its trap."""
    yield f"wall      {advice.wall}"
    for number, technique in enumerate(advice.techniques, 1):
        yield f"{number}. {technique.name}"
        yield f"   gain   {technique.gain}"
        yield f"   trap   {technique.trap}"


def _live_lines(adviser: Adviser, seconds: float) -> Iterator[str]:
    """Yield the bottleneck of each worker of the running cluster, as `tandem why` finds it, then the advice for it."""
    from tandem.capacity.plan.advice import SYMPTOM_OF
    from tandem.cli.observe.why import diagnoses, scraped_interval

    symptoms = []
    for worker, diagnosis in diagnoses(scraped_interval(seconds)):
        yield f"{worker}: {diagnosis.bottleneck}: {diagnosis.because}; {diagnosis.change}"
        symptoms.append(SYMPTOM_OF.get(diagnosis.bottleneck))
    for symptom in dict.fromkeys(symptoms):
        if symptom is not None:
            yield f"\n{symptom}"
            yield from lines(adviser.advice(symptom))
