"""Measures the router alone: `python -m benchmarks.router`.

A stand-in worker sends tokens for many answers, and clients in another process read them. Rates "a core" are per second
of the router process's CPU time, so that other load of the machine hardly counts. Ages of messages are measured by the
host's clock, and so include the effect of its load.
"""

import argparse
import multiprocessing as mp
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.command_line import Measured, at_least
from benchmarks.results import run_facts
from benchmarks.router.processes import Usage, run_router, run_source
from benchmarks.router.readers import Answers, Asked, not_reading, run_readers
from tandem.cli.load.spread import percentile
from tandem.cli.models.default_model import find_default_model
from tandem.engine.weights.gguf import prepare_model

Figures = dict[str, float]
UNCOALESCED = {"chunks_per_s": 1e9}
"""Settings of a router that sends every token at once, in its own message."""
COALESCED = {"chunks_per_s": 500.0, "chunk_delay_max_s": 1.0}
"""Settings of a router whose messages carry the tokens of many steps."""
_STEP_S, _SHORT_STEP_S = 0.02, 0.01
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Router:
    """A router process: its addresses, and the pipe to query it."""

    grpc: str
    http: str
    pipe: Connection

    def usage(self) -> Usage:
        """Return the router's resource usage."""
        self.pipe.send("usage")
        usage: Usage = self.pipe.recv()
        return usage

    def read(self, kind: str, answers: int, tokens: int, *, keep_ages: bool = False) -> Answers:
        """Read `answers` concurrent answers in another process. Raises EOFError if it dies."""
        here, there = _CONTEXT.Pipe()
        address = {"grpc": self.grpc, "http": self.http}[kind]
        arguments = (there, kind, address, Asked(answers, tokens, keep_ages))
        reader = _CONTEXT.Process(target=run_readers, args=arguments, daemon=True)
        reader.start()
        there.close()
        result: Answers = here.recv()
        reader.join()
        return result


_CONTEXT = mp.get_context("spawn")


@contextmanager
def running(model: Path, step_s: float, settings: dict[str, Any]) -> Iterator[Router]:
    """Run a router and the stand-in worker, which sends each answer a token every `step_s` seconds."""
    source, router = _CONTEXT.Pipe(), _CONTEXT.Pipe()
    worker = _CONTEXT.Process(target=run_source, args=(source[1], step_s), daemon=True)
    worker.start()
    source[1].close()
    process = _CONTEXT.Process(target=run_router, args=(router[1], source[0].recv(), model, settings))
    process.start()
    router[1].close()  # otherwise the pipe would stay open after the router's death
    try:
        grpc_address, http_address = router[0].recv()
        yield Router(grpc_address, http_address, router[0])
        router[0].send("end")
        process.join()
    finally:
        for child in (process, worker):
            child.kill()
            child.join()


def messages_a_core(model: Path, kind: str, answers: int, tokens: int) -> float:
    """Return the messages per second of the router process's CPU time if each token has its own message."""
    with running(model, _STEP_S, UNCOALESCED) as router:
        read = router.read(kind, answers, tokens)
        return read.messages / router.usage().cpu_s


def coalesced_tokens_a_core(model: Path, answers: int, tokens: int) -> Figures:
    """Return tokens per second of CPU time, and per message, if messages carry the tokens of many steps."""
    with running(model, _SHORT_STEP_S, COALESCED) as router:
        read = router.read("grpc", answers, tokens)
        return {
            "coalesced_tokens_per_s_core": round(read.tokens / router.usage().cpu_s),
            "coalesced_tokens_per_message": round(read.tokens / read.messages, 1),
        }


def many_streams(model: Path, streams: int, tokens: int, rounds: int) -> Figures:
    """Return the figures of `streams` open streams with the default budget of messages, over several rounds.

    `memory_growth_mib` is the growth from the end of the first round to the end of the last.
    """
    with running(model, _STEP_S, {"max_queued_requests": 2 * streams}) as router:
        done, used = [], []
        for _ in range(rounds):
            done.append(router.read("grpc", streams, tokens))
            used.append(router.usage())
    read = sum(round_answers.tokens for round_answers in done)
    return {
        "streams": streams,
        "complete_share": sum(round_answers.answers for round_answers in done) / (streams * rounds),
        "stream_tokens_read": read,
        "tokens_per_message": round(read / sum(round_answers.messages for round_answers in done), 2),
        "tokens_per_s_core": round(read / used[-1].cpu_s),
        "memory_growth_mib": round((used[-1].rss_bytes - used[0].rss_bytes) / _MIB, 1),
    }


def half_load(model: Path, per_s: float, answers: int, tokens: int) -> Figures:
    """Return the age of messages at half of `per_s` messages per second, with and without clients that do not read."""
    with running(model, answers / (per_s / 2), UNCOALESCED) as router:
        alone = router.read("grpc", answers, tokens, keep_ages=True)
        before = router.usage()
        with not_reading(router.grpc, router.http, 16 * tokens):
            beside = router.read("grpc", answers, tokens, keep_ages=True)
            growth = router.usage().rss_bytes - before.rss_bytes
    return {
        "half_load_messages_per_s": round(per_s / 2),
        **{f"age_ms_p{percent}": _ms(alone, percent) for percent in (50, 99)},
        **{f"age_beside_unread_ms_p{percent}": _ms(beside, percent) for percent in (50, 99)},
        "complete_beside_unread_share": beside.answers / answers,
        "unread_memory_mib": round(growth / _MIB, 1),
    }


def _ms(read: Answers, percent: float) -> float:
    return round(percentile(read.ages_s, percent) * 1e3, 2)


def measure_all(asked: argparse.Namespace, model: Path) -> Figures:
    """Run all measurements, and print the figures of each."""
    figures: Figures = {}
    for kind in ("grpc", "http"):
        figures[f"{kind}_messages_per_s_core"] = round(messages_a_core(model, kind, asked.answers, asked.tokens))
        print(figures, flush=True)
    figures |= coalesced_tokens_a_core(model, asked.answers, 10 * asked.tokens)
    figures |= many_streams(model, asked.streams, asked.stream_tokens, asked.rounds)
    print(figures, flush=True)
    return figures | half_load(model, figures["grpc_messages_per_s_core"], asked.answers, asked.tokens)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this case."""
    parser.add_argument("--answers", type=at_least(1), default=256, help="at a time, where each token has a message")
    parser.add_argument("--tokens", type=at_least(2), default=300, help="of each of these")
    parser.add_argument("--streams", type=at_least(1), default=2000, help="open at a time, with the default budget")
    parser.add_argument("--stream-tokens", type=at_least(2), default=100, help="of each stream in a round")
    parser.add_argument("--rounds", type=at_least(2), default=6, help="of these streams")


def measure(options: argparse.Namespace) -> Measured:
    """Run all measurements of streams."""
    model = prepare_model(find_default_model())
    result = {
        **{key: value for key, value in vars(options).items() if key != "save"},
        "load_average_before": round(os.getloadavg()[0], 1),
        **measure_all(options, model),
        "model": model.name,
        "dtype": "none",
        **run_facts("cpu"),
    }
    return "router", result
