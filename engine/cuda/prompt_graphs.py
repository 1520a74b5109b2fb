"""CUDA graphs of steps of prompts, with or without answers that decode beside them, whose kernels the host would launch
more slowly than the device computes them, or with gaps that count: short steps, and longer ones of narrow layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from costs.step_grid import TILE_TOKENS, answer_slots, step_sizes
from engine.config.model import ModelConfig
from engine.cuda.step_graph import Pool, StepGraph, capture_step, empty_step
from engine.host_stepper import Forward
from engine.kernels.base import Feed
from engine.model_sizes import layer_weights
from engine.steps.batch import StepBatch
from engine.steps.step_buffer import StepSizes
from engine.steps.step_packer import StepPacker
from engine.weights.checkpoint import Progress

_HALF_TILES = range(TILE_TOKENS // 2, 4 * TILE_TOKENS, TILE_TOKENS)
"""Prompt tokens of steps without answers that are captured beside whole tiles: the device is not busy with them yet."""
_LEAST_PROMPT = 32
"""Fewest of them that prompts get."""
_ROWS = 8
"""Prompts of a step."""
_TABLE_PAGES = 300_000
"""Entries of a step's page table: 1.2 MB that are copied in 25 us. Pages of 128 tokens are 145,000 tokens for each row
beside 256 answers, and 1.6 million beside 16.
"""
_LONGEST_LAYER_S = 1.5e-3
"""Of the device's time for a layer. The host takes 0.45 ms to launch one, twice of that beside a busy event loop; and
gaps between its kernels cost 45 us, 3 % of such a layer."""
_DEVICE_FLOPS = 600e12
"""Of a GPU at large products."""


@dataclass(frozen=True, slots=True)
class PromptSize:
    """Most answers and most tokens of prompts of a step."""

    answers: int
    tokens: int

    @property
    def _total(self) -> int:
        """Tokens of the step in all: the memory it takes rises with them."""
        return self.answers + self.tokens


class PromptGraphs:
    """By numbers of answers and of prompt tokens. Answers that a step lacks are rows of nothing, as in decode graphs;
    prompts that it lacks are empty and lie behind its last token, where nobody reads what is computed and nothing is
    stored.
    """

    def __init__(self, packer: StepPacker, forward: Forward, drawn: Tensor, pool: Pool) -> None:
        """`drawn` as in `DecodeGraphs`; `pool`: of memory that all graphs share, as one runs at a time."""
        self._packer = packer
        self._forward = forward
        self._drawn = drawn
        self._pool = pool
        self._graphs: dict[PromptSize, StepGraph] = {}

    def capture(self, sizes: Sequence[PromptSize], progress: Progress | None = None) -> None:
        """Capture steps of these sizes, the largest first, so that the others fit into its memory."""
        ordered = sorted(sizes, key=lambda size: (size.answers, size.tokens))
        for done, size in enumerate(sorted(ordered, key=lambda size: -size._total)):
            self._graphs[size] = self._capture(size)
            if progress is not None:
                progress("capturing CUDA graphs of prompts", (done + 1) / len(sizes))
        self._graphs = {size: self._graphs[size] for size in ordered}

    def fitting(self, batch: StepBatch, sizes: StepSizes) -> StepGraph | None:
        """The graph of the fewest answers, then of the fewest tokens, that computes `batch`, which needs `sizes`; None:
        it is too large, or has no prompt.
        """
        answers = len(batch.tokens)
        if not batch.chunks or sizes.rows - answers > _ROWS:
            return None
        tokens = sizes.tokens - answers
        size = next((size for size in self._graphs if size.answers >= answers and size.tokens >= tokens), None)
        if size is None:
            return None
        graph = self._graphs[size]
        # Graphs of more answers have no longer rows.
        return graph if graph.sizes.width >= sizes.width else None

    def step_sizes(self, size: PromptSize) -> StepSizes:
        """Of the step that the graph of `size` is captured from."""
        limits, rows = self._packer.limits, size.answers + _ROWS
        width = min(limits.pages_of(limits.max_context), _TABLE_PAGES // rows)
        return StepSizes(size.answers + size.tokens, rows, width, rows)

    def _capture(self, size: PromptSize) -> StepGraph:
        words, compute, sizes = self._step(size)
        return capture_step(compute, words, sizes, pool=self._pool, chunks_at=size.answers)

    def _step(self, size: PromptSize) -> tuple[Tensor, Callable[[], Tensor], StepSizes]:
        """As `DecodeGraphs._step`."""
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


def prompt_graph_sizes(config: ModelConfig, max_step_tokens: int, max_answers: int) -> list[PromptSize]:
    """Steps that are worth a graph, of more tokens the narrower the layers are; beside answers up to `max_answers`."""
    most = min(_LONGEST_LAYER_S * _DEVICE_FLOPS / (2 * layer_weights(config)), max_step_tokens)
    totals = step_sizes(max_step_tokens)
    alone = [PromptSize(0, tokens) for tokens in sorted((*_HALF_TILES, *totals)) if tokens <= most]
    beside = [PromptSize(slots, total - slots) for slots in answer_slots(max_answers) for total in totals]
    return alone + [size for size in beside if _LEAST_PROMPT <= size.tokens <= most]


def largest(sizes: Sequence[PromptSize]) -> list[PromptSize]:
    """The size in whose memory the others have room, if there is any."""
    return [max(sizes, key=lambda size: (size._total, size.answers))] if sizes else []
