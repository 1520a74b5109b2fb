"""Hand-overs in a real cluster of one prefill and one decode worker, as a client sees them.

How long after a prompt's last chunk its first decode step begins, how much of that a client could feel, and what
transfers cost those who compute meanwhile.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.transfer.handover_parts import Answer, handover_parts_ms, handovers_ms
from benchmarks.transfer.kv_settings import Settings
from benchmarks.transfer.met_steps import gaps_meeting_transfers_ms
from wire import convert
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_client_channel
from wire.tracing.timeline import Edge

_TIMEOUT_S = 600
_BACKGROUND_PROMPT = 256
_ANSWER = 8

Figures = dict[str, object]


class Client:
    """Requests with arbitrary token ids, every prompt different."""

    def __init__(self, address: str) -> None:
        self._channel = open_client_channel(address)
        self._stub: Any = inference_pb2_grpc.InferenceStub(self._channel)
        self._asked = 0

    async def ask(self, prompt: int, new_tokens: int) -> Answer:
        """One greedy answer of exactly `new_tokens` tokens."""
        self._asked += 1
        ids = [1000 + (17 * self._asked + 131 * i) % 20000 for i in range(prompt)]
        options = inference_pb2.GenerationOptions(max_tokens=new_tokens, temperature=0, ignore_eos=True)
        request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids), options=options)
        moments, timeline = [], None
        async for message in self._stub.Generate(request, timeout=_TIMEOUT_S):
            if message.chunk.token_ids:
                moments.append(time.time())  # by the clock of timelines
            if message.HasField("complete"):
                timeline = convert.timeline_from_proto(message.complete.timeline)
        if timeline is None:
            raise RuntimeError("an answer without an end")
        return Answer(tuple(moments), timeline)

    async def close(self) -> None:
        await self._channel.close()


async def handovers(client: Client, settings: Settings) -> Figures:
    """One prompt at a time: what lies between its last chunk and its first decode step."""
    await client.ask(settings.prompt, _ANSWER)
    answers = [await client.ask(settings.prompt, _ANSWER) for _ in range(settings.rounds)]
    handover = handovers_ms(answers)
    exposed = [a.ms(Edge.PREFILL_FINISHED, Edge.DECODE_ADMITTED) for a in answers]
    ttft = [a.ms(Edge.RECEIVED, Edge.FIRST_TOKEN) for a in answers]
    prefill = [a.ms(Edge.PREFILL_STARTED, Edge.PREFILL_FINISHED) for a in answers]
    shares = [e / (t + h) for e, t, h in zip(exposed, ttft, handover, strict=True)]
    prompt = settings.prompt_name
    found: Figures = {
        f"handover_ms_{prompt}": _median(handover),
        f"exposed_ms_{prompt}": _median(exposed),
        f"exposed_share_{prompt}": _median(shares),
        f"exposed_of_prefill_{prompt}": _median([e / p for e, p in zip(exposed, prefill, strict=True)]),
        f"ttft_ms_{prompt}": _median(ttft),
        f"prefill_ms_{prompt}": _median(prefill),
        "decode_step_ms": _median([gap for a in answers for gap in a.gaps_ms[1:]]),
        f"last_pages_sent_ms_{prompt}": _median([a.ms(Edge.PREFILL_FINISHED, Edge.TRANSFER_FINISHED) for a in answers]),
        f"handover_mean_ms_{prompt}": round(statistics.mean(handover), 4),
        f"handover_parts_ms_{prompt}": handover_parts_ms(answers),
        "handovers_ms": [round(each, 3) for each in handover],
    }
    print(json.dumps(found), flush=True)
    return found


async def prefills(client: Client, settings: Settings) -> Figures:
    """Prompts that are handed over and prompts that are not, in turns: what transfers cost the prefill worker.

    No request of more than one token stays with its prefill worker: 1 token is no transfer, 2 are the least with one.
    Which comes first changes from round to round, so that both follow each other, and a pause, equally often.
    """
    took: dict[int, list[float]] = {1: [], 2: []}
    for number in range(2 * settings.rounds):
        for new_tokens in (1, 2) if number % 2 else (2, 1):
            answer = await client.ask(settings.prompt, new_tokens)
            took[new_tokens].append(answer.ms(Edge.PREFILL_STARTED, Edge.PREFILL_FINISHED))
    without, handed_over = took[1], took[2]
    return {
        f"prefill_without_transfer_ms_{settings.prompt_name}": _median(without),
        f"prefill_with_transfer_ms_{settings.prompt_name}": _median(handed_over),
        "prefill_with_over_without_transfer": round(statistics.median(handed_over) / statistics.median(without), 4),
    }


async def interference(client: Client, settings: Settings) -> Figures:
    """The gaps of streams that decode, in quiet and while prompts arrive next to them one after the other.

    Few streams: a router makes chunks of several tokens where many streams send more than it can.
    """

    async def streams() -> list[Answer]:
        asked = (client.ask(_BACKGROUND_PROMPT, settings.stream_tokens) for _ in range(settings.streams))
        return list(await asyncio.gather(*asked))

    quiet = await streams()
    background = asyncio.ensure_future(streams())
    windows, beside = [], []
    while not background.done():
        started = time.time()
        # Two tokens: the transfer happens, and the request is gone after one step.
        beside.append(await client.ask(settings.prompt, 2))
        windows.append((started, time.time()))
    busy = await background
    inside = [gap for a in busy for gap in _gaps_within(a, windows)]
    alone = [gap for a in quiet for gap in a.gaps_ms[1:]]
    met = [gaps_meeting_transfers_ms(a, beside) for a in busy]
    slowed = [gap for gaps in met for gap in gaps]
    return {
        "decode_step_quiet_ms": _median(alone),
        "decode_step_with_transfers_ms": _median(inside),
        "decode_step_with_over_without_transfers": round(statistics.median(inside) / statistics.median(alone), 4),
        # A prompt's transfer is a hundredth of its time: only the rarest steps can meet it.
        "decode_step_p99_with_over_without_transfers": round(_p99(inside) / _p99(alone), 4),
        "decode_steps_meeting_transfers": max(len(gaps) for gaps in met),
        "decode_step_meeting_transfers_over_quiet": (
            round(statistics.median(slowed) / statistics.median(alone), 4) if slowed else None
        ),
        f"handover_beside_decode_ms_{settings.prompt_name}": _median(handovers_ms(beside)),
        "prompts_transferred_meanwhile": len(windows),
    }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def _gaps_within(answer: Answer, windows: list[tuple[float, float]]) -> list[float]:
    """Of the gaps that end while another prompt is on its way."""
    ends = zip(answer.moments[1:], answer.gaps_ms, strict=True)
    return [gap for moment, gap in ends if any(start <= moment <= end for start, end in windows)]


async def through_the_cluster(address: str, settings: Settings) -> Figures:
    """All measurements over one connection."""
    client = Client(address)
    try:
        found = await handovers(client, settings) | await prefills(client, settings)
        return found | await interference(client, settings)
    finally:
        await client.close()


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)
