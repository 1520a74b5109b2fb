"""State layers in Triton against the reference: in the interpreter, or on a GPU."""

from concurrent.futures import Future

import pytest
import torch
from torch import Tensor

from tandem.engine.config.state_layers import StateLayer
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.states import state_kernels
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta
from tandem.engine.kernels.states.reference import mix_states
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.steps import assert_as_good

from .state_steps import LAST, SPECS, Row, make_cache, make_inputs, make_layer, make_layout

DECODE: list[Row] = [(1, -1, 0), (1, 1, 1), (1, 2, 3), (1, -1, -1)]
"""A new request, one that stays in its page, one that begins a page, and a padding row."""
STEPS: dict[str, list[Row]] = {
    "decode": DECODE,
    "prompts": [(2, 2, 3), (18, -1, 0)],
    "mixed": [(1, 4, 4), (1, -1, 5), (33, 1, 1), (3, 2, 3)],
}


def computed(spec: StateLayer, rows: list[Row], dtype: torch.dtype, *, reference: bool) -> tuple[Tensor, StateCache]:
    """Returns the output and the cache after a step, of the reference or of the kernels."""
    layer, cache, layout = make_layer(spec, dtype), make_cache(spec, dtype), make_layout(rows)
    projected = make_inputs(spec, rows, dtype)
    if reference:
        return mix_states(projected, layer, cache, layout), cache
    without_library: Future[ChunkedDelta | None] = Future()
    without_library.set_result(None)
    return StateKernels(overlaps_launches(), without_library).mix(projected, layer, cache, layout), cache


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_output_and_states_are_as_good_as_those_of_pytorch(
    spec: StateLayer, rows: list[Row], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `test_state_chunks.py` has the rows that are computed in chunks.
    monkeypatch.setattr(state_kernels, "_RECURRENT_TOKENS", max(tokens for tokens, *_ in rows))
    exact, expected = computed(spec, rows, torch.float64, reference=True)
    baseline, held = computed(spec, rows, dtype, reference=True)
    ours, actual = computed(spec, rows, dtype, reference=False)
    padding = [number for number, (*_, write) in enumerate(rows) if write < 0]
    assert not ours[padding].any()
    others = [number for number in range(len(ours)) if number not in padding]
    check(ours[others], baseline[others], exact[others])
    # Pages of no row, and other layers, must not change.
    check(actual.inputs[:LAST], held.inputs[:LAST], expected.inputs[:LAST])
    if actual.states is not None and held.states is not None and expected.states is not None:
        assert_close(actual.states[:LAST], expected.states[:LAST])


def check(ours: Tensor, baseline: Tensor, exact: Tensor) -> None:
    """Checks the errors against those of PyTorch in the same dtype, but float32 against a GPU's exponentials."""
    if ours.dtype == torch.float32:
        assert_close(ours, exact)
    else:
        assert_as_good(ours, baseline, exact)


def assert_close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact.double(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_padding_rows_write_no_page(spec: StateLayer) -> None:
    rows: list[Row] = [(1, -1, -1), (1, 2, -1)]
    before = make_cache(spec, torch.float32)
    out, after = computed(spec, rows, torch.float32, reference=False)
    assert not out.any()
    assert torch.equal(after.inputs, before.inputs)
    if after.states is not None and before.states is not None:
        assert torch.equal(after.states, before.states)
