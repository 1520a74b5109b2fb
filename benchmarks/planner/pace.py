"""How fast a cluster's workers are: more comes at once than they can take, by the front door, and what they serve is
counted while all of them are busy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.load.record import RequestRecord
from benchmarks.load.run import LoadSettings, run_load
from benchmarks.load.target import Target
from benchmarks.load.workload import Arrival, Block, Workload
from benchmarks.planner.sizes import SHORT_PROMPT
from wire.errors import Unavailable

PROMPT_TOKENS = 256
ANSWER_TOKENS = 48
_PROMPTS, _WAVES = 12, 3
"""Prompts, and full batches, for each worker."""
_BUSY = 5 / 6
"""Part of the prompts within which no worker is without one."""
_MIDDLE = 0.25, 0.75
"""Parts of the tokens between which all batches are full."""
_SLOW = 0.9
"""Part of the hand-overs that the one which is told is not faster than."""
_SEED = 2**61
"""No day has it."""


class Answers(NamedTuple):
    """Tokens a second; a step, the hand-over's gap and the end of all answers in seconds."""

    per_s: float
    step_s: float
    handover_s: float
    last_s: float


def burst(requests: int, prompt_tokens: int, new_tokens: int) -> Workload:
    """So many requests at once."""
    arrivals = tuple(Arrival(0.0, (Block(number, prompt_tokens),), new_tokens) for number in range(requests))
    return Workload("burst", float(requests), 1.0, _SEED + prompt_tokens, arrivals)


def serve_prompts(target: Target, workers: int, settings: LoadSettings) -> tuple[float, float]:
    """Where so many prefill → prompt tokens a second, and the hand-over's gap in seconds."""
    records = _records(target, burst(_PROMPTS * workers, PROMPT_TOKENS, 2), settings)
    return prompt_rate(records, PROMPT_TOKENS), handover_gap(records)


def serve_answers(target: Target, workers: int, batch: int, settings: LoadSettings) -> Answers:
    """Where so many decode, each a batch of so many at most."""
    records = _records(target, burst(_WAVES * batch * workers, SHORT_PROMPT, ANSWER_TOKENS), settings)
    step_s = float(np.median([gap for record in records for gap in record.gaps_s[1:]]))
    last_s = max(record.ended_s for record in records)
    return Answers(answer_rate(records), step_s, handover_gap(records), last_s)


def prompt_rate(records: Sequence[RequestRecord], tokens: int) -> float:
    """Prompt tokens a second of a burst, up to the first token of the last prompt before somebody runs out of them."""
    firsts = sorted(record.token_s[0] for record in records)
    busy = max(1, int(_BUSY * len(firsts)))
    return busy * tokens / firsts[busy - 1]


def answer_rate(records: Sequence[RequestRecord]) -> float:
    """Tokens behind the first of each answer, a second, in the middle of a burst."""
    moments = sorted(moment for record in records for moment in record.token_s[1:])
    first, last = (int(part * (len(moments) - 1)) for part in _MIDDLE)
    return (last - first) / (moments[last] - moments[first])


def handover_gap(records: Sequence[RequestRecord]) -> float:
    """Between the first two tokens, in seconds: nine in ten are no longer."""
    return float(np.quantile([record.gaps_s[0] for record in records], _SLOW))


def _records(target: Target, workload: Workload, settings: LoadSettings) -> Sequence[RequestRecord]:
    records = run_load(target, workload, (), settings).records
    failed = [record.error for record in records if record.error]
    if failed:
        raise Unavailable(f"{len(failed)} requests of a burst failed, one with {failed[0]}; see the router's log")
    return records
