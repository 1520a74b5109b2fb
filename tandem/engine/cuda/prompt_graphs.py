"""CUDA graphs of those prefill and mixed steps that kernel launches by the host would slow down.

These are short steps, and longer steps of models with narrow layers. Without a graph, the device would wait for the
host's kernel launches in such a step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.cost_model.step_grid import TILE_TOKENS, answer_slots, step_sizes
from tandem.engine.config.model import ModelSpec
from tandem.engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import DeferredTokens
from tandem.engine.model_sizes import active_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.engine.weights.checkpoint import Progress

_HALF_TILES = range(TILE_TOKENS // 2, 4 * TILE_TOKENS, TILE_TOKENS)
"""Token counts of prefill steps that get a graph although they are not a whole number of tiles.

Steps this short do not fill the GPU.
"""
_LEAST_PROMPT = 32
"""Minimum number of prompt tokens for which a mixed step has a graph."""
_ROWS = 8
"""Maximum number of prompts in a step with a graph."""
_TABLE_PAGES = 300_000
"""Maximum number of entries in a step's page table: 1.2 MB, which are copied in 25 us.

With pages of 128 tokens, each row may have a context of 145,000 tokens in a step with 256 decode rows, and of
1.6 million tokens in a step with 16 decode rows.
"""
_LONGEST_LAYER_S = 1.5e-3
"""Maximum device time of one layer, in seconds, for which a graph is captured.

The host takes 0.45 ms to launch a layer, and twice that next to a busy event loop. The gaps between the layer's kernels
cost 45 us, 3 % of the longest layer.
"""
_LONGEST_UNDIVIDED_LAYER_S = _LONGEST_LAYER_S / 2
"""The value of `_LONGEST_LAYER_S` on ranks that divide the tokens of steps without a graph (`ContextModel`).

With a graph every rank computes the whole step. Without one, a layer takes at least as long as the host's launches,
0.45 to 0.9 ms, however many ranks there are.
"""
_DEVICE_FLOPS = 600e12
"""The assumed rate of a GPU at large matrix products, in FLOP/s."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The maximum number of decode rows and of prompt tokens of a step."""

    answers: int
    tokens: int

    @property
    def _total(self) -> int:
        """The total number of tokens of the step, on which its memory depends."""
        return self.answers + self.tokens


class PromptGraphs:
    """The graphs of prefill and mixed steps, by the number of decode rows and of prompt tokens.

    Unused decode rows are padding, as in decode graphs. Unused prompts are empty rows after the step's last token,
    which store nothing and whose results are not read.
    """

    def __init__(
        self, packer: StepPacker, forward: Forward, drawn: Tensor, pool: Pool, most_pages: int | None = None
    ) -> None:
        """Create an empty set of graphs, which will allocate from the memory `pool`; one graph runs at a time.

        `drawn` is that of `DecodeGraphs`, `most_pages` is `Kernels.capturable_pages`.
        """
        self._most_pages = most_pages
        self._packer = packer
        self._forward = forward
        self._drawn = drawn
        self._pool = pool
        self._graphs: dict[PromptSize, StepGraph] = {}

    def capture(self, sizes: Sequence[PromptSize], progress: Progress | None = None) -> None:
        """Capture steps of these sizes, the largest first, so that the other graphs reuse its memory."""
        ordered = sorted(sizes, key=lambda size: (size.answers, size.tokens))
        for done, size in enumerate(sorted(ordered, key=lambda size: -size._total)):
            self._graphs[size] = self._capture(size)
            if progress is not None:
                progress("capturing CUDA graphs of prompts", (done + 1) / len(sizes))
        self._graphs = {size: self._graphs[size] for size in ordered}

    @property
    def graphs(self) -> list[StepGraph]:
        """The captured graphs, the smallest first."""
        return list(self._graphs.values())

    def fitting(self, batch: StepBatch, sizes: StepSizes) -> StepGraph | None:
        """Return the smallest graph that has enough decode rows and prompt tokens for `batch`.

        The smallest graph is the one with the fewest decode rows and, among these, with the fewest tokens. `sizes` are
        those of the batch. Returns None if the batch has no prompt, or if it or its context is too large.
        """
        answers = len(batch.tokens)
        if not batch.chunks or sizes.rows - answers > _ROWS:
            return None
        tokens = sizes.tokens - answers
        size = next((size for size in self._graphs if size.answers >= answers and size.tokens >= tokens), None)
        if size is None:
            return None
        if self._most_pages is not None and self._pages_of(batch) > self._most_pages:
            return None
        graph = self._graphs[size]
        # Graphs with more decode rows have no wider page tables, so none of them would fit either.
        return graph if graph.sizes.width >= sizes.width else None

    def _pages_of(self, batch: StepBatch) -> int:
        """Return the total number of pages per group that the prompts of the batch need."""
        return sum(self._packer.limits.pages_of(row.start + len(row.token_ids)) for row in batch.chunks)

    def step_sizes(self, size: PromptSize) -> StepSizes:
        """Return the sizes of the step from which the graph of `size` is captured."""
        limits, rows = self._packer.limits, size.answers + _ROWS
        width = min(limits.pages_of(limits.max_context), _TABLE_PAGES // (rows * (limits.groups - limits.state_groups)))
        return limits.sizes(size.answers + size.tokens, rows, width, rows)

    def _capture(self, size: PromptSize) -> StepGraph:
        words, compute, sizes = self._step(size)
        return capture_step(compute, words, sizes, pool=self._pool, chunks_at=size.answers)

    def _step(self, size: PromptSize) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """Return a padded prefill or mixed step, as `DecodeGraphs._step` does for decode steps."""
        sizes, limits = self.step_sizes(size), self._packer.limits
        words, step = empty_step(
            self._packer,
            sizes,
            self._drawn.device,
            singles=size.answers,
            max_row_tokens=size.tokens,
            context=min(limits.max_context, sizes.width * limits.page_tokens),
        )

        def compute() -> Tensor:
            logits = self._forward(step, DeferredTokens(step.sources, self._drawn))
            assert logits is not None
            return logits

        return words, compute, sizes


def prompt_graph_sizes(
    spec: ModelSpec, max_step_tokens: int, max_answers: int, *, divides_tokens: bool = False
) -> list[PromptSize]:
    """Return the step sizes that get a graph, with up to `max_answers` decode rows.

    The narrower the model's layers, the more tokens these steps may have. `divides_tokens` is `Rank.divides_tokens`.
    """
    a_layer = (active_weights(spec) - spec.vocab_size * spec.hidden_size) / len(spec.layers)
    longest_s = _LONGEST_UNDIVIDED_LAYER_S if divides_tokens else _LONGEST_LAYER_S
    most = min(longest_s * _DEVICE_FLOPS / (2 * a_layer), max_step_tokens)
    totals = step_sizes(max_step_tokens)
    alone = [PromptSize(0, tokens) for tokens in sorted((*_HALF_TILES, *totals)) if tokens <= most]
    beside = [PromptSize(slots, total - slots) for slots in answer_slots(max_answers) for total in totals]
    return alone + [size for size in beside if _LEAST_PROMPT <= size.tokens <= most]


def largest(sizes: Sequence[PromptSize]) -> list[PromptSize]:
    """Return the size whose graph has enough memory for all other sizes, as a list; empty if `sizes` is empty."""
    return [max(sizes, key=lambda size: (size._total, size.answers))] if sizes else []
