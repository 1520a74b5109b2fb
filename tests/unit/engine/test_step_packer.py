"""Steps in one buffer: rows with padding behind them, tokens that only the device knows, and what is refused."""

import pytest
import torch

from engine.batch import Draw, StepBatch, StepRow
from engine.step_packer import StepLimits, StepPacker, unpack, view_step
from engine.step_sections import StepSizes
from wire.errors import Internal
from wire.messages import SamplingParams

LIMITS = StepLimits(vocab_size=50, max_context=64, pages=9, page_tokens=4)
DRAW = Draw(SamplingParams(max_tokens=1), 0)


def row(
    token_ids: list[int], start: int, pages: list[int], source: int | None = None, draw: Draw | None = DRAW
) -> StepRow:
    return StepRow(token_ids, start, pages, draw, source)


def test_padded_rows_read_and_write_nothing() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([7], 5, [3, 8]), row([9], 0, [1])])
    sizes = StepSizes(tokens=4, rows=4, width=16, drawn=4)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    step = view_step(words, sizes, max_row_tokens=1, max_context=64, single_rows=4)
    assert step.token_ids.tolist()[:2] == [7, 9]
    assert step.layout.slots.tolist() == [8 * 4 + 1, 4, -1, -1]
    assert step.layout.context_lens.tolist() == [6, 1, 0, 0]
    assert step.layout.positions.tolist() == [5, 0, 0, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [1, 0], [0, 0], [0, 0]]
    assert step.sources.tolist() == [-1, -1, -1, -1]
    assert step.layout.row_starts.tolist() == [0, 1, 2, 3, 4]
    assert step.drawn is None


def test_prompts_in_a_larger_step_leave_empty_rows_behind_their_tokens() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([7, 8, 9], 5, [3, 8]), row([4, 5], 0, [1], draw=None)])
    sizes = StepSizes(tokens=8, rows=4, width=16, drawn=4)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy())
    step = view_step(words, sizes, max_row_tokens=8, max_context=64, single_rows=0)
    assert step.token_ids.tolist() == [7, 8, 9, 4, 5, 0, 0, 0]
    assert step.layout.slots.tolist() == [33, 34, 35, 4, 5, -1, -1, -1]
    assert step.layout.positions.tolist() == [5, 6, 7, 0, 1, 0, 0, 0]
    assert step.layout.row_starts.tolist() == [0, 3, 5, 5, 5]
    assert step.layout.context_lens.tolist() == [8, 2, 0, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [1, 0], [0, 0], [0, 0]]
    assert step.sources.tolist() == [-1] * 8
    assert step.drawn is not None
    assert step.drawn.tolist() == [2, 0, 0, 0]


def test_answers_and_prompts_in_a_larger_step() -> None:
    """Two rows of nothing stand between them, and one empty row and tokens behind the last."""
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([0], 5, [3, 8], source=1), row([4, 5], 0, [1], draw=None), row([7, 8, 9], 5, [6, 2])])
    sizes = StepSizes(tokens=3 + 8, rows=3 + 3, width=16, drawn=6)
    words = torch.full((sizes.words,), -77, dtype=torch.int64)
    packer.pack(batch, sizes, words.numpy(), drawn_before=[0, 4], chunks_at=3)
    step = view_step(words, sizes, max_row_tokens=8, max_context=64, single_rows=3)
    assert step.token_ids.tolist() == [0, 0, 0, 4, 5, 7, 8, 9, 0, 0, 0]
    assert step.sources.tolist() == [4] + [-1] * 10
    assert step.layout.slots.tolist() == [33, -1, -1, 4, 5, 9, 10, 11, -1, -1, -1]
    assert step.layout.positions.tolist() == [5, 0, 0, 0, 1, 5, 6, 7, 0, 0, 0]
    assert step.layout.row_starts.tolist() == [0, 1, 2, 3, 5, 8, 8]
    assert step.layout.context_lens.tolist() == [6, 0, 0, 2, 8, 0]
    assert step.layout.page_table[:, :2].tolist() == [[3, 8], [0, 0], [0, 0], [1, 0], [6, 2], [0, 0]]
    assert step.drawn is not None
    assert step.drawn.tolist() == [0, 7, 0, 0, 0, 0], "logits in the order of the draws"


def test_sources_are_draws_of_the_step_before() -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([row([0], 5, [3, 8], source=2), row([4, 5, 6], 0, [1]), row([0], 1, [2], source=0)])
    sizes = packer.sizes(batch)
    words = torch.empty(sizes.words, dtype=torch.int64)
    # Of the step before, row 1 drew nothing.
    packer.pack(batch, sizes, words.numpy(), drawn_before=[0, -1, 1])
    step = unpack(words, sizes, batch)
    assert step.sources.tolist() == [1, -1, -1, -1, 0]
    assert step.layout.single_rows == 1
    assert step.drawn is not None
    assert step.drawn.tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (row([50], 0, [1]), "token id"),
        (row([1], 0, [9]), "page id"),
        (row([1], 4, [1]), "pages"),
        (row([1], 64, list(range(9)) * 2), "context"),
        (row([], 0, [1]), "at least one token"),
        (row([1, 2], 0, [1], source=0), "exactly that token"),
    ],
)
def test_what_breaks_the_limits_is_refused(bad: StepRow, says: str) -> None:
    packer = StepPacker(LIMITS)
    batch = StepBatch([bad])
    with pytest.raises(Internal, match=says):
        packer.pack(batch, sizes := packer.sizes(batch), torch.empty(sizes.words, dtype=torch.int64).numpy())
