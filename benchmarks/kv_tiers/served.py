"""Loads a server with agents, questions about documents, or prompts that share nothing.

    python -m benchmarks.kv_tiers served --device cuda --shape llama-3.1-8b --set kv_host_bytes=77309411328
    python -m benchmarks.kv_tiers served --url http://127.0.0.1:8000/v1 --kv-tokens 131072

Without `--url`, a cluster is started with the settings that are given. The loads are those of
`benchmarks/kv_tiers/load.py`, over OpenAI's HTTP API with token ids, so that any server can be compared. Each
conversation or document is sent once first; requests from then on count.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import numpy as np

from benchmarks.cluster import add_model_options, choose_model, parse_setting, running_cluster
from benchmarks.command_line import Measured, above_0, need_gpu
from benchmarks.kv_tiers.load import LOADS, Agent, live_conversations, make_agent, question
from benchmarks.results import run_facts
from tandem.cli.load.http_client import HttpShare, make_request
from tandem.cli.load.record import RequestRecord
from tandem.cli.load.workload import Arrival, parse_rates
from tandem.protocol.errors import Unavailable

_AT_ONCE = 8
"""Number of conversations that are begun at the same time."""
_DEADLINE_S = 120.0
"""Time limit of a request in seconds."""


@dataclass(slots=True)
class Sender:
    """Sends requests over HTTP, and keeps their records."""

    share: HttpShare
    began_s: float = field(default_factory=time.monotonic)
    records: list[RequestRecord] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=count)

    async def send(self, arrival: Arrival) -> None:
        """Send a request as soon as it is built, and wait for the end of its answer."""
        # Building the tokens of a long prompt takes milliseconds, in which other answers are to be read.
        ready = await asyncio.to_thread(make_request, self.share, next(self.numbers), arrival)
        now = time.monotonic() - self.began_s
        record = await self.share.connect().ask(replace(ready, due_s=now), self.began_s, now + self.share.deadline_s)
        self.records.append(record)


@dataclass(frozen=True, slots=True)
class Cell:
    """One load under one working set."""

    load: str
    working_set: float
    options: argparse.Namespace

    async def run(self, share: HttpShare) -> dict[str, object]:
        """Load the server; return the figures of the requests that were sent after the warm-up."""
        asked, dice = self.options, random.Random(f"{self.options.seed} {self.load} {self.working_set}")
        live = live_conversations(self.working_set, asked.kv_tokens, asked.length_scale)
        sender = Sender(share)
        agents = [make_agent(key, asked.seed, asked.length_scale) for key in range(1, live + 1)]
        for agent in agents:
            # Agents begin in the middle of their work, so that the working set is that of a long run.
            agent.turn = agent.dice.randrange(agent.turns)
        documents = 0 if self.load == "unique" else live
        firsts = (
            [agent.arrival for agent in agents]
            if self.load == "agents"
            else [question(number, documents, dice, asked.length_scale) for number in range(1, live + 1)]
        )
        await _all(sender, firsts)
        warm_s = time.monotonic() - sender.began_s
        numbers = count(live + 1)

        async def work(agent: Agent) -> None:
            while True:
                await asyncio.sleep(agent.pause_s(asked.tool_seconds))
                agent.turn += 1
                if agent.turn == agent.turns:
                    agent = make_agent(agent.key + live, asked.seed, asked.length_scale)
                await sender.send(agent.arrival)

        async def ask() -> None:
            async with asyncio.TaskGroup() as group:
                while True:
                    await asyncio.sleep(dice.expovariate(live / asked.tool_seconds))
                    group.create_task(sender.send(question(next(numbers), documents, dice, asked.length_scale)))

        running = [work(agent) for agent in agents] if self.load == "agents" else [ask()]
        with suppress(TimeoutError):
            async with asyncio.timeout(asked.seconds), asyncio.TaskGroup() as group:
                for coroutine in running:
                    group.create_task(coroutine)
        return self._figures(sender.records, live, warm_s)

    def _figures(self, records: Sequence[RequestRecord], live: int, warm_s: float) -> dict[str, object]:
        counted = [record for record in records if record.sent_s >= warm_s]
        whole = [record for record in counted if not record.error and record.ttft_s is not None]
        if not whole:
            errors = ", ".join(sorted({record.error for record in records if record.error})) or "none has ended"
            raise Unavailable(f"no request of {self.load} was answered: {errors}; raise --seconds, or mend the server")
        ttft_s = np.array([record.ttft_s for record in whole])
        seconds = self.options.seconds
        prompt = sum(record.prompt_tokens for record in whole)
        return {
            "load": self.load,
            "working_set": self.working_set,
            "live": live,
            "warm_up_s": round(warm_s, 1),
            "requests": len(whole),
            "failed": len(counted) - len(whole),
            "requests_per_s": round(len(whole) / seconds, 3),
            "requests_per_s_in_time": round(float((ttft_s <= self.options.ttft_limit).sum()) / seconds, 3),
            "prompt_tokens_mean": round(prompt / len(whole)),
            "cached": round(sum(record.cached_tokens for record in whole) / max(1, prompt), 4),
            "ttft_s": {str(q): round(float(np.percentile(ttft_s, q)), 4) for q in (50, 90, 99)},
        }


async def _all(sender: Sender, arrivals: Sequence[Arrival]) -> None:
    """Send these requests, a few at a time."""
    running = asyncio.Semaphore(_AT_ONCE)

    async def one(arrival: Arrival) -> None:
        async with running:
            await sender.send(arrival)

    await asyncio.gather(*map(one, arrivals))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--url", default="", help="http://HOST:PORT/v1 of a running server; else a cluster is started")
    parser.add_argument("--served-model", default="m", help="the name by which the server at --url serves its model")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    add_model_options(parser)
    parser.add_argument("--set", action="append", default=[], help="a setting of the cluster: kv_host_bytes=1000000000")
    parser.add_argument("--kv-tokens", type=above_0, required=True, help="tokens whose KV fits into the GPUs' memory")
    parser.add_argument("--loads", default="agents", help=f"comma-separated: {', '.join(LOADS)}")
    parser.add_argument("--working-sets", default="1.3,4", help="as multiples of --kv-tokens")
    parser.add_argument("--tool-seconds", type=above_0, default=10.0, help="mean time between an agent's turns")
    parser.add_argument("--length-scale", type=above_0, default=1.0, help="of all prompts and answers")
    parser.add_argument(
        "--ttft-limit", type=above_0, default=2.0, help="a first token within it comes in time, seconds"
    )
    parser.add_argument("--seconds", type=above_0, default=60.0, help="of each load, after each conversation has begun")
    parser.add_argument("--vocab-size", type=int, default=100_000, help="token ids are below it")
    parser.add_argument("--row", default="defaults", help="name of the server's settings in the result")
    parser.add_argument("--seed", type=int, default=0)


def measure(options: argparse.Namespace) -> Measured:
    """Return the figures of all loads, after those of each load have been printed."""
    if options.device == "cuda" and not options.url:
        need_gpu()
    cells = [
        Cell(load, working_set, options)
        for load in options.loads.split(",")
        for working_set in parse_rates(options.working_sets, "--working-sets")
    ]
    name, figures = options.served_model, list[dict[str, object]]()
    with ExitStack() as stack:
        url = options.url
        if not url:
            model = choose_model(options.model, options.shape)
            settings = {"device": options.device, **dict(map(parse_setting, options.set))}
            name, url = model.name, f"http://{stack.enter_context(running_cluster(model, settings)).http}/v1"
        for number, cell in enumerate(cells):
            # Each load has tokens of its own, so that none finds KV of an earlier one.
            share = HttpShare(url, name, "", options.seed + number, options.vocab_size, (), _DEADLINE_S)
            figures.append(asyncio.run(cell.run(share)))
            print(json.dumps(figures[-1]), flush=True)
    asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    result = {"model": name, "dtype": "bfloat16", "options": asked, "cells": figures, **run_facts(options.device)}
    return f"kv-tiers-served-{options.row}-{name}", result
