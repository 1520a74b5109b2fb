"""Long rows of Gated DeltaNet by fla-core; without it or a GPU, by a PyTorch function with the same interface."""

from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.engine.config.model import GatedDeltaNet
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.states import state_kernels
from tandem.engine.kernels.states.chunked_delta import ChunkedDelta, choose_chunked_delta, chunks_of
from tandem.engine.kernels.states.recurrence import recurrence
from tandem.engine.kernels.states.reference import mix_states
from tandem.engine.kernels.states.state_kernels import StateKernels
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.steps import assert_as_good

from .state_steps import DEVICE, LAST, Row, make_cache, make_inputs, make_layer, make_layout

ROWS: list[Row] = [(1, 4, 4), (1, -1, 5), (70, 1, 1), (9, -1, 0), (3, 2, 3)]
SPECS = [GatedDeltaNet(2, 4, 64, 64, 4, 1e-6), GatedDeltaNet(2, 2, 64, 32, 3, 1e-5, step_scale=2.0)]


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
        parts = [part[None, :, now] for part in (q * q.shape[-1] ** -0.5, k, v, decay, steps)]
        mixed, after = recurrence(*parts, state[None])
        out[:, now], states[row] = mixed[0], after[0]
    return out.transpose(0, 1)[None].to(torch.bfloat16), states


def chunked() -> ChunkedDelta:
    found = choose_chunked_delta(DEVICE, torch.bfloat16, SPECS, pdl=overlaps_launches())
    return found or ChunkedDelta(plain_rule, pdl=overlaps_launches())


def rounded(projected: Tensor, layout: Any, spec: GatedDeltaNet, dtype: torch.dtype) -> tuple[Tensor, StateCache]:
    """Returns the reference's output and states."""
    cache = make_cache(spec, dtype)
    return mix_states(projected.to(dtype), make_layer(spec, dtype), cache, layout), cache


@pytest.mark.parametrize("spec", SPECS, ids=["shared keys", "steps up to 2"])
def test_mixed_steps_are_nearly_as_good_as_pytorch(spec: GatedDeltaNet, monkeypatch: pytest.MonkeyPatch) -> None:
    """fla-core takes queries, keys and values in bfloat16, which PyTorch's reference keeps in float32."""
    monkeypatch.setattr(state_kernels, "_RECURRENT_TOKENS", 2)
    layout, projected = make_layout(ROWS), make_inputs(spec, ROWS, torch.bfloat16)
    exact, expected = rounded(projected, layout, spec, torch.float64)
    baseline, _ = rounded(projected, layout, spec, torch.bfloat16)
    ready: Future[ChunkedDelta | None] = Future()
    ready.set_result(chunked())
    kernels, cache = StateKernels(overlaps_launches(), ready), make_cache(spec, torch.bfloat16)
    kernels.begin_step(layout)
    ours = kernels.mix(projected, make_layer(spec, torch.bfloat16), cache, layout)
    assert_as_good(ours, baseline, exact, times=4)
    assert cache.states is not None
    assert expected.states is not None
    torch.testing.assert_close(cache.states[:LAST].double(), expected.states[:LAST], atol=0.05, rtol=0.02)
    assert torch.equal(cache.inputs[:LAST].double(), expected.inputs[:LAST])


def test_chunks_follow_the_rows() -> None:
    chunks = chunks_of(torch.tensor([5, 70, 71, 199], dtype=torch.int32, device=DEVICE), 194)
    assert chunks.starts.tolist() == [0, 65, 66, 194]
    needed = [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1]]
    assert chunks.table.tolist() == [*needed, [2, 2]], "the last one has no tokens"


def test_float32_has_no_library() -> None:
    assert choose_chunked_delta(torch.device("cuda"), torch.float32, SPECS, pdl=False) is None
    wide = [GatedDeltaNet(1, 1, 512, 16, 4, 1e-6)]
    assert choose_chunked_delta(torch.device("cuda"), torch.bfloat16, wide, pdl=False) is None
    odd = [GatedDeltaNet(1, 1, 64, 16, 4, 1e-6, step_scale=1.5)]
    assert choose_chunked_delta(torch.device("cuda"), torch.bfloat16, odd, pdl=False) is None
