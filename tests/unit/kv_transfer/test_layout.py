"""The addresses of a pool's pages."""

import pytest

from kv_transfer.layout import KVLayout

LAYOUT = KVLayout(
    base_address=4096, pages=3, layers=3, kv_heads=8, page_tokens=4, dims=(2, 2), item_bytes=2, dtype="bfloat16"
)


def test_pages_are_contiguous() -> None:
    assert LAYOUT.page_bytes == 3 * 2 * 8 * 4 * 2 * 2
    assert LAYOUT.total_bytes == 3 * LAYOUT.page_bytes
    assert [LAYOUT.page_address(page) for page in range(3)] == [4096, 4096 + 768, 4096 + 1536]


@pytest.mark.parametrize("page", [-1, 3])
def test_a_page_outside_the_pool_has_no_address(page: int) -> None:
    with pytest.raises(IndexError, match=f"page {page} of a pool of 3"):
        LAYOUT.page_address(page)
