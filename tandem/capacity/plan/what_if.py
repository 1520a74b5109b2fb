"""The load that a cluster could serve if its model or KV were quantized, by the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tandem.capacity.plan.memory import Memory
from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.load_ratio import WorkerFacts
from tandem.capacity.planner.sizing import Sizing
from tandem.protocol.cost_parameters import SECONDS, CostParameters
from tandem.settings.planner import Limits


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the model, and what it does to the capacity of the same workers."""

    name: str
    rate: float
    """The highest rate that they can serve ÷ that without the change."""
    load_ratio: float
    """The load ÷ that highest rate."""
    split: Split
    """Their best split."""


@dataclass(frozen=True, slots=True)
class Quantized:
    """A model with weights or KV in fewer bits: the memory of its workers, and how their step costs change."""

    name: str
    memory: Memory
    before: CostParameters
    """Step costs by the roofline with the current number of bits."""
    after: CostParameters
    """Step costs by the roofline with the smaller number of bits."""


def changes(sizing: Sizing, split: Split, forms: Iterable[tuple[Quantized, Quantized]]) -> Iterator[Change]:
    """Yield one change for each quantized form.

    A form is given for prefill workers and for decode workers.
    """
    for prefill, decode in forms:
        prompts, answers = _quantized(sizing.prompts, prefill), _quantized(sizing.answers, decode)
        yield _change(decode.name, sizing, replace(sizing, prompts=prompts, answers=answers), split)


def _quantized(facts: WorkerFacts, form: Quantized) -> WorkerFacts:
    """Return the costs and capacity of quantized workers.

    Each cost coefficient is multiplied by its roofline value in `form.after` ÷ that in `form.before`.
    """
    smaller = replace(
        facts.cost,
        **{
            name: getattr(facts.cost, name) * getattr(form.after, name) / before
            for name in SECONDS
            if (before := getattr(form.before, name))
        },
    )
    free = int(facts.cost.free_tokens * form.after.free_tokens / max(1, form.before.free_tokens))
    return replace(facts, cost=replace(smaller, free_tokens=free), kv_tokens=form.memory.kv_tokens)


def _change(name: str, before: Sizing, after: Sizing, split: Split) -> Change:
    best = after.best(split.workers, Limits(), shared=bool(split.shared)) or split
    load_ratio = after.worst(best).value
    return Change(name, before.worst(split).value / load_ratio, load_ratio, best)
