"""Groups of layers that share pages, and the pages that requests hold of them."""

from dataclasses import replace

import pytest

from tandem.engine.config.attention import AttentionShape
from tandem.engine.config.kv import KvGroup, kv_elements, kv_groups
from tandem.engine.config.model import DenseFeedForward, GroupedQueryAttention, LayerSpec, ModelSpec
from tandem.engine.model_sizes import kv_bytes_per_token
from tandem.protocol.kv_pages import FREED, KvPages, held_pages


def model(*windows: int | None, max_context: int = 131_072, kv_heads: int = 2, head_dim: int = 16) -> ModelSpec:
    layers = tuple(
        LayerSpec(GroupedQueryAttention(AttentionShape(4, kv_heads, head_dim, 1.0, window), None), DenseFeedForward(32))
        for window in windows
    )
    return ModelSpec("Any", 100, 64, layers, 1e-5, max_context, True, (2,), None)


def gemma_3_27b() -> ModelSpec:
    windows = [None if number % 6 == 5 else 1024 for number in range(62)]
    return model(*windows, kv_heads=16, head_dim=128)


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_that_are_alike_are_one_group(window: int | None) -> None:
    (group,) = kv_groups(model(*[window] * 5))
    assert (group.layers, group.depth, group.window) == ((0, 1, 2, 3, 4), 5, window)
    assert isinstance(group, KvGroup)
    assert group.elements == 5 * 2 * 2 * 16


def test_groups_have_as_many_layers_and_those_without_a_window_come_first() -> None:
    groups = kv_groups(model(8, 8, None, 8, 8, None))
    assert [(group.layers, group.window) for group in groups] == [((2, 5), None), ((0, 1), 8), ((3, 4), 8)]


@pytest.mark.parametrize(
    ("full", "windowed", "depth", "groups"),
    [(8, 40, 8, 6), (10, 52, 10, 7), (5, 29, 5, 7), (12, 12, 12, 2), (25, 3, 25, 2), (1, 1, 1, 2)],
)
def test_pages_are_as_deep_as_little_waste_allows(full: int, windowed: int, depth: int, groups: int) -> None:
    spec = model(*[None] * full, *[1024] * windowed)
    layer_groups = kv_groups(spec)
    assert {group.depth for group in layer_groups} == {depth}
    assert len(layer_groups) == groups
    assert sorted(layer for group in layer_groups for layer in group.layers) == list(range(full + windowed))


def test_a_token_has_the_bytes_of_its_layers_without_padding() -> None:
    spec = model(*[None] * 10, *[1024] * 52)
    assert kv_elements(spec.layers) == 62 * 2 * 2 * 16
    assert kv_bytes_per_token(spec, 2) == 2 * kv_elements(spec.layers)


def shaped(*shapes: tuple[int | None, int, int]) -> ModelSpec:
    """Returns a model whose layers have these windows, numbers of KV heads and head dimensions."""
    spec = model(*[None] * len(shapes))
    attentions = (
        GroupedQueryAttention(AttentionShape(4, heads, dim, 1.0, window), None) for window, heads, dim in shapes
    )
    layers = zip(spec.layers, attentions, strict=True)
    return replace(spec, layers=tuple(replace(layer, attention=attention) for layer, attention in layers))


def test_layers_with_more_kv_have_fewer_layers_in_a_page() -> None:
    """Here six layers with a window and a wide one without: a page has two of the former, or one of the latter."""
    groups = kv_groups(shaped((None, 4, 64), *[(1024, 8, 16)] * 6))
    assert [(group.layers, group.depth, group.window) for group in groups] == [
        ((0,), 1, None), ((1, 2), 2, 1024), ((3, 4), 2, 1024), ((5, 6), 2, 1024)
    ]  # fmt: skip
    assert {group.elements for group in groups if isinstance(group, KvGroup)} == {512}


