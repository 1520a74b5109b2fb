"""How fast a cluster's workers are: more comes at once than they can take, by the router, and what they serve is
counted while all of them are busy. The first burst of a kind only warms them up.
"""

import time
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
"""On average: from half to one and a half times as many, so that a batch never ends as a whole."""
_PROMPTS, _WAVES = 12, 4
"""Prompts, and full batches, for each worker."""
_BUSY = 1 / 6, 5 / 6
"""Parts of the prompts between which no worker is without one."""
_MIDDLE = 0.25, 0.75
"""Parts of the tokens between which all batches are full."""
_SLOW = 0.9
"""Part of the hand-overs that the one which is told is not faster than."""
_STRIDE = 29
"""Has no divisor in common with `ANSWER_TOKENS`."""
_SEED = 2**61
"""No day has it."""


class Answers(NamedTuple):
    """Tokens a second; a step, the hand-over's gap and what the load took beside its requests in seconds."""

    per_s: float
    step_s: float
    handover_s: float
    beside_s: float


def burst(prompt_tokens: int, answers: Sequence[int], number: int = 0) -> Workload:
    """Requests at once for answers so long; bursts of another `number` have other tokens."""
    arrivals = tuple(Arrival(0.0, (Block(each, prompt_tokens),), tokens) for each, tokens in enumerate(answers))
    return Workload("burst", float(len(answers)), 1.0, _SEED + 2 * prompt_tokens + number, arrivals)


def serve_prompts(target: Target, workers: int, settings: LoadSettings) -> tuple[float, float]:
    """Where so many prefill → prompt tokens a second, and the hand-over's gap in seconds."""
    for number in range(2):
        records = _records(target, burst(PROMPT_TOKENS, [2] * (_PROMPTS * workers), number), settings)
    return prompt_rate(records, PROMPT_TOKENS), handover_gap(records)


def serve_answers(target: Target, workers: int, batch: int, settings: LoadSettings) -> Answers:
    """Where so many decode, each a batch of so many at most."""
    full = batch * workers
    _records(target, burst(SHORT_PROMPT, [ANSWER_TOKENS // 2] * full), settings)
    began = time.monotonic()
    records = _records(target, burst(SHORT_PROMPT, answer_lengths(_WAVES * full), 1), settings)
    step_s = float(np.median([gap for record in records for gap in record.gaps_s[1:]]))
    beside_s = time.monotonic() - began - max(record.ended_s for record in records)
    return Answers(answer_rate(records), step_s, handover_gap(records), beside_s)


def answer_lengths(answers: int) -> list[int]:
    """In tokens: spread evenly, and those beside each other differ."""
    return [ANSWER_TOKENS // 2 + each * _STRIDE % ANSWER_TOKENS for each in range(answers)]


def prompt_rate(records: Sequence[RequestRecord], tokens: int) -> float:
    """Prompt tokens a second of a burst, between first tokens of prompts: from when all workers have begun to the last
    one before somebody runs out of them.
    """
    firsts = sorted(record.token_s[0] for record in records)
    begun, busy = (max(1, int(part * len(firsts))) for part in _BUSY)
    return (busy - begun) * tokens / (firsts[busy - 1] - firsts[begun - 1])


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
