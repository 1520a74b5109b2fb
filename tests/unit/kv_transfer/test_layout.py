"""Head ranges: which bytes of a page a peer with another tensor-parallel size reads or writes."""

from dataclasses import replace

import numpy as np
import pytest

from kv_transfer.layout import KVLayout, PageSlice, head_slices, rank_heads, shared_heads
from wire.errors import InvalidArgument

HEADS = 8
WHOLE = KVLayout(
    base_address=0, pages=1, layers=3, kv_heads=HEADS, page_tokens=4, head_dim=2, item_bytes=2, dtype="bfloat16"
)


def layout_of(ranks: int, rank: int) -> KVLayout:
    held = rank_heads(HEADS, ranks, rank)
    return replace(WHOLE, kv_heads=len(held), first_head=held.start)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_slices_of_all_ranks_cover_each_byte_of_a_page_once(ranks: int) -> None:
    covered = np.zeros(WHOLE.page_bytes, dtype=int)
    for rank in range(ranks):
        for part in head_slices(WHOLE, rank_heads(HEADS, ranks, rank)):
            covered[part.offset : part.offset + part.bytes] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(2, 4), (2, 1), (1, 8), (4, 4), (8, 2)])
def test_pages_regrouped_by_slices_are_the_pages_of_the_other_size(prefill_ranks: int, decode_ranks: int) -> None:
    """Every head has a value of its own: each decode rank must end with exactly its heads, in its own layout."""
    shape = (WHOLE.layers, 2, HEADS, WHOLE.page_tokens, WHOLE.head_dim)
    model = np.arange(np.prod(shape), dtype="<u2").reshape(shape)
    for rank in range(decode_ranks):
        theirs = layout_of(decode_ranks, rank)
        wanted = theirs.heads
        page = np.zeros(theirs.page_bytes, dtype=np.uint8)
        written = 0
        for writer in range(prefill_ranks):
            mine = layout_of(prefill_ranks, writer)
            source = np.ascontiguousarray(model[:, :, mine.heads.start : mine.heads.stop]).reshape(-1).view(np.uint8)
            both = shared_heads(mine.heads, wanted)
            pairs = zip(head_slices(mine, both), head_slices(theirs, both), strict=True)
            for here, there in pairs:
                assert here.bytes == there.bytes
                page[there.offset : there.offset + there.bytes] = source[here.offset : here.offset + here.bytes]
                written += there.bytes
        assert written == theirs.page_bytes
        expected = np.ascontiguousarray(model[:, :, wanted.start : wanted.stop])
        assert (page == expected.reshape(-1).view(np.uint8)).all()


def test_a_slice_is_named_in_bytes() -> None:
    head = 4 * 2 * 2
    slices = head_slices(replace(WHOLE, layers=1), range(2, 4))
    assert slices == (PageSlice(2 * head, 2 * head), PageSlice((HEADS + 2) * head, 2 * head))


def test_ranks_without_a_common_head_exchange_nothing() -> None:
    first, second = layout_of(2, 0), layout_of(2, 1)
    assert head_slices(first, shared_heads(first.heads, second.heads)) == ()


@pytest.mark.parametrize("ranks", [0, 3, 16])
def test_heads_that_do_not_divide_are_refused_in_words(ranks: int) -> None:
    with pytest.raises(InvalidArgument, match=f"8 KV heads cannot be divided equally among {ranks} ranks"):
        rank_heads(HEADS, ranks, 0)


def test_a_rank_and_heads_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="rank 2 is not one of 2"):
        rank_heads(HEADS, 2, 2)
    with pytest.raises(InvalidArgument, match="KV heads 3 to 5 are asked for and this worker holds KV heads 4 to 7"):
        head_slices(layout_of(2, 1), range(3, 6))
