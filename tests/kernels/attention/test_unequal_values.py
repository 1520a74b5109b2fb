"""Keys and values of different dimensions: every kernel that reads or writes them, against the reference in float64."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.attention.prefill_attention import FlashPrefill, PrefillAttention, SdpaPrefill
from tandem.engine.kernels.attention.quantized_prefill import QuantizedPrefill
from tandem.engine.kernels.attention.triton_attention import DecodeAttention
from tandem.engine.kernels.base import DraftGroups
from tandem.engine.kernels.cpu.kernels import CpuKernels
from tandem.engine.kernels.kv_cache import (
    SCALE_BYTES,
    KvCache,
    QuantizedKv,
    UnequalKv,
    kv_view,
    layer_part,
    quantize_kv,
)
from tandem.engine.kernels.reference import ReferenceKernels
from tandem.engine.kernels.rowwise.triton_rope import rope_and_store
from tandem.engine.kernels.triton_launch import overlaps_launches
from tests.kernels.attention.test_flash_calls import Flash
from tests.kernels.decode_cases import DEVICE, fixed
from tests.kernels.prefill_cases import to_device
from tests.kernels.steps import LAYER, LAYERS, Step, assert_as_good, heads, make_step, with_sinks
from tests.pairwise import pairwise

REFERENCE = ReferenceKernels()
PDL = overlaps_launches()
SHAPES = {
    "mimo": replace(heads(8, 2, 192), value_dim=128),
    "window": replace(heads(4, 2, 192, window=40), value_dim=128),
    "partial": replace(heads(6, 3, 96), value_dim=64, rotary_dims=32),
    "wide values": replace(heads(4, 2, 64), value_dim=96),
}
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
DECODE = [(1, 1), (1, 127), (1, 129), (1, 40)]
PROMPTS = [(129, 129), (5, 5), (9, 200), (1, 30)]


@dataclass(frozen=True)
class Unequal:
    """A step with the keys of `step`, and with other values: [pages, LAYERS, 1, heads, tokens, dim]."""

    step: Step
    values: Tensor

    @property
    def shape(self) -> AttentionShape:
        return self.step.shape

    def cache(
        self, dtype: torch.dtype, device: torch.device | None = None, kind: torch.dtype | None = None
    ) -> UnequalKv:
        """Returns the cache in the memory of a `PagedCache`; codes of the dtype `kind` if it is given."""
        parts = (self.step.cache[:, :, :1], self.values)
        page_tokens = self.values.shape[4]
        scales = 0 if kind is None else SCALE_BYTES
        elements = sum(page_tokens * (part.shape[5] + scales) for part in parts)
        planes = torch.zeros(
            len(self.values), self.shape.kv_heads, LAYERS, elements, dtype=kind or dtype, device=device
        )
        view = kv_view(planes.transpose(1, 2), (self.shape.head_dim, self.shape.v_dim), page_tokens)
        assert isinstance(view, UnequalKv)
        for held, part in zip(view.parts, parts, strict=True):
            if isinstance(held, QuantizedKv):
                codes, code_scales = quantize_kv(part.nan_to_num(), held.codes.dtype)
                held.codes.copy_(codes)
                held.scales.copy_(torch.where(part.isnan().any(-1), float("nan"), code_scales))
            else:
                held.copy_(part)
        return view


def unequal(rows: Sequence[tuple[int, int]], shape: AttentionShape, page_tokens: int = 16, **options: bool) -> Unequal:
    """Returns a random step; its pages are those of `make_step`."""
    keys = make_step(rows, replace(shape, value_dim=None), page_tokens, **options)
    narrow = replace(shape, head_dim=shape.v_dim, value_dim=None, rotary_dims=None)
    values = make_step(rows, narrow, page_tokens, **options)
    qkv = torch.cat((keys.qkv[:, : sum(shape.qkv_rows[:2])], values.qkv[:, -shape.qkv_rows[2] :]), dim=1)
    return Unequal(replace(keys, shape=shape, qkv=qkv), values.cache[:, :, 1:])


def reference(case: Unequal, dtype: torch.dtype, cache: KvCache | None = None) -> Tensor:
    step = case.step
    return REFERENCE.attention(step.q.to(dtype), step.layer, cache or case.cache(dtype), step.layout)


def decode(case: Unequal, dtype: torch.dtype, cache: KvCache, units: int = 0) -> Tensor:
    step, kind = case.step, None if isinstance(layer_part(cache, 0, 0), Tensor) else cache.parts[0].codes.dtype
    choose = fixed(units) if units else fixed(splits=3)
    attention = DecodeAttention(case.shape, 8, DEVICE, dtype, PDL, choose=choose, kv_dtype=kind)
    rows = step.layout.page_table.to(DEVICE), step.layout.context_lens.to(DEVICE)
    attention.begin_step(cache, *rows)
    rows[0].clone()  # overlaps no launch, as the embedding between them
    sinks = None if step.sinks is None else step.sinks.to(DEVICE)
    return attention(step.q.to(DEVICE, dtype), cache, LAYER, *rows, sinks=sinks).cpu()


@pairwise(shape=SHAPES, page_tokens=[16, 48, 128], units=[0, 5], sinks={"sinks": True, "none": False})
def test_decode(shape: AttentionShape, page_tokens: int, units: int, sinks: bool) -> None:
    case = unequal(DECODE, shape, page_tokens)
    case = replace(case, step=with_sinks(case.step)) if sinks else case
    dtype = torch.float16
    ours = decode(case, dtype, case.cache(dtype, DEVICE), units)
    assert ours.shape == (len(DECODE), shape.output_size)
    assert_as_good(ours, reference(case, dtype), reference(case, torch.float64))


@pairwise(shape=SHAPES, kind=KINDS, units=[0, 5])
def test_decode_over_codes(shape: AttentionShape, kind: torch.dtype, units: int) -> None:
    case = unequal(DECODE, shape)
    held = case.cache(torch.float64, kind=kind)
    ours = decode(case, torch.float16, case.cache(torch.float16, DEVICE, kind), units)
    assert_as_good(ours, reference(case, torch.float16, held), reference(case, torch.float64, held))


def test_rows_that_verify_draft_tokens() -> None:
    """Two rows of one request form a group: the second sees a token more."""
    case = unequal([(2, 130)], SHAPES["mimo"])
    step = case.step
    table = step.layout.page_table.expand(2, -1).contiguous().to(DEVICE)
    contexts = torch.tensor([129, 130], dtype=torch.int32, device=DEVICE)
    groups = DraftGroups(torch.tensor([[0, 1, 2], [2, 0, 0]], dtype=torch.int32, device=DEVICE), 2).table
    attention = DecodeAttention(case.shape, 2, DEVICE, torch.float16, PDL, choose=fixed(splits=3), tokens=2)
    cache = case.cache(torch.float16, DEVICE)
    attention.begin_step(cache, table, contexts, groups)
    ours = attention(step.q.to(DEVICE, torch.float16), cache, LAYER, table, contexts).cpu()
    assert_as_good(ours, reference(case, torch.float16), reference(case, torch.float64))


def prefill(attention: PrefillAttention, case: Unequal, cache: KvCache, dtype: torch.dtype) -> Tensor:
    layout = to_device(case.step.layout, DEVICE)
    attention.begin_step(cache, layout, 0)
    return attention(case.step.q.to(DEVICE, dtype), case.step.layer, cache, layout, 0).flatten(1).cpu()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefill_in_pytorch(shape: AttentionShape) -> None:
    case, dtype = unequal(PROMPTS, shape), torch.float16
    ours = prefill(SdpaPrefill(), case, case.cache(dtype, DEVICE), dtype)
    assert_as_good(ours, reference(case, dtype), reference(case, torch.float64))


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Flash:
    made = Flash()
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "flash_attn.cute", SimpleNamespace(flash_attn_varlen_func=made))
    return made


@pytest.mark.usefixtures("flash")
def test_flash_attention_gets_keys_and_values_and_no_unwritten_ones() -> None:
    """The values after the context of a row are zeroed in its last page, and nothing else is changed."""
    case, dtype = unequal(PROMPTS, SHAPES["mimo"], 128), torch.float16
    cache = case.cache(dtype, DEVICE)
    keys, values = (layer_part(cache, LAYER, part).clone() for part in range(2))
    ours = prefill(FlashPrefill(128, PDL), case, cache, dtype)
    assert_as_good(ours, reference(case, dtype), reference(case, torch.float64))
    assert torch.equal(layer_part(cache, LAYER, 0).nan_to_num(-1), keys.nan_to_num(-1))
    for row, (_, context) in enumerate(PROMPTS):
        values[case.step.layout.page_table[row, context // 128], :, context % 128 :] = 0
    assert torch.equal(layer_part(cache, LAYER, 1).nan_to_num(-1), values.nan_to_num(-1))
    FlashPrefill(128, PDL).compile([(case.shape, False)], dtype, DEVICE)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_flash_attention_over_dequantized_copies(kind: torch.dtype) -> None:
    case = unequal(PROMPTS, SHAPES["window"], 128)
    copies = torch.full((4, 2, 2, 128, 160), float("nan"), dtype=torch.float16, device=DEVICE)
    attention = QuantizedPrefill(FlashPrefill(128, PDL), copies)
    held = case.cache(torch.float64, kind=kind)
    ours = prefill(attention, case, case.cache(torch.float16, DEVICE, kind), torch.float16)
    assert_as_good(ours, reference(case, torch.float16, held), reference(case, torch.float64, held))


def stored(case: Unequal, kernels: str, dtype: torch.dtype, cache: UnequalKv, normed: bool) -> Tensor:
    """Stores the keys and values of the step with the named kernels → its queries."""
    step, device = case.step, cache.shape and codes(cache.parts[0]).device
    norm = torch.linspace(0.5, 1.5, case.shape.head_dim).to(device, dtype) if normed else None
    layer = replace(step.layer, rope=step.rope.to(device), q_norm=norm, k_norm=norm)
    layout = replace(step.layout, positions=step.layout.positions.to(device), slots=step.layout.slots.to(device))
    qkv = step.qkv.to(device, dtype)
    if kernels == "triton":
        return rope_and_store(qkv, layer, cache, layout, pdl=PDL)
    chosen = CpuKernels(dtype, threads=1) if kernels == "cpu" else REFERENCE
    try:
        return chosen.rope_and_store(qkv, layer, cache, layout)
    finally:
        if isinstance(chosen, CpuKernels):
            chosen.close()


def codes(part: Tensor | QuantizedKv) -> Tensor:
    return part.codes if isinstance(part, QuantizedKv) else part


@pairwise(
    kernels=["triton", "cpu"],
    shape=SHAPES,
    normed={"plain": False, "qk_norm": True},
    kind={"float32": None, "int8": torch.int8},
)
def test_store(kernels: str, shape: AttentionShape, normed: bool, kind: torch.dtype | None) -> None:
    case, dtype = unequal([(1, 1), (17, 33), (1, 50), (20, 20)], shape, filled=False), torch.float32
    device = DEVICE if kernels == "triton" else torch.device("cpu")
    ours, wanted = case.cache(dtype, device, kind), case.cache(dtype, kind=kind)
    exact = stored(case, "reference", dtype, wanted, normed)
    torch.testing.assert_close(stored(case, kernels, dtype, ours, normed).cpu(), exact, atol=2e-6, rtol=2e-6)
    for mine, theirs in zip(ours.parts, wanted.parts, strict=True):
        if isinstance(mine, QuantizedKv) and isinstance(theirs, QuantizedKv):
            torch.testing.assert_close(mine.scales.cpu(), theirs.scales, equal_nan=True)
            assert (mine.codes.cpu().int() - theirs.codes.int()).abs().max() <= 1
        else:
            assert isinstance(mine, Tensor)
            torch.testing.assert_close(mine.cpu(), theirs, atol=2e-6, rtol=2e-6, equal_nan=True)


@pairwise(
    rows={"decode": [*DECODE, (1, 600)], "prompts": PROMPTS},
    shape=SHAPES,
    page_tokens=[16, 48],
    kind={"float32": None, "int8": torch.int8},
)
def test_attention_on_cpus(
    rows: list[tuple[int, int]], shape: AttentionShape, page_tokens: int, kind: torch.dtype | None
) -> None:
    case, dtype = unequal(rows, shape, page_tokens), torch.float32
    cache, step = case.cache(dtype, kind=kind), case.step
    kernels = CpuKernels(dtype, threads=1)
    ours = kernels.attention(step.q.to(dtype), step.layer, cache, step.layout)
    kernels.close()
    held = case.cache(torch.float64, kind=kind)
    assert_as_good(ours, reference(case, dtype, cache), reference(case, torch.float64, held))


@pytest.mark.parametrize("kind", [None, torch.int8], ids=["float32", "int8"])
def test_checksums_see_every_word_and_add_up_over_heads(kind: torch.dtype | None) -> None:
    case = unequal([(33, 33)], SHAPES["mimo"])
    cache = case.cache(torch.float32, kind=kind)
    memory = codes(cache.parts[0]).untyped_storage()
    page_bytes = len(memory) // len(case.values)
    sums = page_checksums(cache)
    before = list(sums([1, 0], [16, 5]))
    for place in range(0, page_bytes, page_bytes // 23 // 4 * 4 + 4):
        changed = page_bytes + place
        memory[changed] = memory[changed] ^ 1
        assert list(sums([1], [16])) != before[:1], place
        memory[changed] = memory[changed] ^ 1
    assert list(sums([1, 0], [16, 5])) == before
    halves = [half_of(case, kind, head) for head in range(2)]
    totals = [
        page_checksums(half, parts=[PagePart(2, LAYERS, head)])([1, 0], [16, 5]) for head, half in enumerate(halves)
    ]
    assert [sum(both) % 2**64 for both in zip(*totals, strict=True)] == before


def half_of(case: Unequal, kind: torch.dtype | None, head: int) -> UnequalKv:
    """Returns the cache of a rank that has only this KV head."""
    mine = slice(head, head + 1)
    step = replace(case.step, cache=case.step.cache[:, :, :, mine], shape=replace(case.shape, heads=4, kv_heads=1))
    return Unequal(step, case.values[:, :, :, mine]).cache(torch.float32, kind=kind)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the device computes the sums of its own memory")
def test_the_kernel_of_checksums_reads_rows_that_are_apart() -> None:
    from tandem.engine.cache.page_words import words_of
    from tandem.engine.kernels.rowwise.triton_checksum import SPLITS, partial_sums

    cache = unequal([(33, 33)], SHAPES["mimo"]).cache(torch.float32)
    chosen, total = torch.tensor([[1, 16], [0, 5]]), torch.zeros(2, dtype=torch.int64)
    for words in words_of(cache):
        parts = torch.zeros(2, SPLITS, dtype=torch.int64)
        numbering = words.first_number, words.head_words, words.head_gap
        token_words = words.token_words
        partial_sums(words.words, words.page_tokens * token_words, token_words, chosen, parts, numbering=numbering)
        total += parts.sum(1)
    assert [number % 2**64 for number in total.tolist()] == list(page_checksums(cache)([1, 0], [16, 5]))
