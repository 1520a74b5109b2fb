"""Measures the router's cost of forwarding tokens: `python -m benchmarks.streaming`.

A stand-in worker sends tokens for many answers, clients in other processes read them, and the router is measured with
its own listeners and with front processes, in turns. Times are CPU time, so other load of the machine hardly counts.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import grpc.aio

from benchmarks.results import run_facts, save_result
from benchmarks.router.processes import run_router, run_source
from tandem.cli.models.default_model import find_default_model
from tandem.engine.weights.gguf import prepare_model
from tandem.protocol.generated.tandem.v1 import inference_pb2, inference_pb2_grpc

_PROMPT = 20
Turn = dict[str, float]
"""CPU time per token in µs of each process, and tokens per chunk."""


def main() -> None:
    """Measures both kinds in turns, and prints JSON last."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--answers", type=int, default=128, help="at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=40.0, help="between two tokens of an answer")
    parser.add_argument("--fronts", type=int, default=2, help="front processes")
    parser.add_argument("--clients", type=int, default=2, help="processes that read")
    parser.add_argument("--turns", type=int, default=3, help="of each kind")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    asked = parser.parse_args()
    model = prepare_model(find_default_model())
    context = mp.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=run_source, args=(there, asked.step_ms / 1e3), daemon=True).start()
    there.close()
    controller = here.recv()
    turns: dict[int, list[Turn]] = {0: [], asked.fronts: []}
    for _ in range(asked.turns):
        for fronts, found in turns.items():
            found.append(_turn(context, asked, controller, model, fronts))
            print(f"{fronts} front processes: {found[-1]}", flush=True)
    result = {
        **{key: getattr(asked, key) for key in ("answers", "tokens", "step_ms", "fronts", "clients", "turns")},
        **_figures(turns[0], turns[asked.fronts]),
        "model": model.name,
        "dtype": "none",
        **run_facts("cpu"),
    }
    if asked.save:
        print("saved", save_result("streaming", result))
    print(json.dumps(result))


def _figures(own: list[Turn], fronts: list[Turn]) -> dict[str, Any]:
    """Returns medians of both kinds' turns, and the router process's cost with front processes / without."""
    figures = {
        name: {key: round(median(each[key] for each in found), 2) for key in found[0]}
        for name, found in (("own_listeners", own), ("front_processes", fronts))
    }
    ratio = figures["front_processes"]["router_us"] / figures["own_listeners"]["router_us"]
    return {**figures, "router_ratio": round(ratio, 3)}


def _shares(answers: int, clients: int) -> list[int]:
    """Returns the number of answers that each client reads, at least one each."""
    clients = min(answers, clients)
    return [answers // clients + (number < answers % clients) for number in range(clients)]


def _turn(context: Any, asked: argparse.Namespace, controller: str, model: Path, fronts: int) -> Turn:
    """Runs one router from start to end. EOFError if one of the processes died."""
    here, there = context.Pipe()
    router = context.Process(
        target=run_router, args=(there, controller, model, {"front_processes": fronts, "chunks_per_s": 1e9})
    )
    router.start()
    there.close()  # otherwise the router's death would not close the pipe
    address, _ = here.recv()
    readers = []
    for number, answers in enumerate(_shares(asked.answers, asked.clients)):
        mine, theirs = context.Pipe()
        context.Process(target=_run_client, args=(theirs, address, number, answers, asked.tokens), daemon=True).start()
        theirs.close()
        readers.append(mine)
    counts = [each.recv() for each in readers]
    here.send("usage")
    usage = here.recv()
    here.send("end")
    router.join()
    tokens, chunks, clients_s = (sum(column) for column in zip(*counts, strict=True))
    each = {"router_us": usage.cpu_s, "fronts_us": usage.children_s, "clients_us": clients_s}
    return {name: round(seconds / tokens * 1e6, 1) for name, seconds in each.items()} | {
        "tokens_per_chunk": round(tokens / chunks, 3)
    }


def _run_client(pipe: Connection, address: str, number: int, answers: int, tokens: int) -> None:
    asyncio.run(_read(pipe, address, number, answers, tokens))


async def _read(pipe: Connection, address: str, number: int, answers: int, tokens: int) -> None:
    began = time.process_time()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        reading: list[Coroutine[Any, Any, tuple[int, int]]] = [
            _read_one(stub, f"{number}-{each}", tokens) for each in range(answers)
        ]
        counts = await asyncio.gather(*reading)
    brought, chunks = (sum(column) for column in zip(*counts, strict=True))
    pipe.send((brought, chunks, time.process_time() - began))


async def _read_one(stub: inference_pb2_grpc.InferenceStub, request_id: str, tokens: int) -> tuple[int, int]:
    """Returns tokens and chunks of an answer."""
    request = inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=range(1000, 1000 + _PROMPT)),
        options=inference_pb2.GenerationOptions(max_tokens=tokens, ignore_eos=True),
    )
    brought = chunks = 0
    async for message in stub.Generate(request):
        if message.HasField("chunk"):
            brought, chunks = brought + len(message.chunk.token_ids), chunks + 1
    return brought, chunks


if __name__ == "__main__":
    main()
