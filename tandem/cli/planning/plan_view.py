"""The output of `tandem plan`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from tandem.capacity.planner.decision import Split
from tandem.capacity.planner.memory import GIB
from tandem.capacity.planner.what_if import changes
from tandem.cli.planning.plan_question import ITEM_BYTES, Question
from tandem.cli.planning.plan_trials import Found
from tandem.engine.model_summary import model_summary

_MS = 1e3
_FULL = 1.0


def lines(question: Question, split: Split) -> Iterator[str]:
    """Yields memory, size, and the bottleneck that binds first."""
    memory, demand, costs = question.memory, question.demand, question.costs
    prefill, decode = question.sizing.load_ratios(split)
    alone_s = demand.lone_prompt_seconds(costs, question.facts.chunk_tokens)
    for number, line in enumerate(model_summary(question.model, ITEM_BYTES, question.kv_element_bytes)):
        yield f"{'' if number else 'model':<10}{line}"
    drafts = ""
    if memory.draft_weight_bytes:
        kv = f" and {memory.draft_kv_bytes_per_token / 1024:.0f} KiB" if memory.draft_kv_bytes_per_token else ""
        drafts = f", for drafts {memory.draft_weight_bytes / GIB:.2f} GiB{kv}"
    yield (
        f"memory    weights {memory.weight_bytes / GIB:.1f} GiB, {memory.kv_bytes_per_token / 1024:.0f} KiB of KV a"
        f" token{drafts}: {memory.kv_tokens:,.0f} tokens a worker, {memory.kv_tokens / demand.kv_tokens:.0f} such"
        " requests"
    )
    yield (
        f"steps     {costs.base_s * _MS:.1f} ms to decode one answer, {alone_s * _MS:.0f} ms to compute a prompt of"
        f" {demand.computed_tokens:.0f} tokens ({'as fitted' if question.cost else 'by the roofline'})"
    )
    yield f"targets   {question.promise.text}"
    (worse, first), (better, other) = sorted(
        ((prefill, "prefill"), (decode, "decode")), key=lambda each: each[0].value, reverse=True
    )
    if split.shared:
        yield "size      1 worker, which computes prompts and decodes"
        yield f"bottleneck      it has {worse.text}"
    else:
        yield f"size      {split.workers} workers, prefill:decode {split.prefill}:{split.decode}"
        yield f"bottleneck      {first} binds first, by its {worse.text}; {other} has {better.text}"
    if worse.value > _FULL:
        yield f"          too few for {demand.per_s:g} requests/s: targets hold up to {demand.per_s / worse.value:.3g}"


def strategy_table(found: Iterable[Found], rate: float) -> Table:
    """Returns a table with one strategy per row."""
    table = Table(box=None, pad_edge=False)
    table.add_column("strategy", no_wrap=True)
    for column in ("knee /s", f"kept at {rate:g}/s", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "missed by"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in found:
        asked = each.asked
        worst = max(asked.missed, key=lambda kind: asked.missed[kind]) if asked.missed else ""
        table.add_row(
            each.strategy.name,
            f"{each.knee_rate:.3g}" if each.knee else "none",
            f"{asked.share:.0%}",
            *(f"{seconds * _MS:.0f}" for seconds in (asked.ttft_p50_s, asked.ttft_p99_s)),
            *(f"{seconds * _MS:.1f}" for seconds in (asked.gap_p50_s, asked.gap_p99_s)),
            worst,
        )
    return table


def what_if_lines(question: Question, split: Split) -> Iterator[str]:
    """Yields the effect of each change, by the cost model alone."""
    for change in changes(question.sizing, split, question.quantized_forms()):
        yield f"  {change.name}: {change.rate:.2f} × the load, with {change.split.prefill}:{change.split.decode}"
