"""Long rows of state layers, which are computed in chunks.

fla-core computes Gated DeltaNet; without it or a GPU, a PyTorch function with the same interface.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.state_layers import GatedDeltaNet, KimiDeltaAttention, Mamba2, StateLayer
from tandem.engine.kernels.states import reference, state_kernels
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta, choose_chunked_delta, chunks_of
from tandem.engine.kernels.states.recurrence import recurrence
from tandem.engine.kernels.states.reference import mix_states
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.steps import assert_as_good

from .state_steps import DEVICE, LAST, Row, make_cache, make_inputs, make_layer, make_layout

STEPS: dict[str, list[Row]] = {
    "mixed": [(1, 4, 4), (1, -1, 5), (70, 1, 1), (9, -1, 0), (3, 2, 3)],
    "prompts": [(64, -1, 2), (129, 3, 4)],
}
DELTAS = [GatedDeltaNet(2, 4, 64, 64, 4, 1e-6), GatedDeltaNet(2, 2, 64, 32, 3, 1e-5, step_scale=2.0)]
SPECS: dict[str, StateLayer] = {
    "delta": DELTAS[0],
    "delta with steps up to 2": DELTAS[1],
    "kimi": KimiDeltaAttention(2, 32, 8, 4, 1e-6),
    "kimi of odd sizes": KimiDeltaAttention(3, 24, 4, 3, 1e-5),
    "mamba": Mamba2(4, 16, 2, 32, 4, 1e-2, norm_groups=2),
    "mamba of odd sizes": Mamba2(3, 24, 3, 12, 3, 1e-2, convolution_bias=False, least_step=0.4),
}


def plain_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any) -> tuple[Tensor, Tensor]:
    """Computes what fla-core's function does, in float32, with q, k and v in the given dtype."""
    starts, table = named["cu_seqlens"].tolist(), named["chunk_indices"].tolist()
    assert [pair for pair in table if 64 * pair[1] < starts[pair[0] + 1] - starts[pair[0]]] == [
        [row, chunk] for row in range(len(starts) - 1) for chunk in range(-(-(starts[row + 1] - starts[row]) // 64))
    ]
    shared = v.shape[2] // q.shape[2]
    q, k, v, g, beta = (part[0].float().transpose(0, 1) for part in (q, k, v, g.unsqueeze(-1), beta.unsqueeze(-1)))
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(shared, 0) for x in (q, k))
    decay = -named["A_log"].exp()[:, None] * F.softplus(g[..., 0] + named["dt_bias"][:, None])
    steps = (1 + named["allow_neg_eigval"]) * beta[..., 0].sigmoid()
    out, states = torch.empty_like(v), torch.empty_like(named["initial_state"])
    for row, state in enumerate(named["initial_state"]):
        now = slice(starts[row], starts[row + 1])
        parts = [part[None, :, now] for part in (q * q.shape[-1] ** -0.5, k, v, decay.unsqueeze(-1), steps)]
        mixed, after = recurrence(*parts, state[None])
        out[:, now], states[row] = mixed[0], after[0]
    return out.transpose(0, 1)[None].to(torch.bfloat16), states


def chunked() -> ChunkedDelta:
    found = choose_chunked_delta(DEVICE, torch.bfloat16, DELTAS)
    return found or ChunkedDelta(plain_rule)


def of_reference(spec: StateLayer, rows: list[Row], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the reference's output, states and kept inputs."""
    cache = make_cache(spec, dtype)
    out = mix_states(make_inputs(spec, rows, dtype), make_layer(spec, dtype), cache, make_layout(rows))
    assert cache.states is not None
    return out, cache.states[:LAST], cache.inputs[:LAST]


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_chunks_are_as_good_as_those_of_pytorch(
    spec: StateLayer, rows: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype = torch.bfloat16
    monkeypatch.setattr(state_kernels, "_RECURRENT_TOKENS", 2)
    exact = of_reference(spec, rows, torch.float64)
    ready: Future[ChunkedDelta | None] = Future()
    ready.set_result(chunked())
    kernels, cache, layout = StateKernels(overlaps_launches(), ready), make_cache(spec, dtype), make_layout(rows)
    kernels.begin_step(layout)
    ours = kernels.mix(make_inputs(spec, rows, dtype), make_layer(spec, dtype), cache, layout)
    # Products of chunks take inputs of the model's dtype, so the baseline rounds its convolutions as transformers does.
    monkeypatch.setattr(reference, "_convolve", _rounding(reference._convolve, dtype))
    baseline = of_reference(spec, rows, dtype)
    assert cache.states is not None
    for found, in_dtype, wanted in zip((ours, cache.states[:LAST], cache.inputs[:LAST]), baseline, exact, strict=True):
        assert_as_good(found, in_dtype, wanted)


def _rounding(convolve: Callable[..., tuple[list[Tensor], Tensor]], dtype: torch.dtype) -> Callable[..., Any]:
    def rounded(*given: Any) -> tuple[list[Tensor], Tensor]:
        mixed, kept = convolve(*given)
        return [part.to(dtype).to(part.dtype) for part in mixed], kept

    return rounded


def test_chunks_follow_the_rows() -> None:
    chunks = chunks_of(torch.tensor([5, 70, 71, 199], dtype=torch.int32, device=DEVICE), 194)
    assert chunks.starts.tolist() == [0, 65, 66, 194]
    needed = [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    assert chunks.table.tolist() == [*needed, [2, 2]], "the last one has no tokens"


def test_the_library_is_used_only_for_what_it_computes() -> None:
    assert choose_chunked_delta(torch.device("cuda"), torch.float32, DELTAS) is None
    wide = [GatedDeltaNet(1, 1, 512, 16, 4, 1e-6)]
    assert choose_chunked_delta(torch.device("cuda"), torch.bfloat16, wide) is None
    odd = [GatedDeltaNet(1, 1, 64, 16, 4, 1e-6, step_scale=1.5)]
    assert choose_chunked_delta(torch.device("cuda"), torch.bfloat16, odd) is None
