"""The loads of the benchmarks of tiers: agents, questions about documents, and prompts that share nothing.

    agents      each sends a turn, waits for the answer, calls a tool and sends the next turn, which begins with all
                turns before it. Their lengths follow published statistics of coding agents: 33 to 43 turns, 131 prompt
                tokens for each token of an answer, and 94 to 96 % of the prompt tokens seen before
    documents   questions about documents, each about one of as many documents as there would be agents
    unique      prompts of the length of these documents, none of which shares a page with another one

Agents pause between two turns; questions and unique prompts arrive at random, as many as agents would send if answers
took no time. A working set is the number of tokens of all live conversations ÷ the number of tokens whose KV fits into
the GPUs.
"""

import random
from dataclasses import dataclass
from statistics import fmean

from tandem.cli.load.workload import Arrival, Block

LOADS = ("agents", "documents", "unique")
ANSWER_TOKENS = 300
"""Mean length of an answer."""
PROMPT_TOKENS = 131 * ANSWER_TOKENS
"""Mean length of a prompt, and the length of a document."""
_QUESTION_TOKENS = 100
_TURNS = range(33, 44)
_NEW_SHARE = 0.05
"""The share of prompt tokens that no earlier turn of the same agent had."""
_SYSTEM_KEY = 0
"""The key of the tokens of the system prompt, which all agents share."""
_DOCUMENT_KEYS = 1 << 40
"""Lowest key of the tokens of documents; those of questions are numbered from 1."""


@dataclass(slots=True)
class Agent:
    """One agent: the number of its turns, the length of its first prompt, and the tokens that each turn adds."""

    key: int
    turns: int
    system_tokens: int
    grown: list[tuple[int, int]]
    """For each turn, the new tokens of its prompt (the answer before it included) and those of its answer."""
    dice: random.Random
    turn: int = 0

    @property
    def prompt(self) -> tuple[Block, ...]:
        """The prompt of the present turn."""
        own = sum(new for new, _ in self.grown[: self.turn + 1])
        return Block(_SYSTEM_KEY, self.system_tokens), Block(self.key, own)

    def pause_s(self, mean_s: float) -> float:
        """Return the time until the next turn; it has a long tail."""
        return self.dice.lognormvariate(-0.5, 1.0) * mean_s

    @property
    def arrival(self) -> Arrival:
        """The request of the present turn."""
        return Arrival(0.0, self.prompt, self.grown[self.turn][1])


def make_agent(key: int, seed: int, length_scale: float = 1.0) -> Agent:
    """Return a new agent with random lengths; those of turns vary by a factor of about 2.

    Its lengths and pauses depend on `key` and `seed` alone, so that all servers get the same agents.
    """
    dice = random.Random(f"{seed} {key}")
    grown = _NEW_SHARE * PROMPT_TOKENS
    turns = dice.choice(_TURNS)
    # Mean prompt = system prompt + half of what all turns add.
    system = PROMPT_TOKENS - grown * (fmean(_TURNS) + 1) / 2

    def drawn(mean: float) -> int:
        return max(1, round(dice.lognormvariate(-0.125, 0.5) * mean * length_scale))

    added = [(drawn(grown), drawn(ANSWER_TOKENS)) for _ in range(turns)]
    return Agent(key, turns, max(1, round(system * length_scale)), added, dice)


def question(number: int, documents: int, dice: random.Random, length_scale: float = 1.0) -> Arrival:
    """Return question `number` (from 1) about one of `documents` documents; 0 = about a document of its own."""
    document = _DOCUMENT_KEYS + (dice.randrange(documents) if documents else number)
    lengths = (max(1, round(tokens * length_scale)) for tokens in (PROMPT_TOKENS, _QUESTION_TOKENS, ANSWER_TOKENS))
    document_tokens, question_tokens, answer_tokens = lengths
    return Arrival(0.0, (Block(document, document_tokens), Block(number, question_tokens)), answer_tokens)


def live_conversations(working_set: float, kv_tokens: float, length_scale: float = 1.0) -> int:
    """Return how many agents or documents have a working set of `working_set` × `kv_tokens` tokens, at least one."""
    return max(1, round(working_set * kv_tokens / (PROMPT_TOKENS * length_scale)))
