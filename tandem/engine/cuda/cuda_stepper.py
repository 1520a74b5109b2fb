"""Runs steps on a GPU without waiting: the tokens of a step are read while the next step runs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from tandem.engine.cuda.cuda_graphs import DecodeGraphs
from tandem.engine.cuda.prompt_graphs import PromptGraphs
from tandem.engine.cuda.step_graph import StepGraph
from tandem.engine.cuda.token_draws import DrawMemory, TokenDraws
from tandem.engine.cuda.verify_graphs import VerifyGraphs
from tandem.engine.graph_use import GraphUse
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.parallel.step_stream import AcceptedDrafts, GraphStep, RankStep
from tandem.engine.steps.batch import ModelRunnerOutput, PendingStep, StepBatch, rows_of
from tandem.engine.steps.draft_groups import accepted_in, fill_draft_groups
from tandem.engine.steps.prompt_scoring import StepPieces
from tandem.engine.steps.scored_step import with_scoring
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import PackedStep, StepPacker, unpack

_WORDS_AT_FIRST = 1 << 16


@dataclass(slots=True)
class _HostMemory:
    """Pinned host memory of one step in flight."""

    words: Tensor
    draws: DrawMemory
    done: torch.cuda.Event = field(default_factory=torch.cuda.Event)

    def reserve(self, words: int) -> Tensor:
        # Twice the size that is needed, so that slowly growing steps rarely allocate pinned memory again.
        if words > len(self.words):
            self.words = _pinned(2 * words)
        return self.words[:words]


class CudaStepper:
    """Runs steps on a GPU.

    At most two steps may be in flight, and their results must be read in the order of the launches.
    """

    asynchronous = True

    def __init__(
        self,
        packer: StepPacker,
        forward: Forward,
        draws: TokenDraws,
        drawn: Tensor,
        *,
        graphs: DecodeGraphs,
        prompts: PromptGraphs,
        verify: VerifyGraphs,
    ) -> None:
        """Create a stepper that uses these graphs where they fit.

        `draws` writes the sampled tokens of each step to `drawn` [rows] int64, from which the next step reads them.
        """
        self._packer = packer
        self._forward = forward
        self.draws = draws
        self._drawn = drawn
        self.graphs = graphs
        self.prompts = prompts
        self.verify = verify
        self.graph_use = GraphUse()
        self._memory = [_HostMemory(_pinned(_WORDS_AT_FIRST), draws.make_memory()) for _ in range(2)]
        self._draw_of_row: list[int] = []
        """The result of `_draws_of_rows` for the newest step."""

    def launch(self, batch: StepBatch) -> PendingStep:
        """Launch a step, as `ModelRunner.launch` describes.

        If a row has a grammar and the previous step's tokens are in flight, the sampling is launched by `draw`: its
        histories then have these tokens.
        """
        # Triton and CUDA graphs use the current device of the calling thread, and steps run on a separate thread.
        torch.cuda.set_device(self._drawn.device)
        # Before any state changes, because this call rejects some malformed batches.
        sizes = self._packer.sizes(batch)
        draws = batch.draws
        memory = self._memory[0]
        self._memory.reverse()
        # This memory was last used two steps ago; the device must have read it before it is written again.
        memory.done.synchronize()
        late: Sequence[Tensor | None] = ()
        waits = False
        if draws.looks_back:
            sources = self._sources(batch)
            waits = draws.constrained and any(source is not None for source in sources)
            # Copied now, because this step will overwrite the tokens of the previous one on the device.
            late = [None] * len(draws) if waits else self.draws.late_tokens(draws, sources)
        # From here on everything is only launched; the result is read by the returned step.
        logits, greedy_is_drawn, scoring, computed = self._compute(batch, sizes, memory)
        read = None

        def draw() -> None:
            nonlocal read
            with torch.inference_mode():
                if logits is not None:
                    read = self.draws.launch(logits, draws, late, memory.draws, greedy_is_drawn=greedy_is_drawn)
                memory.done.record()

        def result() -> ModelRunnerOutput:
            memory.done.synchronize()
            tokens, scores = ([], []) if read is None else read()
            if scoring is not None:
                scoring.deliver()
            if sizes.chains:
                self._accept_drafts(computed, torch.tensor(accepted_in(batch.tokens, tokens)))
            return rows_of(tokens, batch, scores)

        self._draw_of_row = _draws_of_rows(batch)
        step = PendingStep(result, draw)
        if not waits:
            step.draw()
        return step

    def logits(self, batch: StepBatch, *, every_token: bool = False) -> Tensor | None:
        """Return the logits on the device: [sampled rows, vocab], or [tokens, vocab] with `every_token`.

        A step with `every_token` runs without a CUDA graph. Waits for all earlier steps. The token ids of all rows must
        be known to the host (no row may have a `source`). Threads that compile kernels call this method at the same
        time, so each call has host memory of its own: indices that another call overwrites could be out of bounds.
        """
        torch.cuda.set_device(self._drawn.device)
        torch.cuda.synchronize()
        self._draw_of_row = []
        sizes = self._packer.sizes(batch)
        memory = _HostMemory(_pinned(sizes.words), self._memory[0].draws)
        if every_token:
            step = self._pack(batch, sizes, memory)
            logits = self._run(replace(step, drawn=None))
        else:
            logits, *_ = self._compute(batch, sizes, memory)
        torch.cuda.synchronize()
        return logits

    @property
    def step_graphs(self) -> list[StepGraph]:
        """The graphs of all kinds of steps, in the order in which they were captured."""
        return [*self.prompts.graphs, *self.graphs.graphs, *self.verify.graphs]

    def _sources(self, batch: StepBatch) -> list[int | None]:
        """Return, for each sampling row, the index in `drawn` from which the row's input token is read.

        The index counts the sampling rows of the previous step. None for a row whose token ids the host knows.
        """
        rows = [row.source for row in batch.rows if row.draw is not None]
        return [None if row is None else self._draw_of_row[row] if self._draw_of_row else row for row in rows]

    def _compute(
        self, batch: StepBatch, sizes: StepSizes, memory: _HostMemory
    ) -> tuple[Tensor | None, bool, StepPieces | None, StepGraph | PackedStep]:
        """Launch the computation of a step's logits; return (logits, greedy_is_drawn, scoring, computed).

        The logits are [at least sampled rows, vocab], or None if no row samples a token. `greedy_is_drawn` is True if
        the step's graph also samples the most likely tokens. `scoring` is None if the step scores no prompt. Graphs
        compute only the logits of sampling rows, so a step that scores a prompt runs without a graph. `computed` is the
        graph, or the step without one. Only graphs of `verify` verify draft tokens in a model with state layers.
        """
        decode, prompts = self.verify.fitting(batch), None
        if not sizes.chains:
            decode, prompts = decode or self.graphs.fitting(batch), self.prompts.fitting(batch, sizes)
        graph = None if batch.scored else decode or prompts
        # The counters are incremented after `pack`, which may reject the step.
        if graph is not None:
            words = memory.reserve(graph.input_words)
            self._packer.pack(batch, graph.sizes, words.numpy(), self._draw_of_row, graph.chunks_at)
            if graph.groups is not None:
                fill_draft_groups(batch.tokens, graph.groups, words.numpy()[graph.sizes.words :])
            self.graph_use.hits += 1
            self.graph_use.padded_tokens += graph.sizes.tokens - sizes.tokens
            logits = self._replay(graph, words)
            return logits if sizes.drawn else None, decode is not None, None, graph
        step = self._pack(batch, sizes, memory)
        if batch.scored:
            step = with_scoring(step, batch, self.draws.score_tokens)
        self.graph_use.misses += 1
        return self._run(step), False, step.scoring, step

    def _accept_drafts(self, computed: StepGraph | PackedStep, counts: Tensor) -> None:
        """Launch the writing of the states after accepted draft tokens; `counts` has their number for each request."""
        torch.cuda.set_device(self._drawn.device)
        with torch.inference_mode():
            if isinstance(computed, StepGraph):
                computed.accept_drafts(counts)
            else:
                self._forward.accept_drafts(computed, counts.to(self._drawn.device, torch.int32))

    def _replay(self, graph: StepGraph, words: Tensor) -> Tensor:
        """Launch a step that a graph computes; return its logits."""
        return graph.replay(words)

    def _run(self, step: PackedStep) -> Tensor | None:
        """Launch a step without a graph; return its logits."""
        return self._forward(step, DeferredTokens(step.sources, self._drawn))

    def _pack(self, batch: StepBatch, sizes: StepSizes, memory: _HostMemory) -> PackedStep:
        """Return the tensors of the step on the device."""
        words = memory.reserve(sizes.words)
        self._packer.pack(batch, sizes, words.numpy(), self._draw_of_row)
        return unpack(words, sizes, batch, self._drawn.device)


class LeadingStepper(CudaStepper):
    """The stepper of a group's first rank: it calls `on_step` with each step before it launches the step."""

    def __init__(self, *parts: Any, on_step: Callable[[RankStep], None], **graphs: Any) -> None:
        """Create a stepper; the arguments other than `on_step` are those of `CudaStepper`."""
        super().__init__(*parts, **graphs)
        self._on_step = on_step
        self._numbers = {id(graph): number for number, graph in enumerate(self.step_graphs)}

    def _replay(self, graph: StepGraph, words: Tensor) -> Tensor:
        self._on_step(GraphStep(self._numbers[id(graph)], words))
        return super()._replay(graph, words)

    def _run(self, step: PackedStep) -> Tensor | None:
        self._on_step(step)
        return super()._run(step)

    def _accept_drafts(self, computed: StepGraph | PackedStep, counts: Tensor) -> None:
        self._on_step(AcceptedDrafts(counts))
        super()._accept_drafts(computed, counts)


def _draws_of_rows(batch: StepBatch) -> list[int]:
    """Return the index of each row among the rows that sample a token, -1 for rows that sample none.

    The list is empty if every row samples a token.
    """
    if all(row.draw is not None for row in batch.chunks):
        return []
    numbers = itertools.count(len(batch.tokens))
    return [*range(len(batch.tokens)), *(-1 if row.draw is None else next(numbers) for row in batch.chunks)]


def _pinned(words: int) -> Tensor:
    return torch.empty(words, dtype=torch.int64, pin_memory=True)
