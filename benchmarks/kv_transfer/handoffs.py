"""Measures hand-overs in a real cluster of one prefill and one decode worker, as the client sees them.

The figures are the time from a prompt's last chunk to its first decode step, the share of it that delays the answer,
and the slowdown of steps during transfers.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.kv_transfer.handoff_parts import Answer, gaps_meeting_transfers_ms, handoff_parts_ms, handoffs_ms
from tandem.client import AsyncClient
from tandem.protocol.lifecycle.events import LifecycleEvent

_TIMEOUT_S = 600
_BACKGROUND_PROMPT = 256
_ANSWER = 8

Figures = dict[str, object]


ANSWER_RESERVE = 16
"""Tokens of the model's context reserved for the answer."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes in tokens, which depend on the device; `streams` requests decode in the background."""

    page_tokens: int
    prompt: int
    chunk: int
    streams: int
    stream_tokens: int
    rounds: int
    dtype: str
    transfers: tuple[int, ...]
    """Sizes of the transfers whose bandwidth is measured, in tokens, in addition to one page and one chunk."""

    @property
    def prompt_name(self) -> int:
        """The prompt's length in the names of figures, including the reserve for the answer."""
        return self.prompt if self.prompt % self.page_tokens == 0 else self.prompt + ANSWER_RESERVE


SETTINGS = {
    "cuda": Settings(
        128,
        8192 - ANSWER_RESERVE,
        2048,
        streams=8,
        stream_tokens=600,
        rounds=12,
        dtype="bfloat16",
        transfers=(2048, 4096, 8192),
    ),
    "cpu": Settings(16, 1536, 512, streams=2, stream_tokens=60, rounds=4, dtype="float32", transfers=(2048,)),
}


