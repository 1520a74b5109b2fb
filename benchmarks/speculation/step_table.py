"""Measures a real worker's decode steps with and without draft tokens, by batch size and acceptance rate.

Each batch is answered by a worker without draft tokens, then by another with every fixed number of draft tokens, and
with the number that it chooses itself. Draft tokens are accepted at random (`Chance`), because with random weights in
16 bits no proposer can know the answer: steps with several rows round differently. A figure covers steps in which all
requests run.
"""

import asyncio
import random
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from unittest.mock import patch

from rich.console import Console
from rich.table import Table

from benchmarks.speculation.local_worker import ROUTER, Answer, LocalWorker
from decode_worker.drafts import RowDrafts, StepDrafts
from tandem.engine.config import EngineConfig
from tandem.engine.cuda.verify_graphs import DRAFTS, MOST_ROWS
from tandem.engine.model_runner import ModelRunner
from tandem.engine.speculation.proposer import DRAFTS_MAX, Draft, DraftSource, ProposerName
from tandem.protocol.messages import SamplingParams
from tandem.protocol.speculation_method import SpeculationMethod

CHANCE = DraftSource(ProposerName.NGRAM, 1)
"""The source of the drafts of `ChanceProposer`."""


class ChanceProposer:
    """Always proposes the same tokens, as many as allowed."""

    def begin(self, key: Hashable, token_ids: Sequence[int], cache_salt: str = "") -> None:
        """Implement `Proposer.begin`."""

    def extend(self, key: Hashable, token_ids: Sequence[int]) -> None:
        """Implement `Proposer.extend`."""

    def propose(self, key: Hashable, most: int) -> Draft:
        """Implement `Proposer.propose`."""
        return Draft(range(1, most + 1), CHANCE)

    def leave(self, key: Hashable) -> None:
        """Implement `Proposer.leave`."""


