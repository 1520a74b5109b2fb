"""The pages of state layers: how many layers and tokens a page has, and where the states are in its memory."""

from dataclasses import dataclass, replace

import pytest
import torch

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.paged_cache import PagedCache, cache_bytes, choose_pages, page_bytes
from tandem.engine.config.attention import AttentionShape, StateShape
from tandem.engine.config.kv import StateGroup, kv_groups, layer_bytes
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.config.sharding import PagePart
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.model_sizes import kv_bytes_per_token, state_bytes
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.kv_pages import STATE

HOST = torch.device("cpu")
SHAPE = StateShape(heads=4, state=(8, 6), channels=5, inputs=3)
WITHOUT_STATE = replace(SHAPE, state=())


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The attention of a layer that has a state instead of keys and values."""

    state: StateShape


def model(pattern: str, state: StateShape = SHAPE) -> ModelSpec:
    """Returns a model with a layer for each letter: f = without a window, w = with a window, s = with a state."""
    layers = {
        "f": GroupedQueryAttention(AttentionShape(4, 2, 16, 1.0), None),
        "w": GroupedQueryAttention(AttentionShape(4, 2, 16, 1.0, window=40), None),
        "s": Recurrence(state),
    }
    specs = tuple(LayerSpec(layers[letter], DenseFeedForward(32)) for letter in pattern)  # type: ignore[arg-type]
    return ModelSpec("Any", 100, 64, specs, 1e-5, 4096, True, (2,), None)


def paged(spec: ModelSpec, page_tokens: int | None = None, dtype: torch.dtype = torch.bfloat16) -> PagedCache:
    spec, page_tokens = choose_pages(spec, page_tokens, 16, dtype, torch.bfloat16)
    capacity = cache_bytes(spec, 5, page_tokens, dtype, torch.bfloat16)
    return PagedCache(spec, page_tokens, capacity, dtype, HOST, model_dtype=torch.bfloat16)


def states_of(cache: PagedCache) -> StateCache:
    view = cache.views[-1]
    assert isinstance(view, StateCache)
    return view


def test_groups_of_state_layers_come_last() -> None:
    groups = kv_groups(model("sfswss"))
    assert [(group.layers, group.window) for group in groups] == [
        ((1,), None), ((3,), 40), ((0,), STATE), ((2,), STATE), ((4,), STATE), ((5,), STATE)
    ]  # fmt: skip


def test_a_page_has_the_states_of_as_many_layers_as_fit() -> None:
    """A layer has 4 · ⌈(48 · 4 + 15 · 2) / 16⌉ · 16 = 896 bytes, and 16 tokens of the one layer with KV have 2,048."""
    assert layer_bytes(SHAPE, 2) == 896
    spec, page_tokens = choose_pages(model("f" + "s" * 5), 16, 16, torch.bfloat16, torch.bfloat16)
    assert (page_tokens, [group.layers for group in kv_groups(spec)]) == (16, [(0,), (1, 2), (3, 4), (5,)])
    assert page_bytes(spec, 16, torch.bfloat16) == 2048


@pytest.mark.parametrize(
    ("wide", "tokens", "layers"),
    [
        (SHAPE, 64, 9),  # 16, 32 and 48 tokens leave 1/8 of a page unused
        (replace(SHAPE, state=(64, 64)), 528, 1),
        (replace(SHAPE, state=(64, 62)), 512, 1),
    ],
)
def test_the_page_size_is_raised_until_little_of_a_page_is_unused(wide: StateShape, tokens: int, layers: int) -> None:
    spec, chosen = choose_pages(model("f" + "s" * 40, wide), None, 16, torch.bfloat16, torch.bfloat16)
    group = kv_groups(spec)[-1]
    assert (chosen, group.depth) == (tokens, layers)
    used, page = layers * layer_bytes(wide, 2), page_bytes(spec, tokens, torch.bfloat16)
    assert page == tokens * 128
    assert 16 * (page - used) <= page


def test_a_page_size_that_suffices_for_all_states_is_kept() -> None:
    spec, chosen = choose_pages(model("fffs"), None, 16, torch.bfloat16, torch.bfloat16)
    assert (chosen, len(kv_groups(spec))) == (16, 2)


def test_a_given_page_size_below_the_state_of_a_layer_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="use 7 or more") as caught:
        paged(model("fs"), 6)
    assert caught.value.field == "page_tokens"
    assert paged(model("fs"), 7).page_tokens == 7


def test_a_model_without_any_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="without any attention"):
        kv_groups(model("ss"))


@pytest.mark.parametrize("shape", [SHAPE, WITHOUT_STATE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_each_number_of_a_state_has_its_own_place(shape: StateShape, dtype: torch.dtype) -> None:
    cache = paged(model("ffsss", shape), dtype=dtype)
    view = states_of(cache)
    number = 0
    parts = [view.inputs] if view.states is None else [view.states, view.inputs]
    for part in parts:
        assert part.shape[:3] == (cache.pages + 1, 3, 4)
        assert all(stride * part.element_size() % 16 == 0 for stride in part.stride()[:3])
        part.copy_(torch.arange(number, number + part.numel()).view(part.shape).to(part.dtype))
        number += part.numel()
    for part in parts[::-1]:
        number -= part.numel()
        assert torch.equal(part, torch.arange(number, number + part.numel()).view(part.shape).to(part.dtype))
        part.view(torch.uint8).zero_()
    assert not cache.storage.view(torch.uint8).any()


def test_a_range_of_heads_is_one_range_of_bytes() -> None:
    """So a hand-over between workers of any tensor parallelism copies one range per page and pair of ranks."""
    cache = paged(model("fsss"), 32)
    (group,) = [group for group in cache.groups if isinstance(group, StateGroup)]
    view, head = states_of(cache), layer_bytes(SHAPE, 2) // 4 * group.depth
    assert view.states is not None
    view.states[1, :, 1:3] = 1
    view.inputs[1, :, 1:3] = 1
    (filled,) = cache.storage.view(torch.uint8)[1].nonzero(as_tuple=True)
    assert head <= int(filled.min())
    assert int(filled.max()) < 3 * head


def test_every_word_of_a_state_counts_in_its_checksum_however_full_the_page_is() -> None:
    cache = paged(model("fss"))
    cache.storage.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    sums, last = page_checksums(*cache.views), len(cache.groups) - 1
    before = sums([3, 3], [1, 1], [0, last])
    assert before == [*sums([3], [1]), *sums([3], [16], [last])]
    words = cache.storage.view(torch.int32)[3]
    for word in (0, len(words) // 3, last * layer_bytes(SHAPE, 2) // 4 - 1):
        words[word] ^= 1 << 11
        assert sums([3], [1], [last]) != before[1:]
        words[word] ^= 1 << 11


def test_the_sums_of_ranks_add_up_to_the_checksum_of_a_state_page() -> None:
    whole, part_shape = paged(model("fss"), 32), replace(SHAPE, heads=2)
    spec = replace(model("fss", part_shape), page_layers=(1, 2))
    capacity = cache_bytes(spec, 5, 32, torch.bfloat16)
    parts = [PagedCache(spec, 32, capacity, torch.bfloat16, HOST) for _ in range(2)]
    generator = torch.Generator().manual_seed(2)
    totals = 0
    for number, part in enumerate(parts):
        ours, own = states_of(whole), states_of(part)
        assert ours.states is not None
        assert own.states is not None
        heads = slice(2 * number, 2 * number + 2)
        ours.states[:, :, heads].normal_(generator=generator)
        own.states[:] = ours.states[:, :, heads]
        own.inputs[:] = ours.inputs[:, :, heads]
        totals += page_checksums(own, parts=[PagePart(4, 2, 2 * number, 0)])([4], [1])[0]
    assert [totals % (1 << 64)] == list(page_checksums(states_of(whole))([4], [1]))


def test_a_state_does_not_count_per_token() -> None:
    spec = model("fwsss")
    assert kv_bytes_per_token(spec, 2) == 2 * 2 * 2 * 16 * 2
    assert state_bytes(spec, 2) == 3 * 896


def test_facts_name_the_layout_of_the_states() -> None:
    facts = dict(paged(model("fss")).facts)
    assert facts["windows"] == "none, states"
    assert facts["layout"].endswith("4 heads,2 layers,8x6 state,5 channels,3 inputs,bfloat16")
