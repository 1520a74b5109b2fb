"""Loads whose prompts share prefixes: conversations that grow turn by turn, and questions about common documents.

Their shapes are those of chat, of coding agents and of retrieval-augmented generation (RAG). A turn's prompt has random
tokens in the place of earlier answers, so a prefix cache has it up to the end of the prompt before.
"""

from dataclasses import dataclass

import numpy as np

from tandem.cli.load.synthetic import Lengths, due_times
from tandem.cli.load.workload import Arrival, Block, Workload

_SYSTEM_KEY = 0
"""The key of the system prompt, which all prompts begin with."""
_TURNS_MAX = 1 << 12
"""Block keys of a conversation; more than it has turns."""


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations of `turns` turns, each `pause_s` seconds after the one before on average."""

    name: str
    system_tokens: int
    first: Lengths
    added: Lengths
    """New tokens of each later prompt, the answer before it included."""
    answer: Lengths
    turns: int
    pause_s: float

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return the turns that are due within `seconds`; those at the start belong to conversations that had begun.

        The rate of turns is `rate`.
        """
        moments, lengths = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2))
        life_s = self.turns * self.pause_s
        arrivals: list[Arrival] = []
        for number, begun_s in enumerate(due_times(moments, 1.0, rate / self.turns, life_s + seconds)):
            due_s, key = begun_s - life_s, (1 + number) * _TURNS_MAX
            added = [*self.first.draw(lengths, 1), *self.added.draw(lengths, self.turns - 1)]
            prompt: tuple[Block, ...] = (Block(_SYSTEM_KEY, self.system_tokens),)
            for turn, (new, answer) in enumerate(zip(added, self.answer.draw(lengths, self.turns), strict=True)):
                prompt = (*prompt, Block(key + turn, new))
                if 0 <= due_s < seconds:
                    arrivals.append(Arrival(due_s, prompt, answer))
                due_s += float(moments.exponential(self.pause_s))
        return Workload(self.name, rate, seconds, seed, tuple(sorted(arrivals, key=lambda arrival: arrival.due_s)))


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions about `each` of `number` documents, of which few are popular (Zipf); the order of documents varies."""

    name: str
    system_tokens: int
    number: int
    each: int
    document: Lengths
    question: Lengths
    answer: Lengths

    def at(self, rate: float, seconds: float, seed: int) -> Workload:
        """Return questions with Poisson arrivals."""
        moments, choices, lengths = (np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(3))
        popularity = 1 / np.arange(1, self.number + 1)
        sizes = self.document.draw(lengths, self.number)
        due = due_times(moments, 1.0, rate, seconds)
        arrivals = []
        for number, (due_s, question, answer) in enumerate(
            zip(due, self.question.draw(lengths, len(due)), self.answer.draw(lengths, len(due)), strict=True)
        ):
            named = choices.choice(self.number, self.each, replace=False, p=popularity / popularity.sum())
            blocks = (Block(1 + int(document), sizes[document]) for document in named)
            prompt = (Block(_SYSTEM_KEY, self.system_tokens), *blocks, Block(1 + self.number + number, question))
            arrivals.append(Arrival(due_s, prompt, answer))
        return Workload(self.name, rate, seconds, seed, tuple(arrivals))
