"""A stand-in engine that packs steps as for a GPU but computes nothing, and a stopwatch for the code around it."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kv_transfer.layout import KVLayout
from tandem.cost_model.roofline import CPU, ModelSizes, Roofline
from tandem.engine.adapters.slots import AdapterSlots
from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.page_pool import PagePool
from tandem.engine.cache.tiers.page_copies import PageCopies
from tandem.engine.cuda.cuda_graphs import graph_sizes
from tandem.engine.cuda.sampler_cuda import PARAMS, DeviceSampler
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch, rows_of
from tandem.engine.steps.sampling_metadata import History
from tandem.engine.steps.step_buffer import StepLimits, StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.protocol.cost_parameters import UNMEASURED
from tandem.protocol.kv_pages import KvPages
from tandem.protocol.messages import ModelFacts
from tandem.settings.engine import GPU_PAGE_TOKENS


class Stopwatch:
    """CPU time and elapsed time of each call in µs, by part; each part belongs to one thread."""

    def __init__(self) -> None:
        self.spent: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Time the context as one call of `part`."""
        clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
        yield
        self.spent[part].append(((time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - clock) / 1e3))

    @contextlib.contextmanager
    def on(self, owner: type, method: str, part: str) -> Iterator[None]:
        """Time the calls of `owner.method` within the context as calls of `part`.

        Calls of the part `plan` that return None instead of a plan are not recorded.
        """
        timed: Callable[..., Any] = getattr(owner, method)

        @wraps(timed)
        def call(*args: Any, **options: Any) -> Any:
            clock, cpu = time.perf_counter_ns(), time.thread_time_ns()
            result = timed(*args, **options)
            spent = (time.thread_time_ns() - cpu) / 1e3, (time.perf_counter_ns() - clock) / 1e3
            if part != "plan" or result is not None:
                self.spent[part].append(spent)
            return result

        with patch.object(owner, method, call):
            yield


STEP_TOKENS = 2048
MODEL = ModelFacts("none", 128_256, 131_072, (2,), "bfloat16")
_TOKENS_FROM = 1000
"""Lowest id of sampled tokens: above the small integers that Python caches, and not a stop token."""


@dataclass
class NoEngine:
    """An engine that packs every step as for a GPU, samples the same tokens each time, and takes `step_s` per step."""

    pool: PagePool
    watch: Stopwatch
    step_s: float
    requests: int
    """Maximum number of decoding requests."""
    asynchronous: bool = True
    facts: ModelFacts = MODEL
    adapters: AdapterSlots = field(default_factory=AdapterSlots)
    page_tokens: int = GPU_PAGE_TOKENS
    kv_pages = KvPages(GPU_PAGE_TOKENS)
    cost_guess = UNMEASURED
    draft_proposer = None
    roofline = Roofline(ModelSizes(0, 0, 0, 0), CPU)
    rows: list[int] = field(default_factory=list)
    """Number of rows of each step."""

    def __post_init__(self) -> None:
        self.memory = np.zeros((self.pool.counts().total, self.page_tokens, 2), dtype="<i4")
        self.layout = KVLayout(self.memory.ctypes.data, len(self.memory), 1, 1, self.page_tokens, (1, 1), 4, "int32")
        self.page_sums = page_checksums(torch.from_numpy(self.memory).view(-1, 1, 1, 1, self.page_tokens, 2))
        self._packer = StepPacker(StepLimits(MODEL.vocab_size, MODEL.max_context, len(self.memory), GPU_PAGE_TOKENS))
        self._words = np.zeros(1 << 20, dtype=np.int64)
        self._params = np.zeros((STEP_TOKENS, PARAMS))
        self._drawn = torch.randint(_TOKENS_FROM, MODEL.vocab_size, (STEP_TOKENS,))

    def page_copies(self) -> PageCopies:
        """Return copies of the pages; see `LoadedEngine`."""
        return PageCopies(torch.from_numpy(self.memory).view(len(self.memory), -1), self.page_sums, self.page_tokens)

    def begin_answer(self, history: History, grammar: str) -> None:
        """Do nothing, because no request has a grammar; see `LoadedEngine`."""

    def allowed_drafts(self, history: History, grammar: str, drafts: Sequence[int]) -> int:
        """Return 0, because no request has a grammar; see `LoadedEngine`."""
        del history, grammar, drafts
        return 0

    def compatibility_facts(self) -> tuple[tuple[str, str], ...]:
        """Return nothing, because this engine is compatible with all others."""
        return ()

    def launch(self, batch: StepBatch) -> PendingStep:
        """Pack a step, which ends at its due time."""
        with self.watch.timing("pack"):
            sizes = self._packed_sizes(batch, self._packer.sizes(batch))
            self._packer.pack(batch, sizes, self._words[: sizes.words])
            draws = batch.draws
            if not draws.greedy:
                DeviceSampler.plan(draws, None, self._params[: len(draws)])
        self.rows.append(len(batch))
        due = time.monotonic() + self.step_s
        drawn = self._drawn[: len(draws)]

        def result() -> ModelRunnerOutput:
            time.sleep(max(0.0, due - time.monotonic()))
            with self.watch.timing("drawn"):
                return rows_of(drawn.tolist(), batch)

        return PendingStep(result)

    def _packed_sizes(self, batch: StepBatch, sizes: StepSizes) -> StepSizes:
        """Return the sizes to pack for. Decode-only steps are padded to a CUDA graph's rows and longest context."""
        if batch.chunks:
            return sizes
        rows = next(size for size in graph_sizes(self.requests) if size >= sizes.rows)
        return StepSizes(rows, rows, self._packer.limits.pages_of(MODEL.max_context), rows)
