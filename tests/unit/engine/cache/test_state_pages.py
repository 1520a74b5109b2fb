"""The pages of state layers: how many layers and tokens a page has, and where the states are in its memory."""

from dataclasses import replace

import pytest
import torch

from tandem.engine.cache.page_checksums import page_checksums
from tandem.engine.cache.paged_cache import PagedCache, cache_bytes, choose_pages, page_bytes
from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.kv import StateGroup, kv_groups, layer_bytes
from tandem.engine.config.model import Attention, DenseFeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.config.sharding import PagePart, Rank, own_spec, page_parts, rank_spec, stage_layers
from tandem.engine.config.state_layers import GatedDeltaNet, Mamba2, ShortConvolution, StateLayer
from tandem.engine.kernels.kv_cache import StateCache
from tandem.engine.model_sizes import kv_bytes_per_token, state_bytes
from tandem.engine.model_summary import model_summary
from tandem.protocol.errors import InvalidArgument, ModelError
from tandem.protocol.kv_pages import STATE

HOST = torch.device("cpu")
MAMBA = Mamba2(heads=4, head_dim=4, groups=4, state_dim=4, width=4, norm_eps=1e-5, norm_groups=4)
"""A head has a state of 16 numbers, and 3 inputs of 12 channels: 64 + 72 bytes, padded to 144."""
CONVOLUTION = ShortConvolution(channels=20, width=4, blocks=4)
LAYER_BYTES = 4 * 144


def model(pattern: str, state: StateLayer = MAMBA) -> ModelSpec:
    """Returns a model with a layer for each letter: f = without a window, w = with a window, s = with a state."""
    attentions: dict[str, Attention] = {
        "f": GroupedQueryAttention(AttentionShape(4, 2, 16, 1.0), None),
        "w": GroupedQueryAttention(AttentionShape(4, 2, 16, 1.0, window=40), None),
        "s": state,
    }
    layers = tuple(LayerSpec(attentions[letter], DenseFeedForward(32)) for letter in pattern)
    return ModelSpec("Any", 100, 64, layers, 1e-5, 4096, True, (2,), None)


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
    """16 tokens of the one layer with KV have 2,048 bytes."""
    assert layer_bytes(MAMBA.state, 2) == LAYER_BYTES
    spec, page_tokens = choose_pages(model("f" + "s" * 7), 16, 16, torch.bfloat16, torch.bfloat16)
    assert (page_tokens, [group.layers for group in kv_groups(spec)]) == (16, [(0,), (1, 2, 3), (4, 5, 6), (7,)])
    assert page_bytes(spec, 16, torch.bfloat16) == 2048


@pytest.mark.parametrize(
    ("wide", "tokens", "layers"),
    [
        (MAMBA, 32, 7),  # 16 tokens leave 0.6 of 3.6 layers unused
        (replace(MAMBA, state_dim=64, head_dim=64), 560, 1),
        (replace(MAMBA, state_dim=62, head_dim=64), 544, 1),
    ],
)
def test_the_page_size_is_raised_until_little_of_a_page_is_unused(wide: Mamba2, tokens: int, layers: int) -> None:
    spec, chosen = choose_pages(model("f" + "s" * 40, wide), None, 16, torch.bfloat16, torch.bfloat16)
    group = kv_groups(spec)[-1]
    assert (chosen, group.depth) == (tokens, layers)
    used, page = layers * layer_bytes(wide.state, 2), page_bytes(spec, tokens, torch.bfloat16)
    assert page == tokens * 128
    assert 16 * (page - used) <= page


def test_a_page_size_that_suffices_for_all_states_is_kept() -> None:
    spec, chosen = choose_pages(model("fffs"), None, 16, torch.bfloat16, torch.bfloat16)
    assert (chosen, len(kv_groups(spec))) == (16, 2)


def test_a_given_page_size_below_the_state_of_a_layer_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="use 5 or more") as caught:
        paged(model("fs"), 4)
    assert caught.value.field == "page_tokens"
    assert paged(model("fs"), 5).page_tokens == 5


def test_a_model_without_any_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="without any attention"):
        kv_groups(model("ss"))


