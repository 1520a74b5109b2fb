"""Any gRPC message, metadata and end of a call: a status that is never the server's fault, and no crash."""

from __future__ import annotations

import socket
from typing import Any

import grpc
from hypothesis import given
from hypothesis import strategies as st

from tandem.protocol.generated.tandem.v1 import inference_pb2 as pb
from tests.unit.router.fuzz.conftest import AUTHORIZATION, FuzzedRouter, cases
from tests.unit.router.fuzz.json_bodies import TEXTS

_SERVERS_FAULT = {
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DATA_LOSS,
}
_SERVICE = "/tandem.v1.Inference/"
_STREAMED = ("Generate", "Chat")
_UNARY = tuple(
    method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods if not method.server_streaming
)
_INT32, _UINT32 = st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**32 - 1)
_FLOATS = st.floats(width=32) | st.sampled_from([0.0, 0.5, 1.0])
_TEXT = TEXTS.map(lambda text: text.encode(errors="ignore").decode())
_OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), _FLOATS),
    "repetition_penalty": _FLOATS,
    **dict.fromkeys(("top_k", "logprobs", "n", "priority"), st.integers(0, 4) | _INT32),
    "max_tokens": st.integers(1, 4) | _INT32,
    "seed": st.integers(0, 2**64 - 1),
    "stop": st.lists(_TEXT, max_size=3),
    "stop_token_ids": st.lists(_UINT32, max_size=3),
    "ignore_eos": st.booleans(),
    "add_special_tokens": st.booleans(),
    "truncate_prompt_tokens": st.integers(-1, 4) | _INT32,
    "prompt_logprobs": st.integers(0, 2) | _INT32,
    "return_token_ids": st.booleans(),
    "slo_class": _TEXT,
    "cache_salt": _TEXT,
}


@st.composite
def options(draw: st.DrawFn) -> pb.GenerationOptions:
    """Returns at most four options with arbitrary values."""
    names = draw(st.lists(st.sampled_from(sorted(_OPTIONS)), max_size=4, unique=True))
    return pb.GenerationOptions(**{"max_tokens": 2, **{name: draw(_OPTIONS[name]) for name in names}})


_NAMES = {"request_id": st.just("") | _TEXT, "model": st.sampled_from(["", "fake"]) | _TEXT, "options": options()}
_FORMS = {**_NAMES, "echo": st.booleans(), "best_of": st.none() | st.integers(0, 3) | _INT32}
_IDS = st.builds(pb.TokenIds, ids=st.lists(st.integers(0, 400) | _UINT32, max_size=300))
_PROMPTS = st.lists(st.builds(pb.Prompt, text=_TEXT) | st.builds(pb.Prompt, token_ids=_IDS), max_size=3)
GENERATE = st.one_of(
    st.builds(pb.GenerateRequest, text=_TEXT, **_FORMS),
    st.builds(pb.GenerateRequest, token_ids=_IDS, **_FORMS),
    st.builds(pb.GenerateRequest, prompts=st.builds(pb.Prompts, prompts=_PROMPTS), **_FORMS),
)
_ROLES = st.sampled_from(["user", "assistant", "system", "tool", ""]) | _TEXT
_JSON = st.sampled_from(["", "{}", '{"type": "object"}', '{"type": 3}', "[", "null"]) | _TEXT
_CALLS = st.lists(st.builds(pb.ToolCall, id=_TEXT, name=_TEXT, arguments=_JSON), max_size=2)
_TOOLS = st.lists(st.builds(pb.Tool, name=st.just("f") | _TEXT, description=_TEXT, parameters=_JSON), max_size=3)
CHAT = st.builds(
    pb.ChatRequest,
    messages=st.lists(
        st.builds(pb.ChatMessage, role=_ROLES, content=_TEXT, tool_calls=_CALLS, tool_call_id=_TEXT), max_size=4
    ),
    tools=st.just([]) | _TOOLS,
    tool_choice=st.sampled_from(["", "auto", "none", "required"]) | _TEXT,
    continue_final_message=st.booleans(),
    tool_function=st.sampled_from(["", "f"]) | _TEXT,
    **_NAMES,
)
OTHERS = st.one_of(
    st.builds(pb.AbortRequest, request_id=_TEXT),
    st.builds(pb.TokenizeRequest, generate=GENERATE, return_token_strs=st.booleans()),
    st.builds(pb.TokenizeRequest, chat=CHAT),
    st.builds(pb.DetokenizeRequest, token_ids=st.lists(st.integers(0, 400) | _UINT32, max_size=30), model=_TEXT),
)


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, bytes]:
    """Returns a method with a message of its own type, of another type, or of none."""
    method = draw(st.sampled_from(_STREAMED + _UNARY))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return method, draw(st.binary(max_size=60))
    message = draw(st.one_of(GENERATE, CHAT, OTHERS)).SerializeToString()
    if kind == 1:
        at = draw(st.integers(0, len(message)))
        message = message[:at] + draw(st.binary(max_size=4)) + message[at + draw(st.integers(0, 4)) :]
    return method, message


def status_of(router: FuzzedRouter, method: str, message: bytes, metadata: Any, *, leave: bool) -> grpc.StatusCode:
    """Returns the status of a call; with `leave`, its client disconnects at the first answer."""
    options = {"metadata": metadata, "timeout": 60}
    try:
        if method in _UNARY:
            router.channel.unary_unary(_SERVICE + method)(message, **options)
            return grpc.StatusCode.OK
        call = router.channel.unary_stream(_SERVICE + method)(message, **options)
        for _ in call:
            if leave:
                call.cancel()
                break
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@cases(0.15)
@given(call=calls(), leave=st.booleans())
def test_any_message(router: FuzzedRouter, call: tuple[str, bytes], leave: bool) -> None:
    metadata = (("authorization", AUTHORIZATION),)
    assert status_of(router, *call, metadata, leave=leave) not in _SERVERS_FAULT
    router.assert_next_one_works(every=10)


_METADATA = st.lists(
    st.tuples(
        st.sampled_from(["authorization", "traceparent", "x-request-id", "user-agent-x"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=30) | st.just("a" * 2000),
    )
    | st.tuples(st.sampled_from(["odd-bin", "authorization-bin"]), st.binary(max_size=30)),
    max_size=4,
)


@cases(0.05)
@given(metadata=_METADATA, keys=st.integers(0, 2), message=GENERATE | CHAT)
def test_any_metadata(router: FuzzedRouter, metadata: list[Any], keys: int, message: Any) -> None:
    method = "Chat" if isinstance(message, pb.ChatRequest) else "Generate"
    sent = (*metadata, *[("authorization", AUTHORIZATION)] * keys)
    assert status_of(router, method, message.SerializeToString(), sent, leave=False) not in _SERVERS_FAULT
    router.assert_next_one_works(every=10)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@cases(0.05)
@given(begins=st.sampled_from([b"", _PREFACE, _PREFACE + bytes.fromhex("000000040000000000")]), rest=st.binary())
def test_any_bytes(router: FuzzedRouter, begins: bytes, rest: bytes) -> None:
    host, port = router.grpc_address.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(begins + rest)
    router.assert_next_one_works(every=10)
