"""The arguments passed to flash-attn-4, with PyTorch in its place; tests/gpu runs the library itself."""

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec
from tandem.engine.kernels.attention.prefill_attention import AttentionKind, FlashPrefill, has_flash_kernel
from tandem.engine.kernels.cuda import CudaKernels
from tandem.engine.kernels.reference import attend
from tandem.engine.kernels.triton_launch import overlaps_launches
from tandem.engine.models.shapes import shape_config
from tests.kernels.prefill_cases import check, run, to_device, torch_of
from tests.kernels.steps import assert_as_good, head_major, heads, make_step, with_sinks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 128
WHOLE, WINDOWED = heads(2, 1, 64), heads(2, 1, 64, window=40)


class Flash:
    """A fake of `flash_attn_varlen_func`, as far as it is used.

    Records window widths, and the most queries of a row.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int | None, int]] = []
        self.softcap: float | None = None
        self.sinks: Tensor | None = None

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, **asked: Any) -> tuple[Tensor, None]:
        left, right = asked["window_size"]
        assert asked["causal"]
        assert right == (None if left is None else 0)
        self.calls.append((left, asked["max_seqlen_q"]))
        self.softcap, self.sinks = asked.get("softcap"), asked.get("learnable_sink")
        assert self.sinks is None or self.sinks.dtype == torch.bfloat16
        out = q.new_full((*q.shape[:2], values.shape[-1]), float("nan"))
        starts = asked["cu_seqlens_q"].tolist()
        shape = AttentionShape(
            q.shape[1],
            keys.shape[2],
            q.shape[2],
            asked["softmax_scale"],
            None if left is None else left + 1,
            softcap=self.softcap,
        )
        for row, context in enumerate(asked["seqused_k"].tolist()):
            here = slice(starts[row], starts[row + 1])
            tokens = here.stop - here.start
            assert tokens <= min(asked["max_seqlen_q"], context), "a query that sees nothing"
            if not tokens:
                continue
            pages = asked["page_table"][row, : -(-context // PAGE)]
            k, v = (pool[pages].flatten(0, 1)[:context].transpose(0, 1).float() for pool in (keys, values))
            positions = torch.arange(context - tokens, context, device=q.device)
            out[here] = attend(q[here].float(), k, v, positions, shape, self.sinks).to(q.dtype)
        return out, None


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    made = Flash()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=made))
    return made


def test_layers_that_the_library_does_not_compute_are_computed_by_pytorch(flash: Flash) -> None:
    """They are those of other head dimensions, and of chunks if a context may be longer than one."""
    rows, attention = [(129, 129), (5, 200)], FlashPrefill(PAGE, overlaps_launches())
    for shape, calls in (
        (heads(2, 1, 48), 0),
        (replace(WHOLE, chunk=100), 0),
        (replace(WHOLE, chunk=256), 1),
        (replace(heads(2, 1, 192), value_dim=64), 0),
    ):
        before = len(flash.calls)
        if shape.value_dim is None:
            check(attention, make_step(rows, shape, PAGE), torch.float32, DEVICE)
        assert has_flash_kernel(shape) == (shape.head_dim == 64)
        assert len(flash.calls) == before + calls
    attention.compile([AttentionKind(heads(2, 1, 48))], torch.float32, DEVICE)
    assert len(flash.calls) == 1, "nothing is compiled for them"


@pytest.mark.parametrize("first_row", [0, 2])
@pytest.mark.parametrize("shape", [WHOLE, WINDOWED], ids=["whole", "window"])
def test_plain_steps(flash: Flash, shape: AttentionShape, first_row: int) -> None:
    step = make_step([(1, 300), (1, 2), (5, 5), (9, 200)], shape, PAGE)
    ours = run(FlashPrefill(PAGE, overlaps_launches()), step, torch.bfloat16, DEVICE, first_row=first_row)
    whole, exact = torch_of(step, torch.bfloat16, DEVICE), torch_of(step, torch.float64, DEVICE)
    assert_as_good(ours, whole[first_row:], exact[first_row:])
    assert flash.calls == [(None if shape is WHOLE else 39, 9)]


def test_one_step_of_layers_of_both_kinds(flash: Flash) -> None:
    step = make_step([(3, 100)], WHOLE, PAGE)
    attention = FlashPrefill(PAGE, overlaps_launches())
    layout = to_device(step.layout, DEVICE)
    q, cache = step.q.to(DEVICE, torch.bfloat16), step.cache.to(DEVICE, torch.bfloat16)
    attention.begin_step(cache, layout, 0)
    for shape in (WINDOWED, WHOLE, WINDOWED, WHOLE):
        attention(q, replace(step.layer, shape=shape), cache, layout, 0)
    assert flash.calls == [(39, 3), (None, 3)] * 2


def test_what_is_compiled(flash: Flash) -> None:
    """Only the library runs: at the same time other kernels are compiled and launches left out."""
    attention = FlashPrefill(PAGE, overlaps_launches())
    attention.compile([AttentionKind(WHOLE), AttentionKind(WINDOWED)], torch.bfloat16, DEVICE)
    assert flash.calls == [(None, 1), (None, 257), (39, 1), (39, 257)]
    flash.calls.clear()
    attention.compile([AttentionKind(WHOLE), AttentionKind(WINDOWED)], torch.bfloat16, DEVICE, [257])
    assert flash.calls == [(None, 257), (39, 257)]


def test_soft_caps_and_sinks_are_passed_on_where_a_layer_has_them(flash: Flash) -> None:
    attention = FlashPrefill(PAGE, overlaps_launches())
    for shape in (WHOLE, WINDOWED):
        step = with_sinks(make_step([(5, 5), (9, 200)], replace(shape, softcap=0.5), PAGE))
        check(attention, step, torch.bfloat16, DEVICE)
        assert flash.softcap == 0.5
        assert flash.sinks is not None
        rounded = flash.sinks
        check(attention, replace(step, shape=shape, sinks=None), torch.bfloat16, DEVICE)
        assert flash.softcap is flash.sinks is None
        assert rounded.tolist() == step.sinks.tolist()
    attention.compile([AttentionKind(WHOLE, sinks=True)], torch.bfloat16, DEVICE)
    assert flash.sinks is not None


def test_pages_of_which_heads_are_outermost(flash: Flash) -> None:
    step = make_step([(5, 5), (9, 200)], heads(4, 2, 16), PAGE)
    attention = FlashPrefill(PAGE, overlaps_launches())
    check(attention, step, torch.bfloat16, DEVICE, cache=head_major(step.cache.bfloat16()))


@pytest.mark.parametrize("single", [0, 2])
def test_all_kernels_together(flash: Flash, single: int) -> None:
    """Rows of one token at the front, if there are any, belong to decode attention."""
    config = shape_config("llama-3.2-1b")
    shape = AttentionShape(heads=2, kv_heads=1, head_dim=64, scale=64**-0.5)
    attention = GroupedQueryAttention(shape, config.layers[0].attention.rope)
    model = replace(config, layers=(LayerSpec(attention, DenseFeedForward(128)),), hidden_size=128)
    kernels = CudaKernels(model, DEVICE, torch.bfloat16, PAGE, max_decode_rows=4)
    kernels.__dict__["_prefill"] = FlashPrefill(PAGE, overlaps_launches())
    step = make_step([(1, 140), (1, 7), (3, 4097), (2, 7)], shape, PAGE)
    whole, exact = torch_of(step, torch.bfloat16, DEVICE), torch_of(step, torch.float64, DEVICE)
    layout = replace(to_device(step.layout, DEVICE), single_rows=single)
    q, cache = step.q.to(DEVICE, torch.bfloat16), step.cache.to(DEVICE, torch.bfloat16)
    kernels.begin_step(cache, layout)
    ours = kernels.attention(q, step.layer, cache, layout).cpu()
    assert_as_good(ours, whole, exact)
    assert flash.calls == [(None, 3)]
