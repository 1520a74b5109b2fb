"""CUDA graphs of prefill and mixed steps that are bound by launches.

The host would launch their kernels more slowly than the device computes them, or with significant gaps: short steps,
and longer ones of narrow layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tandem.cost_model.step_grid import TILE_TOKENS, answer_slots, step_sizes
from tandem.engine.config.model import ModelSpec
from tandem.engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from tandem.engine.host_stepper import Forward
from tandem.engine.kernels.base import Feed
from tandem.engine.model_sizes import active_weights
from tandem.engine.steps.batch import StepBatch
from tandem.engine.steps.step_buffer import StepSizes
from tandem.engine.steps.step_packer import StepPacker
from tandem.engine.weights.checkpoint import Progress

_HALF_TILES = range(TILE_TOKENS // 2, 4 * TILE_TOKENS, TILE_TOKENS)
"""Prompt tokens of prefill-only steps that are captured besides whole tiles: they do not saturate the device yet."""
_LEAST_PROMPT = 32
"""The minimum number of prompt tokens of a mixed step's graph."""
_ROWS = 8
"""The maximum number of prompts of a step."""
_TABLE_PAGES = 300_000
"""Entries of a step's page table: 1.2 MB, which are copied in 25 us.

With pages of 128 tokens that is 145,000 tokens per row in a step with 256 decode rows, and 1.6 million with 16.
"""
_LONGEST_LAYER_S = 1.5e-3
"""The longest device time of a layer for which a graph is captured, in seconds.

The host takes 0.45 ms to launch a layer, twice that next to a busy event loop; and gaps between its kernels cost 45 us,
3 % of such a layer.
"""
_DEVICE_FLOPS = 600e12
"""A GPU's rate at large products."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """The maximum numbers of decode rows and of prompt tokens of a step."""

    answers: int
    tokens: int

    @property
    def _total(self) -> int:
        """The step's total number of tokens, with which its memory grows."""
        return self.answers + self.tokens


class PromptGraphs:
    """Graphs by numbers of decode rows and of prompt tokens.

    Missing decode rows are padding rows, as in decode graphs; missing prompts are empty and lie after the step's last
    token, where results are not read and nothing is stored.
    """

    def __init__(
        self, packer: StepPacker, forward: Forward, drawn: Tensor, pool: Pool, most_pages: int | None = None
    ) -> None:
        """Takes `drawn` as `DecodeGraphs` does, and the memory `pool` of all graphs, of which one runs at a time.

        most_pages: see `Kernels.capturable_pages`.
        """
        self._most_pages = most_pages
        self._packer = packer
        self._forward = forward
        self._drawn = drawn
        self._pool = pool
        self._graphs: dict[PromptSize, StepGraph] = {}

    def capture(self, sizes: Sequence[PromptSize], progress: Progress | None = None) -> None:
        """Captures steps of these sizes, the largest first, so that the others fit into its memory."""
        ordered = sorted(sizes, key=lambda size: (size.answers, size.tokens))
        for done, size in enumerate(sorted(ordered, key=lambda size: -size._total)):
            self._graphs[size] = self._capture(size)
            if progress is not None:
                progress("capturing CUDA graphs of prompts", (done + 1) / len(sizes))
        self._graphs = {size: self._graphs[size] for size in ordered}

    def fitting(self, batch: StepBatch, sizes: StepSizes) -> StepGraph | None:
        """Returns the graph of the fewest decode rows, then of the fewest tokens, that computes `batch` of `sizes`.

        None: the batch or the context of its prompts is too large, or it has no prompt.
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
        # Graphs of more decode rows have no longer rows.
        return graph if graph.sizes.width >= sizes.width else None

    def _pages_of(self, batch: StepBatch) -> int:
        """Returns the pages of the prompts of a batch, in each group."""
        return sum(self._packer.limits.pages_of(row.start + len(row.token_ids)) for row in batch.chunks)

    def step_sizes(self, size: PromptSize) -> StepSizes:
        """Returns the sizes of the step that the graph of `size` is captured from."""
        limits, rows = self._packer.limits, size.answers + _ROWS
        width = min(limits.pages_of(limits.max_context), _TABLE_PAGES // (rows * limits.groups))
        return StepSizes(size.answers + size.tokens, rows, width, rows, limits.groups)

    def _capture(self, size: PromptSize) -> StepGraph:
        words, compute, sizes = self._step(size)
        return capture_step(compute, words, sizes, pool=self._pool, chunks_at=size.answers)

    def _step(self, size: PromptSize) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """Returns a padded step, as `DecodeGraphs._step` does."""
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
            logits = self._forward(step, Feed(step.sources, self._drawn))
            assert logits is not None
            return logits

        return words, compute, sizes


def prompt_graph_sizes(spec: ModelSpec, max_step_tokens: int, max_answers: int) -> list[PromptSize]:
    """Returns the steps that get a graph, with up to `max_answers` decode rows.

    The narrower the layers are, the more tokens they have.
    """
    a_layer = (active_weights(spec) - spec.vocab_size * spec.hidden_size) / len(spec.layers)
    most = min(_LONGEST_LAYER_S * _DEVICE_FLOPS / (2 * a_layer), max_step_tokens)
    totals = step_sizes(max_step_tokens)
    alone = [PromptSize(0, tokens) for tokens in sorted((*_HALF_TILES, *totals)) if tokens <= most]
    beside = [PromptSize(slots, total - slots) for slots in answer_slots(max_answers) for total in totals]
    return alone + [size for size in beside if _LEAST_PROMPT <= size.tokens <= most]


def largest(sizes: Sequence[PromptSize]) -> list[PromptSize]:
    """Returns the size whose memory holds the others, if there is any."""
    return [max(sizes, key=lambda size: (size._total, size.answers))] if sizes else []
