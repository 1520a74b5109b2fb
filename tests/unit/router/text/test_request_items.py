"""The items of a request are counted before it is parsed, whatever it contains."""

import json
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from router.text.request_items import check_json_items, check_message_items, check_template_kwargs
from tandem.protocol.errors import InvalidArgument
from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb

CHAT = pb.ChatRequest.DESCRIPTOR
LEAVES = st.none() | st.integers() | st.text(st.sampled_from('",[{\\é a'), max_size=8)
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=4), inner))


def items(value: Any) -> int:
    """Returns the number of strings, lists, objects and commas between entries."""
    if isinstance(value, dict):
        return 1 + max(0, len(value) - 1) + sum(1 + items(item) for item in value.values())
    if isinstance(value, list):
        return 1 + max(0, len(value) - 1) + sum(map(items, value))
    return int(isinstance(value, str))


@given(VALUES, st.booleans())
def test_json_is_counted_as_it_is_read(value: Any, ascii_only: bool) -> None:
    body = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = items(value)
    check_json_items(body, count)
    if count:
        with pytest.raises(InvalidArgument):
            check_json_items(body, count - 1)


@pytest.mark.parametrize("body", [b"[" * 100, b'"' * 100, b"," * 100, b"{" * 100, b'["",' * 30])
def test_what_is_no_json_is_counted_too(body: bytes) -> None:
    with pytest.raises(InvalidArgument):
        check_json_items(body, 40)


def test_fewer_items_may_be_strings_lists_and_objects() -> None:
    check_json_items(b'{"a": [1, 2, 3, 4], "b": []}', 9, 5)
    with pytest.raises(InvalidArgument, match="more than 4 strings, lists and objects"):
        check_json_items(b'{"a": [1, 2, 3, 4], "b": []}', 9, 4)


def test_a_body_in_another_encoding_is_refused() -> None:
    """In another encoding, the counter would find its quotes at other positions than the parser does."""
    with pytest.raises(InvalidArgument, match="UTF-8"):
        check_json_items('{"a": 1}'.encode("utf-16-le"), 100)


def test_a_number_that_takes_long_to_read_is_refused() -> None:
    check_json_items(b'{"a": %s}' % (b"7" * 400), 100)
    check_json_items(b'{"a": "%s"}' % (b"7" * 4000), 100)
    for number in (b"7" * 401, b"0." + b"1" * 401):
        with pytest.raises(InvalidArgument, match="digits"):
            check_json_items(b'{"a": [1, %s]}' % number, 100)


@pytest.mark.parametrize(
    "values", [[1] * 100, ["a" * 50] * 3, [0.1] * 100, ["a" * 101]], ids=["integers", "strings", "floats", "one string"]
)
def test_template_kwargs_are_measured_no_further_than_their_limit(values: list[Any]) -> None:
    with pytest.raises(InvalidArgument, match="100 bytes"):
        check_template_kwargs({"x": [*values, object()]}, 100)  # the object would be a TypeError


def test_template_kwargs_that_are_no_json_are_refused() -> None:
    check_template_kwargs({"x": [1, "a", None, {"y": 0.5}]}, 100)
    deep: Any = []
    deep.append(deep)
    with pytest.raises(InvalidArgument, match="cannot be given"):
        check_template_kwargs({"x": deep}, 100)


def test_fields_of_messages_in_messages_count() -> None:
    options = pb.GenerationOptions(stop=["a"] * 10, max_tokens=4)
    request = pb.ChatRequest(model="m", messages=[pb.ChatMessage(role="user", content="a")] * 5, options=options)
    data = request.SerializeToString()
    count = 1 + 5 * 3 + 1 + 10 + 1
    check_message_items(CHAT, data, count)
    with pytest.raises(InvalidArgument):
        check_message_items(CHAT, data, count - 1)


@given(st.binary(max_size=64))
def test_bytes_that_no_reader_takes_are_refused_or_counted(data: bytes) -> None:
    """No other error occurs; accepted bytes are parsed or rejected as a whole."""
    try:
        check_message_items(CHAT, data, 1000)
        pb.ChatRequest.FromString(data)
    except (InvalidArgument, DecodeError):
        pass
