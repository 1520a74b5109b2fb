"""A worker that has lost much of its pool reports so once, with the reason, and does not flicker."""

import logging

import pytest

from kv_transfer.lost_pages import LostPages


def test_a_loss_above_the_share_is_logged_once_and_cleared_only_well_below_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lost = LostPages("decode-0", 0.5)
    with caplog.at_level(logging.WARNING):
        lost.update(50, 100, lambda: "are away")
        assert (lost.not_ready, caplog.messages) == ("", [])
        for pages in (51, 80, 45, 41):
            lost.update(pages, 100, lambda: "are away")
            assert lost.not_ready == "too many of its 100 KV pages are away"
        lost.update(40, 100, lambda: "are away")
        assert lost.not_ready == ""
    assert caplog.messages == [
        "decode-0 is not ready (51 KV pages lost): too many of its 100 KV pages are away",
        "decode-0 is ready again: 40 KV pages are still lost",
    ]


def test_a_share_of_nothing_allows_nothing() -> None:
    lost = LostPages("decode-0", 0.0)
    lost.update(0, 100, lambda: "are away")
    assert not lost.not_ready
    lost.update(1, 100, lambda: "are away")
    assert lost.not_ready
