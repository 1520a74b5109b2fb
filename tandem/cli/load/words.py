"""Prompts of common words, for servers that accept only text. Most tokenizers encode each word as one token."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tandem.cli.load.workload import Arrival, Block, Workload, prompt_ids

_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face others
level office door health person art war history party result change morning reason research girl guy moment air teacher
force education
"""
_WORDS = _TEXT.split()


def prompt_words(prompt: tuple[Block, ...], seed: int) -> str:
    """Return a text with one random word per token of the blocks; equal keys and seed give equal words."""
    return " ".join(_WORDS[number] for number in prompt_ids(prompt, seed, len(_WORDS)))


def random_words(rng: random.Random, count: int) -> list[str]:
    """Return `count` random words."""
    return rng.choices(_WORDS, k=count)


@dataclass(frozen=True, slots=True)
class WordLengths:
    """A linear model of the tokens that a server counts for a prompt of words.

    tokens = `template` + `per_word` × words, where `template` are the tokens of the chat template.
    """

    template: float = 0.0
    per_word: float = 1.0

    @classmethod
    def of(cls, short: tuple[int, int], long: tuple[int, int]) -> WordLengths:
        """Fit the model to two prompts, given as (words, tokens).

        If the longer prompt does not have more tokens, return the default of one token per word.
        """
        per_word = (long[1] - short[1]) / (long[0] - short[0])
        return cls(max(0.0, short[1] - per_word * short[0]), per_word) if per_word > 0 else cls()

    def in_words(self, workload: Workload) -> Workload:
        """Return the workload with the block lengths converted from tokens to words.

        The prompts then have about the requested number of tokens on the server. Conversations are not changed.
        """
        return replace(workload, arrivals=tuple(map(self._arrival, workload.arrivals)))

    def _arrival(self, arrival: Arrival) -> Arrival:
        if arrival.messages:
            return arrival
        left = self.template
        blocks = []
        for block in reversed(arrival.prompt):  # the template's tokens are taken off the end, which is not shared
            taken = min(left, block.tokens)
            left -= taken
            blocks.append(Block(block.key, round((block.tokens - taken) / self.per_word)))
        whole = tuple(block for block in reversed(blocks) if block.tokens) or (Block(arrival.prompt[0].key, 1),)
        return replace(arrival, prompt=whole)
