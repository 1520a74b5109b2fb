"""An engine: the times of decode steps and prefills, and the bytes and FLOPs that they need.

Times are those of the host. `GpuEngine.graph_seconds` and what counts the device's work need a GPU.

The bytes of a decode step are all weights that it reads, including the output layer, and its KV. The FLOPs of a prefill
are twice the non-embedding parameters per token, plus causal attention.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from benchmarks.engine.device_spans import Span, last_steps, record_spans
from benchmarks.gpu_timing import median_seconds
from tandem.cost_model.roofline import ModelSizes
from tandem.cost_model.step_work import StepWork
from tandem.engine.cuda.cuda_stepper import CudaStepper
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.model_runner import ModelRunner
from tandem.engine.steps.batch import PendingStep, StepBatch, StepRow
from tandem.engine.steps.sampling_metadata import SamplingInput
from tandem.protocol.kv_pages import FREED
from tandem.protocol.messages import SamplingParams

_GREEDY = SamplingInput(SamplingParams(max_tokens=1, temperature=0.0), 0)
DECODE_STEPS = 48
"""Timed steps of a decode measurement; the context grows by a token per step and has the given length in the middle."""
_SAMPLED = SamplingParams(max_tokens=1, temperature=0.8, top_k=50, top_p=0.95)


class GpuEngine:
    """A model runner whose requests are rows 0, 1, …, with pages assigned row by row."""

    def __init__(self, runner: ModelRunner, adapters: Sequence[int] = (0,)) -> None:
        """Assign `adapters`, given by their numbers, to the rows in turn."""
        self.runner = runner
        self._adapters = adapters
        self.shape = runner.spec

    def holds(self, rows: int, tokens: int) -> bool:
        """Return True if the KV cache can hold `rows` rows of `tokens` tokens."""
        return rows * self._pages_of_row(tokens, tokens) <= self.runner.cache.pages

    def decode_seconds(
        self,
        batch: int,
        context: int,
        steps: int = DECODE_STEPS,
        warm: int = 8,
        sampled: bool = False,
        *,
        chunk: int = 0,
    ) -> float:
        """Return the seconds per decode step of `batch` rows, whose mean context during the steps is `context` tokens.

        Each step is launched before the results of the previous one are read. If `chunk` is above 0, each step also has
        the first `chunk` tokens of a prompt.
        """
        timed = self.decode_steps(batch, context - steps // 2 - warm, warm + steps, sampled, chunk=chunk)
        for _ in range(warm):
            next(timed)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in timed:
            pass
        return (time.perf_counter() - started) / steps

    def decode_steps(
        self, batch: int, first: int, steps: int, sampled: bool = False, *, chunk: int = 0
    ) -> Iterator[None]:
        """Run `steps` steps of `batch` rows from position `first`, launching each step before the previous one is read.

        Yields after each launch and the read that follows it; the last step is read when the iterator ends. Each step
        ends with `chunk` tokens of a prompt, as `decode_seconds` has it.
        """
        first_rows = self.decode_rows(batch, first, steps)
        prompt = self._first_chunk(batch, first + steps, chunk)
        pending: PendingStep | None = None
        for number in range(steps):
            running = pending is not None and self.runner.asynchronous
            rows = [
                held._replace(start=first + number, draw=_draw(sampled, row, number), source=row if running else None)
                for row, held in enumerate(first_rows)
            ]
            launched = self.runner.launch(StepBatch([*rows, *prompt]))
            if pending is not None:
                pending()
            pending = launched
            yield
        if pending is not None:
            pending()

    def decode_rows(self, batch: int, first: int, positions: int) -> list[StepRow]:
        """Return `batch` rows of one token at position `first`, with pages for `positions` positions from there on."""
        pages = self._pages_of([(first, first + positions)] * batch)
        return [
            StepRow([(1000 + row) % self.shape.vocab_size], first, pages[row], _GREEDY, adapter=self._adapter(row))
            for row in range(batch)
        ]

    def _first_chunk(self, batch: int, positions: int, chunk: int) -> list[StepRow]:
        """Return a row with the first `chunk` tokens of a prompt, on pages after those of `batch` rows; none if 0."""
        if not chunk:
            return []
        pages = self._pages_of([*[(0, positions)] * batch, (0, chunk)])[-1]
        ids = torch.randint(3, self.shape.vocab_size, (chunk,), generator=torch.Generator().manual_seed(0)).tolist()
        return [StepRow(ids, 0, pages, None, adapter=self._adapter(batch))]

    def decode_spans(self, batch: int, context: int, steps: int = 16, warm: int = 8) -> Sequence[Span]:
        """Return the device's work in `steps` steps, after `warm` steps that fill the pipeline."""
        every = warm + steps
        spans = record_spans(lambda: deque(self.decode_steps(batch, context - every, every), maxlen=0))
        return last_steps(spans, steps, every)

    def graph(self, contexts: Sequence[int]) -> StepGraph:
        """Return the CUDA graph of a step whose rows have these contexts, with the inputs of such a step in place."""
        rows = zip(contexts, self._pages_of([(context, context + 1) for context in contexts]), strict=True)
        step = StepBatch(
            [
                StepRow([1000 + row], context, pages, _GREEDY, adapter=self._adapter(row))
                for row, (context, pages) in enumerate(rows)
            ]
        )
        self.runner.run(step)
        stepper = self.runner.stepper
        assert isinstance(stepper, CudaStepper)
        graph = stepper.graphs.fitting(step)
        assert graph is not None, f"no CUDA graph takes {len(contexts)} rows"
        return graph

    def graph_seconds(self, contexts: Sequence[int]) -> float:
        """Return the device time of a step whose rows have these contexts, in seconds, by replaying its CUDA graph."""
        return median_seconds(self.graph(contexts).graph.replay, rounds=30)

    def prefill_seconds(self, rows: int, tokens: int, rounds: int = 9) -> float:
        """Return the median seconds from prompts on the host to first tokens on the host, in one step."""
        times = []
        for number in range(rounds + 2):
            step = self.prompts(rows, tokens, seed=number)
            torch.cuda.synchronize()
            started = time.perf_counter()
            self.runner.run(step)
            times.append(time.perf_counter() - started)
        return statistics.median(times[2:])

    def chunked_seconds(self, tokens: int, chunk: int) -> float:
        """Return the seconds to compute one prompt in steps of `chunk` tokens.

        The first two chunks are computed once before, so that kernels are compiled.
        """
        took = 0.0
        for count in (2 * chunk, tokens):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for step in self.chunks(count, chunk):
                self.runner.run(step)
            took = time.perf_counter() - started
        return took

    def back_to_back_seconds(self, tokens: int, chunk: int, prompts: int) -> float:
        """Return the seconds per prompt if prompts follow each other without a pause, in steps of `chunk` tokens.

        Each step is launched before the results of the previous one are read. One prompt is computed before the clock
        starts.
        """
        steps = self.chunks(tokens, chunk)
        pending: PendingStep | None = None
        started = 0.0
        for number in range(1 + prompts):
            if number == 1:
                started = time.perf_counter()
            for step in steps:
                launched = self.runner.launch(step)
                if pending is not None:
                    pending()
                pending = launched
        took = time.perf_counter() - started
        assert pending is not None
        pending()
        return took / prompts

    def chunks(self, tokens: int, chunk: int) -> list[StepBatch]:
        """Return the steps that compute one prompt in chunks of `chunk` tokens; the last one samples a token."""
        kv = self.runner.kv_pages
        pages = range(kv.numbers(tokens) * kv.groups)
        ids = torch.randint(3, self.shape.vocab_size, (chunk,), generator=torch.Generator().manual_seed(0)).tolist()
        steps = []
        for start in range(0, tokens, chunk):
            end = min(start + chunk, tokens)
            held = pages[: kv.numbers(end) * kv.groups]
            steps.append(StepBatch([StepRow(ids[: end - start], start, held, _GREEDY if end == tokens else None)]))
        return steps

    def prompts(self, rows: int, tokens: int, seed: int = 0) -> StepBatch:
        """Return a step with `rows` random prompts of `tokens` tokens each."""
        pages = self._pages_of([(0, tokens)] * rows)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randint(3, self.shape.vocab_size, (rows, tokens), generator=generator).tolist()
        return StepBatch(
            [StepRow(drawn[row], 0, pages[row], _GREEDY, adapter=self._adapter(row)) for row in range(rows)]
        )

    def decode_bytes(self, contexts: Sequence[int]) -> float:
        """Return the bytes that a decode step of rows with these contexts must read."""
        return self.weight_bytes(len(contexts)) + sum(self._sizes.context_bytes(1, context) for context in contexts)

    def weight_bytes(self, batch: int = 1) -> float:
        """Return the bytes of the weights that a step of `batch` tokens reads."""
        return self._sizes.weight_bytes + self._sizes.expert_bytes_read(batch)

    def decode_flops(self, batch: int, context: int) -> float:
        """Return the FLOPs of a decode step."""
        sizes = self._sizes
        return batch * (2 * sizes.weights + sizes.attention_flop_per_pair * context)

    def kv_bytes(self, tokens: int) -> float:
        """Return the bytes of the KV cache for `tokens` tokens."""
        return tokens * self.runner.cache.page_bytes / self.runner.page_tokens

    def prefill_flops(self, rows: int, tokens: int) -> float:
        """Return the FLOPs of the prefill of `rows` prompts of `tokens` tokens."""
        work = StepWork(prefill_tokens=rows * tokens, prefill_pairs=rows * tokens * tokens / 2)
        return float(self._sizes.step_flops(work))

    def _adapter(self, row: int) -> int:
        return self._adapters[row % len(self._adapters)]

    @property
    def _sizes(self) -> ModelSizes:
        sizes: ModelSizes = self.runner.roofline.sizes
        return sizes

    def _pages_of(self, spans: Sequence[tuple[int, int]]) -> Sequence[Sequence[int]]:
        """Return the pages of each row, given the start and the end of its positions.

        In groups with a sliding window, pages before the window of the start are left out.
        """
        kv, free, rows = self.runner.kv_pages, 0, []
        for start, end in spans:
            row = [FREED] * (kv.numbers(end) * kv.groups)
            for entry in kv.seen(start, 0, kv.numbers(end)):
                row[entry], free = free, free + 1
            rows.append(row)
        if free > self.runner.cache.pages:
            raise ValueError(f"{len(spans)} rows need {free} pages of {self.runner.cache.pages}")
        return rows

    def _pages_of_row(self, start: int, end: int) -> int:
        kv = self.runner.kv_pages
        return len(kv.seen(start, 0, kv.numbers(end)))


def _draw(sampled: bool, row: int, index: int) -> SamplingInput:
    return SamplingInput(_SAMPLED, index + row) if sampled else _GREEDY
