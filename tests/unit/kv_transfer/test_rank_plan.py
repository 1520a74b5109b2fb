"""The plan of a hand-over between two divisions of a model: each byte arrives once, from a rank that holds it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kv_transfer.rank_plan import RankedPages, plan_handoff, why_not
from tests.soak import soak

LAYERS = 4
STAGES = {1: ((0, 1, 2, 3),), 2: ((0, 1), (2, 3)), 4: ((0,), (1,), (2,), (3,))}
KINDS = {
    "plain": {"token_bytes": (4, 4), "scale_bytes": 0},
    "8-bit": {"token_bytes": (3, 3), "scale_bytes": 2},
    "latents": {"token_bytes": (5,), "scale_bytes": 0},
    "short values": {"token_bytes": (5, 3), "scale_bytes": 2},
}
TENSOR_RANKS = (1, 2, 3, 4, 8)


def divided(tensor_ranks: int, stages: int, heads: int, kind: str, page_tokens: int = 4) -> RankedPages:
    return RankedPages(tensor_ranks, heads, STAGES[stages], page_tokens, **KINDS[kind])


def is_possible(tensor_ranks: int, heads: int) -> bool:
    return heads % tensor_ranks == 0 or tensor_ranks % heads == 0


def contents(pages: RankedPages, rank: int, page: int) -> np.ndarray:
    """Returns the page of a rank, in which each byte of the model's KV has a number of its own."""
    planes = []
    for head, layer, part in product(pages.heads(rank), pages.layers(rank), range(len(pages.token_bytes))):
        plane = (head * LAYERS + layer) * len(pages.token_bytes) + part
        tokens = range(page * pages.page_tokens, (page + 1) * pages.page_tokens)
        for region, size in enumerate((pages.token_bytes[part], pages.scale_bytes)):
            planes += [((plane * 64 + token) * 2 + region) * 8 + byte for token in tokens for byte in range(size)]
    return np.array(planes, dtype=np.int64)


def assert_every_byte_arrives(source: RankedPages, target: RankedPages) -> None:
    larger = max(source.page_tokens, target.page_tokens)
    sent = {
        (rank, page): contents(source, rank, page)
        for rank, page in product(range(source.ranks), range(larger // source.page_tokens))
    }
    wanted = {
        (rank, page): contents(target, rank, page)
        for rank, page in product(range(target.ranks), range(larger // target.page_tokens))
    }
    received = {key: np.full_like(page, -1) for key, page in wanted.items()}
    for piece in plan_handoff(source, target):
        place = received[piece.target_rank, piece.target_page][piece.target_start : piece.target_end]
        assert len(place) == piece.bytes
        assert (place == -1).all(), "a byte is written twice"
        place[:] = sent[piece.source_rank, piece.source_page][piece.source_start : piece.source_end]
    for key, page in wanted.items():
        assert len(page) == target.page_bytes(key[0])
        assert (received[key] == page).all()


CASES = [
    (kind, heads, mine, theirs)
    for kind, heads in [*product(("plain", "8-bit"), (1, 2, 3, 4, 8, 16)), ("latents", 1), ("short values", 4)]
    for mine, theirs in product(product(TENSOR_RANKS, STAGES), repeat=2)
    if is_possible(mine[0], heads) and is_possible(theirs[0], heads)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_of_every_rank_is_written_once_from_a_rank_that_holds_it(kind: str) -> None:
    cases = [case for case in CASES if case[0] == kind]
    assert len(cases) > 100
    for _, heads, mine, theirs in cases:
        assert_every_byte_arrives(divided(*mine, heads, kind), divided(*theirs, heads, kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("mine", "theirs"), [(4, 8), (8, 4), pytest.param(4, 16, marks=soak), (16, 4)])
def test_pages_of_different_sizes_are_cut_into_blocks_of_tokens(kind: str, mine: int, theirs: int) -> None:
    heads = 1 if kind == "latents" else 4
    for source, target in product(((1, 1), (2, 2), (4, 1)), ((1, 1), (2, 1), (8, 1))):
        assert_every_byte_arrives(divided(*source, heads, kind, mine), divided(*target, heads, kind, theirs))


@pytest.mark.parametrize(("source", "target"), list(product((1, 2, 4, 8), repeat=2)))
def test_equal_stages_need_one_range_for_each_pair_of_ranks(source: int, target: int) -> None:
    plan = plan_handoff(divided(source, 1, 8, "8-bit"), divided(target, 1, 8, "8-bit"))
    assert len(plan) == len({(piece.source_rank, piece.target_rank) for piece in plan}) == max(source, target)


def test_ranks_that_hold_the_same_heads_share_the_load() -> None:
    """Two KV heads on eight ranks: four hold each head."""
    plan = plan_handoff(divided(8, 1, 2, "plain"), divided(8, 1, 2, "plain"))
    assert sorted(piece.source_rank for piece in plan) == list(range(8))
    plan = plan_handoff(divided(4, 1, 1, "latents"), divided(4, 1, 1, "latents"))
    assert sorted(piece.source_rank for piece in plan) == list(range(4))


def test_what_differs_is_named() -> None:
    source = divided(2, 1, 4, "plain")
    assert why_not(source, divided(4, 2, 4, "plain")) is None
    assert why_not(source, divided(2, 1, 8, "plain")) == "the prefill worker has 4 KV heads and the decode worker 8"
    assert "bytes per token and head" in (why_not(source, divided(2, 1, 4, "8-bit")) or "")
    reason = why_not(source, divided(2, 1, 4, "plain", 6))
    assert reason == "pages of 4 and of 6 tokens do not divide each other"
    with pytest.raises(ValueError, match="do not divide"):
        plan_handoff(source, divided(2, 1, 4, "plain", 6))
