"""A proposer that knows the answers: it shows what drafts of a given acceptance bring, for benchmarks and tests."""

import random
from collections.abc import Hashable, Mapping, Sequence

from engine.speculation.proposer import Draft

Answers = Mapping[tuple[int, ...], Sequence[int]]
"""The answer to each prompt."""


class OracleProposer:
    """Proposes each token of the known answer with a given probability, and a wrong one otherwise.

    Each position of an answer is right or wrong in every draft that reaches it.
    """

    def __init__(self, answers: Answers, acceptance: float, *, seed: int = 0, vocab_size: int = 100) -> None:
        """`acceptance` is the probability for each position, 0 to 1."""
        self._answers = answers
        self._acceptance = acceptance
        self._seed = seed
        self._vocab_size = vocab_size
        self._requests: dict[Hashable, tuple[tuple[int, ...], int]] = {}
        """The prompt of each request and the number of its tokens so far, the prompt's included."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """See `Proposer`; KeyError for an unknown prompt."""
        if key in self._requests:
            raise ValueError(f"{key} is known already")
        prompt = next(each for each in self._answers if tuple(token_ids[: len(each)]) == each)
        self._requests[key] = prompt, len(token_ids)

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """See `Proposer`."""
        prompt, count = self._requests[key]
        self._requests[key] = prompt, count + len(token_ids)

    def propose(self, key: Hashable, most: int) -> Draft:
        """See `Proposer`."""
        prompt, count = self._requests[key]
        start = count - len(prompt)
        answer = self._answers[prompt][start : start + most]
        return Draft([self._guess(prompt, start + n, token) for n, token in enumerate(answer)], 1)

    def leave(self, key: Hashable) -> None:
        """See `Proposer`."""
        del self._requests[key]

    def _guess(self, prompt: tuple[int, ...], index: int, token: int) -> int:
        dice = random.Random(f"{self._seed} {prompt[:8]} {len(prompt)} {index}")
        return token if dice.random() < self._acceptance else (token + 1) % self._vocab_size
