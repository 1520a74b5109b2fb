"""Effects of changes of the model or its serving on the load that a split can take, by the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.decision import Limits, Split
from planner.load_ratio import WorkerFacts
from planner.memory import Memory
from planner.sizing import Sizing


@dataclass(frozen=True, slots=True)
class Change:
    """A change and the load that it allows: `rate` times the current one, with the best split of as many workers."""

    name: str
    rate: float
    split: Split


@dataclass(frozen=True, slots=True)
class Quantized:
    """The same model with fewer bits: what its workers hold and read."""

    name: str
    memory: Memory
    weight_reads: float
    """Bytes of weights that a decode step reads, as a fraction of the current ones."""
    kv_reads: float
    """Likewise of a token's KV."""
    unpacking_s: float = 0.0
    """Seconds that unpacking its weights adds to each row of a decode step, compared with the current ones."""


def changes(sizing: Sizing, split: Split, forms: Iterable[Quantized], launch_s: float) -> Iterator[Change]:
    """Yields the effects of quantization; `launch_s` of a step's base reads no weights."""
    for form in forms:
        other = replace(
            sizing,
            prompts=_quantized(sizing.prompts, form, launch_s),
            answers=_quantized(sizing.answers, form, launch_s),
        )
        yield _change(form.name, sizing, other, split)


def _quantized(facts: WorkerFacts, form: Quantized, launch_s: float) -> WorkerFacts:
    """Returns the facts of workers that read less; the arithmetic of prompts is assumed to take as long."""
    cost = facts.cost
    reading_s = max(cost.base_s - launch_s, 0.0)
    smaller = replace(
        cost,
        base_s=cost.base_s - reading_s * (1 - form.weight_reads),
        row_s=cost.row_s + form.unpacking_s,
        context_s=cost.context_s * form.kv_reads,
        free_tokens=int(cost.free_tokens * form.weight_reads),
    )
    return replace(facts, cost=smaller, kv_tokens=form.memory.kv_tokens)


def _change(name: str, before: Sizing, after: Sizing, split: Split) -> Change:
    best = after.best(split.workers, Limits(), shared=bool(split.shared)) or split
    return Change(name, before.worst(split).value / after.worst(best).value, best)
