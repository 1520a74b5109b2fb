"""A model with state layers while clients leave and decode workers are replaced: each answer is that of a quiet pair.

The short form of `tests/faults/test_state_layers.py`, in one process. The pool is small, so that the pages of states
are used again and requests are preempted, the prompts have a prefix in common, and steps verify draft tokens.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from pathlib import Path

from tandem.protocol.errors import ResourceExhausted
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod
from tests.worker_pair import RequestOutput, Sender, WorkerPair, until

from .test_families import PAGE, Served, ask, prompts

EVENTS = 10
REPLACE_EVERY = 5
"""The distance of replaced decode workers among the events; the others are aborts."""
TAILS = (2, 7, PAGE + 1, PAGE + 9)
SAMPLING = SamplingParams(5 * PAGE)


@dataclass
class Client:
    """Asks one question again and again, as the router does when an attempt is lost or preempted."""

    pair: WorkerPair
    number: int
    prompt: list[int]
    wanted: list[int]
    right: int = 0
    attempts: int = 0
    newest: str = ""
    abandoned: bool = False
    """True if the client has left its newest request."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the decode worker of the newest request has ended."""

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            self.abandoned, tokens = False, list[int]()
            while not self.abandoned:
                output = await self._attempt(tokens)
                tokens = output.tokens
                assert tokens == self.wanted[: len(tokens)]
                if output.finish and not output.error and not self.abandoned:
                    assert tokens == self.wanted
                    self.right += 1
                    break

    async def _attempt(self, tokens: list[int]) -> RequestOutput:
        self.lost.clear()
        self.attempts += 1
        self.newest = f"q{self.number}-{self.attempts}"
        async with asyncio.timeout(60):
            while True:
                try:
                    output = self.pair.send(self.newest, self.prompt, SAMPLING, 1, tokens)
                    break
                except ResourceExhausted:
                    await asyncio.sleep(0.002)
        await until(
            lambda: (
                output.finish or self.abandoned or self.lost.is_set() or 0 <= output.preempted_at <= len(output.tokens)
            )
        )
        return RequestOutput(list(output.tokens), finish=output.finish, error=output.error)

    def leave(self) -> None:
        self.abandoned = True
        self.pair.abort(self.newest)


async def test_answers_are_right_though_clients_leave_and_workers_are_replaced(tmp_path: Path) -> None:
    served, rng = Served(tmp_path, "qwen3_next"), random.Random(3)
    stem, *tails = prompts(2 * PAGE, *TAILS)
    asked = [[*stem, *tail] for tail in tails]
    async with served.pair(speculate=SpeculationMethod.OFF) as quiet:
        wanted = [(await ask(quiet, f"q{n}", prompt, SAMPLING)).tokens for n, prompt in enumerate(asked)]
    kv = served.load().kv_pages
    async with served.pair(2 * kv.held(len(asked[-1]) + SAMPLING.max_tokens, decoding=True)) as pair:
        clients = [Client(pair, number, *both) for number, both in enumerate(zip(asked, wanted, strict=True))]
        stopping = asyncio.Event()
        Sender(pair, SAMPLING.max_tokens)  # the decode worker expects short answers
        running = [asyncio.create_task(client.run(stopping)) for client in clients]
        preemptions = 0
        for event in range(1, EVENTS + 1):
            answered = sum(client.right for client in clients)
            await until(lambda before=answered: sum(client.right for client in clients) > before)
            await asyncio.sleep(rng.random() / 20)
            if event % REPLACE_EVERY:
                rng.choice(clients).leave()
                continue
            preemptions += pair.decode.worker.report.load().preemptions
            await pair.replace_decode()
            for client in clients:
                client.lost.set()
        await until(lambda: all(client.right for client in clients))
        stopping.set()
        await asyncio.gather(*running)
        assert preemptions
        await pair.empty()


async def test_a_preempted_answer_continues_from_its_kept_states(tmp_path: Path) -> None:
    """Only the tokens after its last full page are computed again; without the prefix cache, prompt and answer are."""
    served, asked = Served(tmp_path, "nemotron_h"), prompts(33, 50)
    kv = served.load().kv_pages
    sampling = SamplingParams(3 * kv.page_tokens)
    recomputed, answers = [], []
    for kept in (True, False):
        pages = 2 * kv.held(len(asked[-1]) + sampling.max_tokens) + kv.groups
        async with served.pair(pages, both=True, prefix_cache=kept, speculate=SpeculationMethod.OFF) as pair:
            sender = Sender(pair, sampling.max_tokens)
            outputs = await asyncio.gather(*(sender.run(f"q{n}", prompt, sampling) for n, prompt in enumerate(asked)))
            answers.append([output.tokens for output in outputs])
            recomputed += sender.recomputed
            await pair.empty()
    assert answers[0] == answers[1]
    assert recomputed[0] < kv.page_tokens < len(asked[0]) <= recomputed[1]
