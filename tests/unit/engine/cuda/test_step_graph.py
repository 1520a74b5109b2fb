"""An empty step, as graphs are captured over one: it reads and writes nothing."""

import pytest
import torch

from tandem.engine.cuda.step_graph import empty_step
from tandem.engine.steps.step_buffer import StepLimits, StepSizes
from tandem.engine.steps.step_packer import StepPacker

LIMITS = StepLimits(vocab_size=50, max_context=64, pages=9, page_tokens=4)


@pytest.mark.parametrize(
    ("sizes", "singles", "starts"),
    [
        (StepSizes(tokens=3, rows=3, width=16, drawn=3), 3, [0, 1, 2, 3]),
        (StepSizes(tokens=8, rows=2, width=16, drawn=2), 0, [0, 0, 0]),
        (StepSizes(tokens=9, rows=3, width=16, drawn=3), 1, [0, 1, 1, 1]),
    ],
)
def test_rows_of_one_token_come_first(sizes: StepSizes, singles: int, starts: list[int]) -> None:
    words, step = empty_step(
        StepPacker(LIMITS), sizes, torch.device("cpu"), singles=singles, max_row_tokens=8, context=64
    )
    layout = step.layout
    assert layout.row_starts.tolist() == starts
    assert layout.single_rows == singles
    assert layout.slots.tolist() == [-1] * sizes.tokens
    assert layout.context_lens.tolist() == [0] * sizes.rows
    assert step.sources.tolist() == [-1] * sizes.tokens
    words.fill_(3)
    assert step.token_ids.tolist() == [3] * sizes.tokens, "its tensors lie in the words"
