"""Effects of changes of the model or its serving on the load that a split can take, by the cost model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from planner.decision import Limits, Split
from planner.load_ratio import WorkerFacts, decode_load_ratio
from planner.memory import Memory
from planner.sizing import Sizing

DRAFTED, ACCEPTED = 3, 0.7
"""Draft tokens per step, and the acceptance probability of each if those before it are accepted."""
DRAFT_PART = 0.1
"""Cost of drafting, as a fraction of a step's reading of weights."""


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
    """Yields the effects of quantization and of speculative decoding; `launch_s` of a step's base reads no weights."""
    for form in forms:
        other = replace(
            sizing,
            prompts=_quantized(sizing.prompts, form, launch_s),
            answers=_quantized(sizing.answers, form, launch_s),
        )
        yield _change(form.name, sizing, other, split)
    if not split.shared:
        yield _speculation(sizing, split)


def tokens_a_step(drafted: int, accepted: float) -> float:
    """Returns the mean tokens per request and step.

    Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023.
    """
    return (1 - accepted ** (drafted + 1)) / (1 - accepted)


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


def _speculation(sizing: Sizing, split: Split) -> Change:
    """Models speculative decoding: a step reads the weights once for several tokens, but computes all draft tokens."""
    facts, gain = sizing.answers, tokens_a_step(DRAFTED, ACCEPTED)
    cost = facts.cost
    guessing = replace(
        facts, cost=replace(cost, base_s=cost.base_s * (1 + DRAFT_PART), row_s=cost.row_s * (DRAFTED + 1))
    )
    plain = decode_load_ratio(sizing.demand, sizing.promise, facts, split.decode).value
    other = decode_load_ratio(sizing.demand, sizing.promise, guessing, split.decode).value / gain
    scaled = replace(sizing, decode_scale=sizing.decode_scale * other / plain)
    name = f"speculative decoding, {DRAFTED} tokens guessed, {ACCEPTED:.0%} right"
    return _change(name, sizing, scaled, split)
