"""KV hand-over from prefill to decode workers: `python -m benchmarks.kv_transfer --device cuda`.

First two page pools alone, in two processes: the bandwidth of transfers against a plain copy measured in the same run.
Then a real cluster, one prefill and one decode worker: how long after a prompt's last chunk its first decode step
begins, how much of that a client could feel, and what transfers cost those who compute meanwhile. With two GPUs each
worker has its own; with one they share it; `--device cpu` moves host memory. All of it once for each direction: the
prefill worker writes, or the decode worker reads (figures that end in `_read`). The last line is one JSON object.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.command_line import need_gpu
from benchmarks.handover_parts import Answer, handover_parts_ms, handovers_ms
from benchmarks.met_steps import gaps_meeting_transfers_ms
from benchmarks.results import run_facts, save_result
from benchmarks.served_model import add_model_options, choose_model
from benchmarks.transfer_pools import PoolPlan, copy_ceiling, measure_pools
from cluster.config import ClusterConfig
from cluster.launcher import Cluster
from kv_transfer.base import Direction
from wire import convert
from wire.generated.tandem.v1 import inference_pb2, inference_pb2_grpc
from wire.rpc import open_channel
from wire.timeline import Edge

_TIMEOUT_S = 600
_GPU_SHAPE = "llama-3-8b"
"""What is measured on GPUs if nothing else is asked for."""
_BACKGROUND_PROMPT = 256
_ANSWER = 8
ROOM = 16
"""Tokens of a model's context that prompts leave to their answers."""
_SUFFIX = {Direction.WRITE: "", Direction.READ: "_read"}
_DIRECTIONS = {"write": (Direction.WRITE,), "read": (Direction.READ,), "both": tuple(Direction)}

Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class Settings:
    """What depends on the device. Prompt, chunk and answers are in tokens; `streams` decode in the background."""

    page_tokens: int
    prompt: int
    chunk: int
    streams: int
    stream_tokens: int
    rounds: int
    dtype: str
    transfers: tuple[int, ...]
    """Tokens of transfers whose bandwidth is measured, beside one page and a chunk."""

    @property
    def prompt_name(self) -> int:
        """The prompt's length in names of figures: where it leaves room to the answer, that counts as well."""
        return self.prompt if self.prompt % self.page_tokens == 0 else self.prompt + ROOM


SETTINGS = {
    "cuda": Settings(
        128, 8192 - ROOM, 2048, streams=8, stream_tokens=600, rounds=12, dtype="bfloat16", transfers=(2048, 4096, 8192)
    ),
    "cpu": Settings(16, 1536, 512, streams=2, stream_tokens=60, rounds=4, dtype="float32", transfers=(2048,)),
}


class Client:
    """Requests with arbitrary token ids, every prompt different."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
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


def pools(plan: PoolPlan, settings: Settings) -> Figures:
    """Bandwidth of one page, a chunk and longer transfers as shares of a plain copy's."""
    sizes = sorted({1, *(tokens // plan.page_tokens for tokens in (settings.chunk, *settings.transfers))})
    ceiling = copy_ceiling(plan, sizes)
    found, wire = asyncio.run(measure_pools(plan, sizes))
    figures: Figures = {"copy_gb_per_s": round(ceiling / 1e9, 2), "transport": wire}
    for each in found:
        name = "one_page" if each.pages == 1 else str(each.pages * plan.page_tokens)
        figures |= {
            f"transfer_bw_ratio_{name}": round(each.steady / ceiling, 4),
            f"transfer_alone_bw_ratio_{name}": round(each.alone / ceiling, 4),
        }
        print(
            f"{name:>8} tokens: {each.steady / 1e9:7.1f} GB/s in a stream, {each.alone / 1e9:7.1f} alone,"
            f" of {ceiling / 1e9:.1f} over {wire}",
            flush=True,
        )
    return figures


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_transfer", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    add_model_options(parser)
    parser.add_argument("--direction", default="both", choices=tuple(_DIRECTIONS), help="who moves the pages")
    parser.add_argument("--only", choices=("pools", "cluster"), default=None, help="one half of the measurement")
    parser.add_argument("--save", action="store_true", help="keep the run under benchmarks/results/")
    return parser.parse_args()


def in_one_direction(only: str | None, settings: Settings, plan: PoolPlan, config: ClusterConfig) -> Figures:
    """Pools first, then the cluster; names of figures end with the direction's suffix."""
    print(f"direction: {plan.direction}", flush=True)
    found: Figures = {}
    if only != "cluster":
        found |= pools(plan, settings)
    if only != "pools":
        cluster = Cluster.start(config)
        try:
            found |= asyncio.run(through_the_cluster(cluster.endpoints.grpc, settings))
        finally:
            cluster.stop()
    return {f"{name}{_SUFFIX[plan.direction]}": value for name, value in found.items()}


def main() -> None:
    """Each direction in turn."""
    arguments = parse_arguments()
    if arguments.device == "cuda":
        need_gpu()
    settings = SETTINGS[arguments.device]
    shape = arguments.shape
    if arguments.device == "cuda" and arguments.model is None and shape is None:
        shape = _GPU_SHAPE
    model = choose_model(arguments.model, shape)
    gpus = torch.cuda.device_count() if arguments.device == "cuda" else 0
    ends = ("cuda:0", f"cuda:{min(1, gpus - 1)}") if gpus else ("cpu", "cpu")
    plan = PoolPlan(model.folder, settings.page_tokens, getattr(torch, settings.dtype), *ends)
    config = ClusterConfig(
        model.folder,
        random_weights=model.random_weights,
        model_name=model.name,
        device=arguments.device,
        dtype=settings.dtype,
        page_tokens=settings.page_tokens,
        max_step_tokens=settings.chunk,
        grpc_port=0,
        http_port=0,
        prefix_cache=False,
    )
    result: Figures = {"gpus": gpus}
    for direction in _DIRECTIONS[arguments.direction]:
        plan, config = replace(plan, direction=direction), replace(config, kv_direction=direction)
        result |= in_one_direction(arguments.only, settings, plan, config)
    result |= {
        "model": model.name,
        "dtype": settings.dtype,
        "prompt_tokens": settings.prompt,
        "chunk_tokens": settings.chunk,
    }
    result |= run_facts(arguments.device)
    if arguments.save:
        name = f"kv-transfer-{gpus}-gpus-{model.name}" if gpus else f"kv-transfer-{model.name}"
        print("saved", save_result(name, result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
