"""Replays a proposer over answers that are known: how many steps they would take, without any model."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.engine.speculation.proposer import DraftSource, Proposer

SALT = ""
_LONG = 8192
_STEPS = 2048
_ROUNDS = 5
_VOCABULARY = 49_152


@dataclass(slots=True)
class Replay:
    """What steps with drafts gain over known answers; the first token of each comes with its prompt."""

    steps: int = 0
    tokens: int = 0
    drafted: Counter[DraftSource] = field(default_factory=Counter)
    """Drafts by their source."""
    accepted: Counter[DraftSource] = field(default_factory=Counter)
    first_drafted: Counter[DraftSource] = field(default_factory=Counter)
    """The first drafts of steps among them."""
    first_accepted: Counter[DraftSource] = field(default_factory=Counter)

    @property
    def tokens_a_step(self) -> float:
        """Tokens of a request in a step; 1 without drafts."""
        return self.tokens / self.steps

    def add(self, proposer: Proposer, key: int, prompt: Sequence[int], answer: Sequence[int], most: int) -> None:
        """Replay one answer with at most `most` drafts in a step, none for a token behind the last."""
        proposer.begin(key, [*prompt, *answer[:1]], SALT)
        place = 1
        while place < len(answer):
            gained = 1 + self._verify(proposer, key, answer[place:], most)
            proposer.extend(key, answer[place : place + gained])
            place += gained
            self.steps += 1
            self.tokens += gained
        proposer.leave(key)

    def _verify(self, proposer: Proposer, key: int, rest: Sequence[int], most: int) -> int:
        """Return how many drafts are accepted before `rest`, of which one token is always drawn by the model."""
        if len(rest) == 1:
            return 0
        draft = proposer.propose(key, min(most, len(rest) - 1))
        drafted, accepted = len(draft.token_ids), 0
        while accepted < drafted and draft.token_ids[accepted] == rest[accepted]:
            accepted += 1
        if drafted:
            self.drafted[draft.source] += drafted
            self.accepted[draft.source] += accepted
            self.first_drafted[draft.source] += 1
            self.first_accepted[draft.source] += accepted > 0
        return accepted


@dataclass(frozen=True, slots=True)
class ProposerTime:
    """Processor time of a proposer at a history of 8,192 random tokens, the least of several rounds."""

    begin_ms: float
    """The first look-up of a request, which notes its prompt."""
    step_us: float
    """One token more and one look-up."""
    leave_us: float
    """The end of a request, for each token of its answer."""


def measure_time(make: type[Proposer]) -> ProposerTime:
    """Measure a proposer."""
    tokens = random.Random(0).choices(range(_VOCABULARY), k=_LONG + _STEPS)
    rounds = [_round(make(), tokens) for _ in range(_ROUNDS)]
    begin, step, leave = (min(each) for each in zip(*rounds, strict=True))
    return ProposerTime(begin * 1e3, step / _STEPS * 1e6, leave / _STEPS * 1e6)


def _round(proposer: Proposer, tokens: Sequence[int]) -> tuple[float, float, float]:
    clock = time.process_time
    began = clock()
    proposer.begin(0, tokens[:_LONG], SALT)
    proposer.propose(0, 1)
    stepped = clock()
    for token in tokens[_LONG:]:
        proposer.extend(0, (token,))
        proposer.propose(0, 4)
    left = clock()
    proposer.leave(0)
    return stepped - began, left - stepped, clock() - left