def test_a_page_holds_a_layer_of_each_shape() -> None:
    """No page size is a multiple of both; the end of some pages is not used."""
    groups = kv_groups(shaped((None, 2, 16), (None, 3, 16)))
    assert [(group.layers, group.depth, group.heads) for group in groups] == [((0,), 1, 2), ((1,), 1, 3)]


def test_gemma_3_27b_finishes_its_longest_context_in_14_gb() -> None:
    groups = kv_groups(gemma_3_27b())
    assert isinstance(groups[0], KvGroup)
    page_bytes = groups[0].elements * 128 * 2
    pages = KvPages(128, tuple(group.window for group in groups), step_tokens=2048)
    assert pages.held(131_072) * page_bytes < 14e9 < 62 * 131_072 * 2 * 16 * 128 * 2
    assert pages.tokens_in(int(14e9) // page_bytes - 1) >= 131_072
    # Sent are all pages of the layers without a window, and of the others the last window: at most 2 % more for
    # pages that are not wholly seen, and for padding.
    formula = (10 * 131_072 + 52 * 1024) * 2 * 16 * 128 * 2
    assert formula <= pages.sent_pages(131_072) * page_bytes <= 1.02 * formula
    # Only decoding, it holds the windows alone: the note's 11.3 GB, and 0.3 GB for the last pages and padding.
    assert pages.held(131_072, decoding=True) * page_bytes == pytest.approx(11.3e9, rel=0.04)


def test_the_forecast_is_the_sum_over_groups() -> None:
    pages = KvPages(16, (None, 40, 100), step_tokens=32)
    assert pages.held(30) == 3 * 2
    assert pages.held(1000) == 63 + 8 + 12
    assert pages.held(1000, decoding=True) == 63 + 4 + 8


@pytest.mark.parametrize("windows", [(None,), (None, 40), (None, None, 100, 40)])
@pytest.mark.parametrize("decoding", [False, True])
def test_a_number_of_pages_holds_the_most_positions_whose_forecast_fits(
    windows: tuple[int | None, ...], decoding: bool
) -> None:
    pages = KvPages(16, windows, step_tokens=32)
    for count in range(80):
        tokens = pages.tokens_in(count, decoding=decoding)
        assert pages.held(tokens, decoding=decoding) <= count < pages.held(tokens + 1, decoding=decoding)


def test_windows_alone_hold_any_context_once_they_fit() -> None:
    pages = KvPages(16, (40,), step_tokens=32)
    assert [pages.tokens_in(count) for count in (0, 7)] == [0, 112]
    assert pages.tokens_in(8) > 1 << 40


def test_the_pages_that_a_position_sees() -> None:
    pages = KvPages(4, (None, 6))
    # Position 13 sees 8 .. 13 in the second group, so its pages 0 and 1 are dead.
    assert [pages.first(group, 13) for group in (0, 1)] == [0, 2]
    assert pages.seen(13, 1, 4) == [2, 4, 5, 6, 7]
    table = [10, FREED, 11, 21, 12, 22, 13, 23]
    assert pages.dead(table, 9) == []
    assert pages.dead(table, 13) == [3]
    assert pages.dead(table, 17) == [3, 5]
    assert pages.dead(table, 99) == [3, 5, 7]
    assert held_pages(table) == [10, 11, 21, 12, 22, 13, 23]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (None, 6, 30, None), (6,), (6, 30)])
def test_both_ends_of_a_hand_over_know_what_is_sent(windows: tuple[int | None, ...]) -> None:
    pages = KvPages(4, windows)
    for tokens in range(1, 40):
        for held in range(pages.numbers(tokens)):
            sent = pages.sent(tokens, held)
            skipped = pages.skipped(tokens, len(sent))
            assert skipped == sent[0] // pages.groups >= held
            assert pages.sent(tokens, skipped) == sent
            assert skipped == held or not pages.full_groups
        assert pages.sent_pages(tokens) == len(pages.sent(tokens, 0))
    assert pages.skipped(9, 99) is pages.skipped(9, 0) is None
