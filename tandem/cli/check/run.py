"""One check: sends waves of requests, compares each answer with the reference, and collects what is wrong."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tandem.cli.check.answer import Agreement, Answer, compare
from tandem.cli.check.request import CheckRequest
from tandem.cli.check.server import CheckedServer
from tandem.cli.diagnosis.checks import Level
from tandem.cli.load.words import random_words
from tandem.protocol.errors import Unavailable

SHOWN_CHARACTERS = 200
REPEATED_WORDS = 4
"""The number of words at the end of a prompt that begin its second repetition, which the answer then continues."""


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """The settings of all checks."""

    seed: int = 0
    rounds: int = 3
    repeats: int = 1000
    """The number of times that the same prompt is sent."""
    concurrency: int = 16
    prompt_words: int = 128
    answer_tokens: int = 48
    settle_s: float = 30.0
    """Seconds within which the server must have no request after its clients have left."""
    tolerance: float = 0.5
    """The difference of log probabilities, in nats, up to which rounding may choose another token.

    The default is four steps of bfloat16 for logits between 16 and 32.
    """
    recovery_s: float = 180.0
    """Seconds within which requests must succeed again after the restart command."""


class Allowed(Enum):
    """The failures that a check allows, because servers may document them."""

    NONE = "none"
    REFUSAL = "refusal"
    """An HTTP status from 400 to 499 before the answer, as for an id that is in use."""
    CUT = "cut"
    """An answer that ends with an error or with its connection; what has arrived must be right."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One answer that was wrong, and shell commands that send the requests which were sent together with it."""

    reason: str
    script: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One row of the report."""

    name: str
    level: Level
    found: str
    problems: tuple[Problem, ...] = ()


class CheckRun:
    """The requests, answers and problems of one check."""

    def __init__(self, name: str, server: CheckedServer, settings: CheckSettings) -> None:
        self.name, self.server, self.settings = name, server, settings
        self.problems: list[Problem] = []
        self.warnings: list[str] = []
        self.counts: Counter[str] = Counter()
        self.notes: list[str] = []
        self._references: dict[tuple[str, int], Answer] = {}
        self._prompts = 0

    def prompt(self) -> str:
        """Return a new prompt: random words, and the first of them again, which most models continue by repetition.

        So an answer depends on KV of the whole prompt, and shows if some of it is that of another prompt.
        """
        self._prompts += 1
        rng = random.Random(f"{self.settings.seed} {self.name} {self._prompts}")
        words = random_words(rng, self.settings.prompt_words)
        return f"{' '.join(words)} . {' '.join(words)} . {' '.join(words[:REPEATED_WORDS])}"

    def request(self, prompt: str = "") -> CheckRequest:
        """Return a request with this prompt, or with a new one."""
        return CheckRequest(prompt or self.prompt(), self.settings.answer_tokens)

    async def reference(self, request: CheckRequest) -> Answer:
        """Return the answer to this prompt when no other request runs, from KV that no other request has computed.

        Raises Unavailable if the server does not answer.
        """
        key = request.prompt, request.max_tokens
        if key not in self._references:
            salt = f"check {self.settings.seed} {self.name} {len(self._references)}"
            answer = await self.server.send(
                CheckRequest(request.prompt, request.max_tokens, cache_salt=salt, logprobs=True)
            )
            if answer.error:
                raise Unavailable(f"{self.server.url} does not answer a single request: {answer.error}")
            self._references[key] = answer
        return self._references[key]

    async def wave(self, requests: Sequence[CheckRequest], allowed: Allowed = Allowed.NONE) -> list[Answer]:
        """Send requests together, and compare what arrives of each answer with its reference.

        The server may close the connections of clients that pause.
        """
        for request in requests:
            await self.reference(request)
        others_ended = asyncio.Event()
        tasks = [asyncio.ensure_future(self.server.send(request, others_ended)) for request in requests]
        reading = [task for task, request in zip(tasks, requests, strict=True) if not request.pauses]
        if reading:
            await asyncio.wait(reading)
        others_ended.set()
        answers = await asyncio.gather(*tasks)
        for request, answer in zip(requests, answers, strict=True):
            await self.judge(request, answer, Allowed.CUT if request.pauses else allowed, requests)
        return answers

    async def judge(
        self, request: CheckRequest, answer: Answer, allowed: Allowed, together: Sequence[CheckRequest] = ()
    ) -> bool:
        """Count the answer, and note a problem if it is wrong; return True if it is complete and right.

        `together` are the requests that were sent at the same time.
        """
        reference = await self.reference(request)
        self.counts["refused and sent again"] += answer.refusals
        if answer.error and 400 <= answer.status < 500 and allowed is Allowed.REFUSAL:
            self.counts["refused"] += 1
            return False
        cut = bool(answer.error) and allowed is Allowed.CUT and not answer.error.startswith("it did not end")
        if answer.error and not cut:
            self.fail(answer.error, request, together)
            return False
        if not (answer.left or cut) and not answer.finish_reason:
            self.fail("the answer has no finish_reason", request, together)
            return False
        agreement = compare(replace(answer, left=answer.left or cut), reference, self.settings.tolerance)
        if agreement is Agreement.WRONG:
            self.fail(
                f"the answer is {_shown(answer.text)}; sent alone, the request is answered {_shown(reference.text)}",
                request,
                together,
            )
            return False
        if agreement is Agreement.UNEXPLAINED:
            self.warnings.append(f"{_shown(answer.text)} instead of {_shown(reference.text)}")
        self.counts["near ties"] += agreement is Agreement.NEAR_TIE
        kind = "cut off" if cut else "left" if answer.left else "right"
        self.counts[kind] += 1
        return kind == "right" and agreement is not Agreement.UNEXPLAINED

    def fail(self, reason: str, request: CheckRequest | None = None, together: Sequence[CheckRequest] = ()) -> None:
        """Note a problem, with shell commands that send the request last, after those sent together with it."""
        script: list[str] = []
        if request is not None:
            others = [other for other in together if other is not request]
            script = self.server.script([*others, request])
        self.problems.append(Problem(reason, tuple(script)))

    async def settle(self) -> None:
        """Check that the server has no request within `settle_s` after all clients have ended or left."""
        inside = await self.server.idle_within(self.settings.settle_s)
        if inside is None:
            self.notes.append("no metrics say whether requests remain")
        elif inside:
            self.fail(f"{inside} requests remain {self.settings.settle_s:g} s after their clients have left")

    def result(self) -> CheckResult:
        """Return the row of the report."""
        counted = [f"{count} {kind}" for kind, count in self.counts.items() if count]
        level = Level.FAIL if self.problems else Level.WARN if self.warnings else Level.OK
        if self.warnings:
            counted.append(f"{len(self.warnings)} differ, and without logprobs rounding cannot be excluded")
        found = "; ".join([", ".join(counted), *dict.fromkeys(self.notes)])
        first = f"{len(self.problems)} wrong: {self.problems[0].reason}" if self.problems else ""
        return CheckResult(self.name, level, "; ".join(filter(None, [first, found])), tuple(self.problems))


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…")
