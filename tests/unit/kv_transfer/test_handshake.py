from dataclasses import replace

import pytest

from kv_transfer.handshake import PROTOCOL_VERSION, check_compatible, compatibility_hash, make_handshake
from kv_transfer.layout import KVLayout
from tandem.protocol.errors import FailedPrecondition
from tandem.protocol.kv_pages import STATE
from tandem.protocol.messages import Handshake, PeerDescription, PeerRef

LAYOUT = KVLayout(
    base_address=4096,
    pages=8,
    layers=2,
    kv_heads=3,
    page_tokens=16,
    dims=(64, 64),
    item_bytes=4,
    dtype="float32",
)


def handshake(worker: str, facts: dict[str, str] | None = None, layout: KVLayout = LAYOUT) -> Handshake:
    description = PeerDescription(
        PeerRef(worker, 1), b"", layout.base_address, layout.page_bytes, layout.pages, 0, "DRAM"
    )
    return make_handshake(description, tuple((facts or {"model": "a", "revision": "1"}).items()), layout)


def test_equal_sides_pass_whatever_their_pools_and_the_order_of_facts() -> None:
    theirs = handshake("decode-0", {"revision": "1", "model": "a"}, replace(LAYOUT, pages=99, base_address=1 << 20))
    check_compatible(handshake("prefill-0"), theirs)


@pytest.mark.parametrize("field", ["layers", "kv_heads", "page_tokens", "item_bytes"])
def test_each_layout_fact_is_compared(field: str) -> None:
    theirs = handshake("decode-0", layout=replace(LAYOUT, **{field: getattr(LAYOUT, field) + 1}))
    with pytest.raises(FailedPrecondition) as caught:
        check_compatible(handshake("prefill-0"), theirs)
    mine, other = getattr(LAYOUT, field), getattr(LAYOUT, field) + 1
    assert f"{field} is {mine} on prefill-0 but {other} on decode-0" in caught.value.message
    assert caught.value.message.count(" on decode-0") == 1


@pytest.mark.parametrize(("dims", "named"), [((65, 65), "65"), ((64, 32), "64 and 32")])
def test_the_dimensions_of_keys_and_values_are_compared(dims: tuple[int, ...], named: str) -> None:
    theirs = handshake("decode-0", layout=replace(LAYOUT, dims=dims))
    with pytest.raises(FailedPrecondition, match=f"head_dim is 64 on prefill-0 but {named} on decode-0"):
        check_compatible(handshake("prefill-0"), theirs)


def test_groups_and_windows_are_compared() -> None:
    theirs = handshake("decode-0", layout=replace(LAYOUT, windows=(None, 1024, 1024)))
    with pytest.raises(FailedPrecondition) as caught:
        check_compatible(handshake("prefill-0"), theirs)
    assert "kv_groups is 1 on prefill-0 but 3 on decode-0" in caught.value.message
    assert "windows is none on prefill-0 but none, 1024, 1024 on decode-0" in caught.value.message


def test_the_layout_of_states_is_compared() -> None:
    """A page of states has another order than one of keys and values, and its window has a name."""
    states = "pages,4 heads,2 layers,8x6 state,5 channels,3 inputs,bfloat16"
    theirs = handshake("decode-0", layout=replace(LAYOUT, windows=(None, STATE), other_groups=(states,)))
    with pytest.raises(FailedPrecondition) as caught:
        check_compatible(handshake("prefill-0"), theirs)
    assert "windows is none on prefill-0 but none, states on decode-0" in caught.value.message
    assert f"other_groups is none on prefill-0 but {states} on decode-0" in caught.value.message


def test_a_refusal_names_every_difference_and_what_is_absent() -> None:
    theirs = handshake("decode-0", {"model": "b", "quantisation": "fp8"})
    with pytest.raises(FailedPrecondition) as caught:
        check_compatible(handshake("prefill-0"), theirs)
    message = caught.value.message
    assert "model is a on prefill-0 but b on decode-0" in message
    assert "revision is 1 on prefill-0 but absent on decode-0" in message
    assert "quantisation is absent on prefill-0 but fp8 on decode-0" in message


def test_the_version_is_compared_before_anything_else() -> None:
    theirs = replace(handshake("decode-0", {"model": "b"}), protocol_version=PROTOCOL_VERSION + 1)
    with pytest.raises(FailedPrecondition, match=f"version {PROTOCOL_VERSION}, the other side {PROTOCOL_VERSION + 1}"):
        check_compatible(handshake("prefill-0"), theirs)


def test_a_foreign_hash_is_refused_even_when_the_facts_read_the_same() -> None:
    theirs = replace(handshake("decode-0"), compatibility_hash="0" * 64)
    with pytest.raises(FailedPrecondition, match="facts read the same"):
        check_compatible(handshake("prefill-0"), theirs)


def test_the_hash_separates_names_from_values() -> None:
    assert compatibility_hash([("ab", "c")]) != compatibility_hash([("a", "bc")])
    assert compatibility_hash([("a", "1"), ("b", "2")]) == compatibility_hash([("b", "2"), ("a", "1")])


def test_a_fact_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="layers"):
        handshake("prefill-0", {"layers": "2"})