class Chance:
    """Accepts each draft token with probability `alpha`, provided that those before it were accepted."""

    def __init__(self, alpha: float, seed: int = 0) -> None:
        self.alpha = alpha
        """The acceptance probability; may change."""
        self._dice = random.Random(seed)

    @contextmanager
    def accepting(self) -> Iterator[None]:
        """Verify draft tokens at random within the context, in all workers of this process."""
        chance = self

        def runs(step: StepDrafts, token_ids: Sequence[int]) -> list[tuple[RowDrafts, list[int]]]:
            return [(row_drafts, chance.run(row_drafts, token_ids)) for row_drafts in step.drafts]

        with patch.object(StepDrafts, "runs", runs):
            yield

    def run(self, drafts: RowDrafts, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that a row gains: the randomly accepted draft tokens, and the token sampled after them."""
        accepted = next(
            (n for n in range(len(drafts.token_ids)) if self._dice.random() >= self.alpha), len(drafts.token_ids)
        )
        return [token_ids[drafts.row], *token_ids[drafts.first : drafts.first + accepted]]


WANTED = {1: 4, 8: 3, 32: 3, 64: 2, 128: 1}
"""The number of draft tokens that the table shows for each batch size, measured in addition to `DRAFTS`."""
ALPHAS = (0.7, 0.8)
WARM_UP_STEPS, LEARNING_STEPS = 20, 100
"""Unmeasured first steps: with a fixed number of draft tokens, and with a number that the worker has to learn."""
_PROMPT_STEPS = 100
"""Number of steps by which answers are made longer, because requests decode while other prompts are computed."""
_POLL_S = 0.002

Figures = dict[str, object]


@dataclass(frozen=True, slots=True)
class _Mark:
    """The number of tokens of all requests up to a step, and the time at which they arrived."""

    step: int
    tokens: int
    at_s: float


class CountingWorker(LocalWorker):
    """A worker that counts the tokens of steps, at little cost for the thread that runs them."""

    def __init__(self, runner: ModelRunner, engine: EngineConfig, method: SpeculationMethod) -> None:
        super().__init__(runner, engine, method)
        self.runner = runner
        self._tokens = 0
        self._marks: list[_Mark] = []
        self._awaited: list[Answer] = []
        self._begun: int | None = None
        """The first step in which every request of `_awaited` has a token."""

    async def figures(
        self, prompts: Sequence[Sequence[int]], most: int, before: int, steps: int
    ) -> tuple[float, float, int]:
        """Return the tokens per second, the seconds per step, and the number of steps without a CUDA graph.

        The figures cover about `steps` steps in which all of `prompts` are answered, each with at most `most` tokens,
        after the first `before` such steps. Raises RuntimeError if an answer ends before half of these steps.
        """
        self._begun = None
        answers = self._awaited = [self.send(prompt, SamplingParams(most, ignore_eos=True)) for prompt in prompts]
        await _until(lambda: self._begun is not None)
        assert self._begun is not None
        first, misses = self._begun + before, self.runner.graph_use.misses
        last = first + steps
        await _until(lambda: self._marks[-1].step >= last or any(answer.finished.is_set() for answer in answers))
        misses = self.runner.graph_use.misses - misses
        window = [mark for mark in self._marks if mark.step >= first]
        self.worker.abort(ROUTER, self.refs())
        await _until(lambda: not self.worker._schedulers.open_requests())
        self._marks.clear()
        if not window or window[-1].step - window[0].step < steps // 2:
            raise RuntimeError(f"answers of {most} tokens end before {steps} steps with all of them")
        start, end = window[0], window[-1]
        seconds = end.at_s - start.at_s
        return (end.tokens - start.tokens) / seconds, seconds / (end.step - start.step), misses

    async def _read(self) -> None:
        async for step in self.worker.attach(ROUTER).messages():
            for event in step.events:
                self.answer_of(event).take(event)
            self._tokens += sum(len(event.token_ids) for event in step.events)
            self._tokens += sum(len(columns.token_ids) for columns in step.tokens)
            self._marks.append(_Mark(step.step, self._tokens, time.perf_counter()))
            if self._begun is None and self._awaited and all(answer.token_ids for answer in self._awaited):
                self._begun = step.step


class StepTable:
    """The measurement of one engine over batch sizes, acceptance rates and numbers of draft tokens."""

    def __init__(
        self,
        runner: ModelRunner,
        engine: EngineConfig,
        *,
        context: int,
        steps: int,
        alphas: Sequence[float] = ALPHAS,
        drafts: Sequence[int] = DRAFTS,
        method: SpeculationMethod = SpeculationMethod.NGRAM,
    ) -> None:
        """Store the tokens per prompt, the steps per figure, and the fixed numbers of draft tokens.

        With n-grams as `method`, proposing takes no time; with others, the engine's own weights propose.
        """
        self._runner = runner
        self._engine = engine
        self._context = context
        self._steps = steps
        self._alphas = alphas
        self._drafts = drafts
        self._method = method

    async def rows(self, batches: Sequence[int], console: Console) -> list[Figures]:
        """Return the figures of each batch size and acceptance rate, and print them as they are measured."""
        rows: list[Figures] = []
        for batch in batches:
            async with CountingWorker.open(self._runner, self._engine, SpeculationMethod.OFF) as off:
                off_per_s, off_s, misses = await off.figures(
                    self._prompts(batch), self._most(1), WARM_UP_STEPS, self._steps
                )
            plain: Figures = {"off_tokens_per_s": round(off_per_s, 1), "off_ms": _ms(off_s), "off_graph_misses": misses}
            chance = Chance(0.0)
            async with CountingWorker.open(self._runner, self._engine, self._method) as drafting:
                if self._method is SpeculationMethod.NGRAM:
                    drafting.speculation._proposer = ChanceProposer()
                with chance.accepting():
                    for alpha in self._alphas:
                        chance.alpha = alpha
                        row: Figures = {"batch": batch, "alpha": alpha, **plain}
                        row |= await self._with_drafts(drafting, batch, off_per_s)
                        rows.append(row)
                        console.print(row)
        return rows

    async def _with_drafts(self, worker: CountingWorker, batch: int, off_per_s: float) -> Figures:
        fixed: dict[str, Figures] = {}
        ratios: dict[int, float] = {}
        for drafts in sorted({*self._drafts, WANTED.get(batch, 1)}):
            if batch * (drafts + 1) > MOST_ROWS:
                continue
            worker.speculation.fixed_drafts = drafts
            per_s, step_s, misses = await worker.figures(
                self._prompts(batch), self._most(drafts + 1), WARM_UP_STEPS, self._steps
            )
            ratios[drafts] = per_s / off_per_s
            fixed[str(drafts)] = {
                "verify_ms": _ms(step_s),
                "over_off": round(ratios[drafts], 3),
                "tokens_a_step": round(per_s * step_s / batch, 3),
                "graph_misses": misses,
            }
        worker.speculation.fixed_drafts = None
        most = self._most(min(DRAFTS_MAX + 1, max(2, MOST_ROWS // batch)))
        per_s, step_s, misses = await worker.figures(self._prompts(batch), most, LEARNING_STEPS, self._steps)
        adaptive, best = per_s / off_per_s, max(ratios, key=lambda drafts: ratios[drafts], default=0)
        return {
            "fixed": fixed,
            "best_fixed": best,
            "adaptive_ms": _ms(step_s),
            "adaptive_over_off": round(adaptive, 3),
            "adaptive_over_best_fixed": round(adaptive / max(1.0, ratios.get(best, 1.0)), 3),
            "adaptive_tokens_a_step": round(per_s * step_s / batch, 3),
            "adaptive_graph_misses": misses,
        }

    def _prompts(self, batch: int) -> list[list[int]]:
        vocabulary = self._runner.spec.vocab_size
        return [[(7 * n * n + 31 * number + n) % vocabulary for n in range(self._context)] for number in range(batch)]

    def _most(self, tokens_a_step: int) -> int:
        """Return a length for answers that last through a measurement, within the model's context."""
        steps = _PROMPT_STEPS + LEARNING_STEPS + 2 * self._steps
        return min(tokens_a_step * steps, self._runner.facts.max_context - self._context)


def table_of(rows: Sequence[Figures]) -> Table:
    """Return a table of the figures for the number of draft tokens in `WANTED`."""
    names = ("batch", "α", "drafts", "off ms", "verify ms", "÷ off", "adaptive ÷ off", "÷ best fixed", "best")
    table = Table(*names)
    for row in rows:
        drafts = str(WANTED.get(int(str(row["batch"])), 1))
        fixed = row["fixed"]
        wanted = fixed.get(drafts, {}) if isinstance(fixed, dict) else {}
        cells = [row["batch"], row["alpha"], drafts, row["off_ms"], wanted.get("verify_ms"), wanted.get("over_off")]
        cells += [row[name] for name in ("adaptive_over_off", "adaptive_over_best_fixed", "best_fixed")]
        table.add_row(*map(str, cells))
    return table


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the event loop has work meanwhile
        await asyncio.sleep(_POLL_S)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