class Asking:
    """A client that sends prompts of token ids, no two of which are equal."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._sent = 0

    async def ask(self, prompt: int, new_tokens: int) -> Answer:
        """Return a greedy answer of exactly `new_tokens` tokens to a prompt of `prompt` tokens."""
        self._sent += 1
        ids = [1000 + (17 * self._sent + 131 * i) % 20000 for i in range(prompt)]
        stream = self._client.stream_generate(ids, max_tokens=new_tokens, temperature=0, ignore_eos=True)
        moments = [time.time() async for chunk in stream if chunk.token_ids]  # the clock of the timelines
        return Answer(tuple(moments), (await stream.answer()).timeline)


async def handoffs(client: Asking, settings: Settings) -> Figures:
    """Measure one prompt at a time: the parts between its last chunk and its first decode step."""
    await client.ask(settings.prompt, _ANSWER)
    answers = [await client.ask(settings.prompt, _ANSWER) for _ in range(settings.rounds)]
    handoff = handoffs_ms(answers)
    exposed = [a.ms(LifecycleEvent.PREFILL_FINISHED, LifecycleEvent.DECODE_ADMITTED) for a in answers]
    ttft = [a.ms(LifecycleEvent.RECEIVED, LifecycleEvent.FIRST_TOKEN) for a in answers]
    prefill = [a.ms(LifecycleEvent.PREFILL_STARTED, LifecycleEvent.PREFILL_FINISHED) for a in answers]
    shares = [e / (t + h) for e, t, h in zip(exposed, ttft, handoff, strict=True)]
    prompt = settings.prompt_name
    figures: Figures = {
        f"handover_ms_{prompt}": _median(handoff),
        f"exposed_ms_{prompt}": _median(exposed),
        f"exposed_share_{prompt}": _median(shares),
        f"exposed_of_prefill_{prompt}": _median([e / p for e, p in zip(exposed, prefill, strict=True)]),
        f"ttft_ms_{prompt}": _median(ttft),
        f"prefill_ms_{prompt}": _median(prefill),
        "decode_step_ms": _median([gap for a in answers for gap in a.gaps_ms[1:]]),
        f"last_pages_sent_ms_{prompt}": _median(
            [a.ms(LifecycleEvent.PREFILL_FINISHED, LifecycleEvent.TRANSFER_FINISHED) for a in answers]
        ),
        f"handover_mean_ms_{prompt}": round(statistics.mean(handoff), 4),
        f"handover_parts_ms_{prompt}": handoff_parts_ms(answers),
        "handovers_ms": [round(duration_ms, 3) for duration_ms in handoff],
    }
    print(json.dumps(figures), flush=True)
    return figures


async def prefills(client: Asking, settings: Settings) -> Figures:
    """Measure how much transfers slow prefill down, by alternating prompts with and without a transfer.

    A request for 1 token needs no transfer, one for 2 tokens does. The order alternates from round to round,
    so that either kind follows the other, and a pause, equally often.
    """
    took: dict[int, list[float]] = {1: [], 2: []}
    for number in range(2 * settings.rounds):
        for new_tokens in (1, 2) if number % 2 else (2, 1):
            answer = await client.ask(settings.prompt, new_tokens)
            took[new_tokens].append(answer.ms(LifecycleEvent.PREFILL_STARTED, LifecycleEvent.PREFILL_FINISHED))
    without, handed_over = took[1], took[2]
    return {
        f"prefill_without_transfer_ms_{settings.prompt_name}": _median(without),
        f"prefill_with_transfer_ms_{settings.prompt_name}": _median(handed_over),
        "prefill_with_over_without_transfer": round(statistics.median(handed_over) / statistics.median(without), 4),
    }


async def interference(client: Asking, settings: Settings) -> Figures:
    """Measure the ITL of decoding streams without load, and while prompts arrive one after another.

    There are only a few streams, because with many a router sends several tokens per chunk.
    """

    async def streams() -> list[Answer]:
        asked = (client.ask(_BACKGROUND_PROMPT, settings.stream_tokens) for _ in range(settings.streams))
        return list(await asyncio.gather(*asked))

    quiet = await streams()
    background = asyncio.ensure_future(streams())
    windows, prompts = [], []
    while not background.done():
        started = time.time()
        # Two tokens: the KV is transferred, and the request ends after one decode step.
        prompts.append(await client.ask(settings.prompt, 2))
        windows.append((started, time.time()))
    busy = await background
    inside = [gap for a in busy for gap in _gaps_within(a, windows)]
    alone = [gap for a in quiet for gap in a.gaps_ms[1:]]
    met = [gaps_meeting_transfers_ms(a, prompts) for a in busy]
    slowed = [gap for gaps in met for gap in gaps]
    return {
        "decode_step_quiet_ms": _median(alone),
        "decode_step_with_transfers_ms": _median(inside),
        "decode_step_with_over_without_transfers": round(statistics.median(inside) / statistics.median(alone), 4),
        # A prompt's transfer takes a hundredth of the prompt's time, so few steps overlap one.
        "decode_step_p99_with_over_without_transfers": round(_p99(inside) / _p99(alone), 4),
        "decode_steps_meeting_transfers": max(len(gaps) for gaps in met),
        "decode_step_meeting_transfers_over_quiet": (
            round(statistics.median(slowed) / statistics.median(alone), 4) if slowed else None
        ),
        f"handover_beside_decode_ms_{settings.prompt_name}": _median(handoffs_ms(prompts)),
        "prompts_transferred_meanwhile": len(windows),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def _gaps_within(answer: Answer, windows: list[tuple[float, float]]) -> list[float]:
    """Return the gaps that end while another prompt is in progress."""
    ends = zip(answer.moments[1:], answer.gaps_ms, strict=True)
    return [gap for moment, gap in ends if any(start <= moment <= end for start, end in windows)]


async def through_the_cluster(address: str, settings: Settings) -> Figures:
    """Run all measurements over one connection."""
    async with AsyncClient(address, timeout_s=_TIMEOUT_S) as connection:
        client = Asking(connection)
        figures = await handoffs(client, settings) | await prefills(client, settings)
        return figures | await interference(client, settings)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)
