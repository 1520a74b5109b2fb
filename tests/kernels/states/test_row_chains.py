"""Steps that verify draft tokens: states and outputs of one-token rows that are computed one after the other."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.speculation.draft_rows import with_drafts
from tandem.engine.config.state_layers import StateLayer
from tandem.engine.kernels.base import RowChains, StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import RecurrentLayer
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta
from tandem.engine.kernels.states.reference import mix_states
from tandem.engine.kernels.states.row_chains import accepting, verifying
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.steps.draft_groups import DRAFTS_MAX, fill_chains
from tests.factories import row
from tests.kernels.steps import assert_as_good

from .state_steps import DEVICE, LAST, SPECS, make_cache, make_inputs, make_layer, make_layout

Mix = Callable[[Tensor, RecurrentLayer, StateCache, StepLayout], Tensor]
REQUESTS = [(1, 1), (-1, 0), (2, 3), (4, 4)]
"""The pages that the newest token of each request reads and writes."""
DRAFTS = [2, 0, DRAFTS_MAX, 1]
ACCEPTED = [1, 0, DRAFTS_MAX, 0]
PADDING = 3
CHAINS = len(REQUESTS) + 2
"""The size of the graph has room for two more requests."""


def triton() -> Mix:
    without_library: Future[ChunkedDelta | None] = Future()
    without_library.set_result(None)
    return StateKernels(overlaps_launches(), without_library).mix


def step() -> StepLayout:
    """Returns the layout of one-token rows: the newest tokens, the draft tokens by request, and padding."""
    drafted = [REQUESTS[request] for request, count in enumerate(DRAFTS) for _ in range(count)]
    rows = [*REQUESTS, *drafted, *[(-1, -1)] * PADDING]
    layout = make_layout([(1, *pages) for pages in rows])
    layout.slots[len(rows) - PADDING :] = -1
    newest = [row([5], 9, [request]) for request in range(len(REQUESTS))]
    into = np.zeros(CHAINS + 1 + 2 * len(rows), dtype=np.int32)
    fill_chains(with_drafts(newest, [[0] * count for count in DRAFTS]), CHAINS, into)
    starts, order, places = torch.from_numpy(into).to(DEVICE).split_with_sizes([CHAINS + 1, len(rows), len(rows)])
    return replace(layout, chains=RowChains(starts, order, places, DRAFTS_MAX + 1))


def rows_of(request: int) -> list[int]:
    """Returns the rows of a request in the order of their positions."""
    first = len(REQUESTS) + sum(DRAFTS[:request])
    return [request, *range(first, first + DRAFTS[request])]


def one_by_one(spec: StateLayer, dtype: torch.dtype) -> tuple[Tensor, StateCache]:
    """Returns the outputs of all rows, and the states after the accepted draft tokens, by steps of one token."""
    layer, layout = make_layer(spec, dtype), step()
    projected = make_inputs(spec, [(1, -1, -1)] * len(layout.positions), dtype)
    out, kept = projected.new_zeros(len(projected), spec.inner), make_cache(spec, dtype)
    for request, (read, write) in enumerate(REQUESTS):
        cache = make_cache(spec, dtype)
        for distance, number in enumerate(rows_of(request)):
            layout = make_layout([(1, read if distance == 0 else write, write)])
            out[number] = mix_states(projected[number : number + 1], layer, cache, layout)[0]
            if distance == ACCEPTED[request]:
                kept.inputs[write] = cache.inputs[write]
                if kept.states is not None and cache.states is not None:
                    kept.states[write] = cache.states[write]
    return out, kept


def chained(spec: StateLayer, dtype: torch.dtype, mix: Mix, accepted: Sequence[int]) -> tuple[Tensor, StateCache]:
    """Returns the outputs of all rows, and the states after the accepted draft tokens, as `StateBlock` computes them.

    Requests with draft tokens and without an entry in `accepted` are not accepted yet.
    """
    layer, cache, layout = make_layer(spec, dtype), make_cache(spec, dtype), step()
    assert layout.chains is not None
    projected = make_inputs(spec, [(1, -1, -1)] * len(layout.positions), dtype)[layout.chains.order]
    out = mix(projected, layer, cache, verifying(layout, cache))[layout.chains.places]
    if accepted:
        counts = torch.tensor([*accepted, 0, 0], dtype=torch.int32, device=DEVICE)
        mix(projected, layer, cache, accepting(layout, counts))
    return out, cache


@pytest.mark.parametrize("mix", [mix_states, triton()], ids=["reference", "triton"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_a_chain_of_rows_has_the_results_of_steps_of_one_token(spec: StateLayer, mix: Mix, dtype: torch.dtype) -> None:
    exact, expected = one_by_one(spec, torch.float64)
    baseline, held = one_by_one(spec, dtype)
    ours, actual = chained(spec, dtype, mix, ACCEPTED)
    rows = len(ours) - PADDING
    assert_as_good(ours[:rows], baseline[:rows], exact[:rows])
    assert_as_good(actual.inputs[:LAST], held.inputs[:LAST], expected.inputs[:LAST])
    if actual.states is not None and held.states is not None and expected.states is not None:
        assert_as_good(actual.states[:LAST], held.states[:LAST], expected.states[:LAST])


@pytest.mark.parametrize("mix", [mix_states, triton()], ids=["reference", "triton"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_no_page_of_a_request_changes_before_its_drafts_are_accepted(spec: StateLayer, mix: Mix) -> None:
    before, (_, after) = make_cache(spec, torch.float32), chained(spec, torch.float32, mix, ())
    drafted = [page for request, pages in enumerate(REQUESTS) if DRAFTS[request] for page in pages]
    assert torch.equal(after.inputs[drafted], before.inputs[drafted])
    if after.states is not None and before.states is not None:
        assert torch.equal(after.states[drafted], before.states[drafted])
