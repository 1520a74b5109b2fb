"""State layers of one-token rows in Triton against the reference."""

import pytest
import torch

from tandem.engine.config.model import GatedDeltaNet
from tandem.engine.kernels.base import StepLayout
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.kernels.layers import Norm, RecurrentLayer
from tandem.engine.kernels.states.reference import mix_states
from tandem.engine.kernels.states.triton_decode import decode_delta
from tandem.engine.kernels.triton_launch import overlaps_launches

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGES, LAYERS, LAYER = 6, 2, 1
CASES = [GatedDeltaNet(2, 4, 16, 8, 4, 1e-6), GatedDeltaNet(3, 3, 24, 48, 2, 1e-5, step_scale=2.0)]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_layer(spec: GatedDeltaNet) -> RecurrentLayer:
    channels = spec.state.heads * spec.state.channels
    return RecurrentLayer(
        LAYER,
        spec,
        random(channels, spec.width, seed=1),
        None,
        random(spec.value_heads, seed=2),
        random(spec.value_heads, seed=3),
        None,
        Norm(random(spec.value_dim, seed=4), spec.norm_eps),
    )


def make_cache(spec: GatedDeltaNet) -> StateCache:
    shape = spec.state
    outer = (PAGES, LAYERS, shape.heads)
    return StateCache(random(*outer, *shape.state, seed=5), random(*outer, shape.channels, shape.inputs, seed=6))


def make_layout(pages: list[tuple[int, int]]) -> StepLayout:
    rows, zeros = len(pages), torch.zeros(len(pages), dtype=torch.int32, device=DEVICE)
    return StepLayout(
        positions=zeros,
        slots=zeros.long(),
        row_starts=torch.arange(rows + 1, dtype=torch.int32, device=DEVICE),
        context_lens=zeros,
        page_table=zeros[:, None],
        max_row_tokens=1,
        max_context=1,
        single_rows=rows,
        state_pages=torch.tensor(pages, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize("spec", CASES, ids=["shared keys", "sizes that are no powers of two"])
def test_rows_of_one_token_have_the_output_and_the_states_of_the_reference(spec: GatedDeltaNet) -> None:
    """A new request, one that stays in its page, one that begins a page, and a padding row."""
    layer, layout = make_layer(spec), make_layout([(-1, 0), (1, 1), (2, 3), (-1, -1)])
    projected = random(4, sum(spec.projected), seed=7)
    expected, actual = make_cache(spec), make_cache(spec)
    wanted = mix_states(projected, layer, expected, layout)
    out = torch.empty_like(wanted)
    assert layout.state_pages is not None
    decode_delta(projected, layer, actual, layout.state_pages, out, pdl=overlaps_launches())
    torch.testing.assert_close(out[:3], wanted[:3], atol=1e-5, rtol=1e-5)
    assert actual.states is not None
    assert expected.states is not None
    # The reference writes the states of padding rows to the last page.
    torch.testing.assert_close(actual.states[:-1], expected.states[:-1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(actual.inputs[:-1], expected.inputs[:-1], atol=0, rtol=0)