@pytest.mark.parametrize("state", [MAMBA, CONVOLUTION])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_each_number_of_a_state_has_its_own_place(state: StateLayer, dtype: torch.dtype) -> None:
    cache = paged(model("ffsss", state), dtype=dtype)
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
    view, head = states_of(cache), LAYER_BYTES // 4 * group.depth
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
    for word in (0, len(words) // 3, last * LAYER_BYTES // 4 - 1):
        words[word] ^= 1 << 11
        assert sums([3], [1], [last]) != before[1:]
        words[word] ^= 1 << 11


def test_the_sums_of_ranks_add_up_to_the_checksum_of_a_state_page() -> None:
    spec, page_tokens = choose_pages(model("fss"), 16, 16, torch.bfloat16, torch.bfloat16)
    whole = paged(spec, page_tokens)
    ours, generator, total = states_of(whole), torch.Generator().manual_seed(2), 0
    for number in range(2):
        part = states_of(paged(rank_spec(spec, 2), page_tokens))
        heads = slice(2 * number, 2 * number + 2)
        assert ours.states is not None
        assert part.states is not None
        ours.states[:, :, heads].normal_(generator=generator)
        part.states[:] = ours.states[:, :, heads]
        part.inputs[:] = ours.inputs[:, :, heads].normal_(generator=generator)
        own = page_parts(spec, Rank(number, 2))[-1]
        assert own == PagePart(4, 2, 2 * number, 0)
        total += page_checksums(part, parts=[own])([4], [1])[0]
    assert [total % (1 << 64)] == list(page_checksums(ours)([4], [1]))


@pytest.mark.parametrize(("pattern", "pages", "stages"), [("fsfs", (2, 2), 2), ("fsfsfs", (3, 3), 3)])
def test_a_stage_has_a_part_of_the_layers_of_every_page(pattern: str, pages: tuple[int, int], stages: int) -> None:
    spec = replace(model(pattern), page_layers=pages)
    assert [len(layers) for layers in stage_layers(spec, stages)] == [2] * stages
    own = own_spec(spec, Rank(0, 1, 1, stages))
    assert [(group.layers, group.depth) for group in kv_groups(own)] == [((0,), 1), ((1,), 1)]


@pytest.mark.parametrize(("pattern", "pages"), [("fsfs", (2, 1)), ("ffss", (2, 2))])
def test_stages_that_cannot_be_formed_are_refused(pattern: str, pages: tuple[int, int]) -> None:
    """A page of one state layer cannot be divided, and layers that are far apart are no stage."""
    with pytest.raises(InvalidArgument) as caught:
        stage_layers(replace(model(pattern), page_layers=pages), 2)
    assert caught.value.field == "pipeline_parallel_size"


@pytest.mark.parametrize(
    "state",
    [
        MAMBA,
        CONVOLUTION,
        GatedDeltaNet(4, 8, 8, 6, 4, 1e-5),
    ],
)
def test_ranks_divide_the_heads_of_a_state(state: StateLayer) -> None:
    (part,) = [
        layer.attention for layer in rank_spec(model("fs", state), 2).layers if isinstance(layer.attention, StateLayer)
    ]
    assert part.state == replace(state.state, heads=2)
    with pytest.raises(InvalidArgument, match="cannot be divided among 3 ranks"):
        rank_spec(model("fs", state), 3)


def test_a_state_does_not_count_per_token() -> None:
    spec = model("fwsss")
    assert kv_bytes_per_token(spec, 2) == 2 * 2 * 2 * 16 * 2
    assert state_bytes(spec, 2) == 3 * LAYER_BYTES
    summary = model_summary(choose_pages(spec, 16, 16, torch.bfloat16, torch.bfloat16)[0], 2)
    assert "256 bytes of KV per token, 1,728 bytes of states per request" in summary[1]
    assert "3 with states" in summary[2]


def test_facts_name_the_layout_of_the_states() -> None:
    facts = dict(paged(model("fss")).facts)
    assert facts["windows"] == "none, states"
    assert facts["layout"].endswith("4 heads,2 layers,1x4x4 state,12 channels,3 inputs,bfloat16")
