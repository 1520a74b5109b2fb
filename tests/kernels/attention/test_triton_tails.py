"""The values after a row's context are zeroed where attention multiplies them, and nothing else changes."""

import pytest
import torch

from tandem.engine.kernels.attention.triton_tails import clear_value_tails
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.prefill_cases import to_device
from tests.kernels.steps import heads, make_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = [(1, 40), (1, 7), (32, 32), (20, 45), (1, 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first_row", [0, 2])
@pytest.mark.parametrize("page_tokens", [16, 24])
def test_values_after_a_context_are_zero_and_others_stay(page_tokens: int, first_row: int, dtype: torch.dtype) -> None:
    step = make_step(ROWS, heads(4, 2, 64), page_tokens)
    before = step.cache_as(dtype)
    expected = before.clone()
    for row, (_, context) in list(enumerate(ROWS))[first_row:]:
        if context % page_tokens:
            page = int(step.layout.page_table[row, context // page_tokens])
            expected[page, :, 1, :, context % page_tokens :] = 0
    cache = before.to(DEVICE)
    clear_value_tails(cache, to_device(step.layout, DEVICE), first_row, pdl=overlaps_launches())
    assert torch.equal(cache.cpu().nan_to_num(nan=7), expected.nan_to_num(nan=7))
    assert int((expected == 0).sum()) > 0
