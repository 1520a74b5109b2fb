"""Measures the speed of a cluster's workers by overloading them for a short time.

More requests than they can serve arrive at once, and the tokens served while all workers are busy count. The first
burst of a kind is a warm-up.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.planner.sizes import SHORT_PROMPT
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.run import LoadSettings, run_load
from tandem.cli.load.target import Target
from tandem.cli.load.workload import Arrival, Block, Workload
from tandem.protocol.errors import Unavailable

PROMPT_TOKENS = 256
ANSWER_TOKENS = 48
"""Mean answer length; lengths are from half to one and a half of it, so that a batch never ends as a whole."""
_PROMPTS, _WAVES = 12, 4
"""Number of prompts, and of full batches, for each worker."""
_BUSY = 1 / 6, 5 / 6
"""Shares of the prompts between which every worker has one."""
_MIDDLE = 0.25, 0.75
"""Shares of the tokens between which all batches are full."""
_SLOW = 0.9
"""The quantile of hand-over gaps that is returned."""
_STRIDE = 29
"""A stride through answer lengths, coprime with `ANSWER_TOKENS`."""
_SEED = 2**61
"""The seed of bursts, which no day has."""


class Answers(NamedTuple):
    """Tokens per second; in seconds: a step, the hand-over's gap, and the load's time besides its requests."""

    per_s: float
    step_s: float
    handover_s: float
    overhead_s: float


def burst(prompt_tokens: int, answers: Sequence[int], number: int = 0) -> Workload:
    """Returns concurrent requests for answers of these lengths; bursts of another `number` have other tokens."""
    arrivals = tuple(Arrival(0.0, (Block(each, prompt_tokens),), tokens) for each, tokens in enumerate(answers))
    return Workload("burst", float(len(answers)), 1.0, _SEED + 2 * prompt_tokens + number, arrivals)


def serve_prompts(target: Target, workers: int, settings: LoadSettings) -> tuple[float, float]:
    """Runs prompts on `workers` prefill workers; returns prompt tokens per second and the hand-over's gap in s."""
    for number in range(2):
        records = _records(target, burst(PROMPT_TOKENS, [2] * (_PROMPTS * workers), number), settings)
    return prompt_rate(records, PROMPT_TOKENS), handover_gap(records)


def serve_answers(target: Target, workers: int, batch: int, settings: LoadSettings) -> Answers:
    """Runs answers on `workers` decode workers with `batch` requests each."""
    full = batch * workers
    _records(target, burst(SHORT_PROMPT, [ANSWER_TOKENS // 2] * full), settings)
    began = time.monotonic()
    records = _records(target, burst(SHORT_PROMPT, answer_lengths(_WAVES * full), 1), settings)
    step_s = float(np.median([gap for record in records for gap in record.gaps_s[1:]]))
    overhead_s = time.monotonic() - began - max(record.ended_s for record in records)
    return Answers(answer_rate(records), step_s, handover_gap(records), overhead_s)


def answer_lengths(answers: int) -> list[int]:
    """Returns answer lengths in tokens, evenly spread, different for neighbouring requests."""
    return [ANSWER_TOKENS // 2 + each * _STRIDE % ANSWER_TOKENS for each in range(answers)]


def prompt_rate(records: Sequence[RequestRecord], tokens: int) -> float:
    """Returns prompt tokens per second of a burst, while every worker has prompts.

    They are counted between first tokens.
    """
    firsts = sorted(record.token_s[0] for record in records)
    begun, busy = (max(1, int(part * len(firsts))) for part in _BUSY)
    return (busy - begun) * tokens / (firsts[busy - 1] - firsts[begun - 1])


def answer_rate(records: Sequence[RequestRecord]) -> float:
    """Returns answer tokens per second in the middle of a burst, without first tokens."""
    moments = sorted(moment for record in records for moment in record.token_s[1:])
    first, last = (int(part * (len(moments) - 1)) for part in _MIDDLE)
    return (last - first) / (moments[last] - moments[first])


def handover_gap(records: Sequence[RequestRecord]) -> float:
    """Returns the gap between the first two tokens in seconds, at the `_SLOW` quantile."""
    return float(np.quantile([record.gaps_s[0] for record in records], _SLOW))


def _records(target: Target, workload: Workload, settings: LoadSettings) -> Sequence[RequestRecord]:
    records = run_load(target, workload, (), settings).records
    failed = [record.error for record in records if record.error]
    if failed:
        raise Unavailable(f"{len(failed)} requests of a burst failed, one with {failed[0]}; see the router's log")
    return records
