"""Whatever bytes a connection sends, and however it ends, the router never answers 5xx and keeps serving others."""

from __future__ import annotations

import json
import re
import socket
import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.router.fuzz.conftest import ANSWERED, AUTHORIZATION, FuzzedRouter, cases

_BODY = json.dumps(ANSWERED).encode()
_STREAMED = json.dumps({**ANSWERED, "max_tokens": 40, "stream": True}).encode()
_KEY = f"Authorization: {AUTHORIZATION}\r\n".encode()
_SERVERS_FAULT = re.compile(rb"HTTP/1\.[01] 5\d\d")
_REPLY_S = 30.0


def whole(body: bytes, authorization: str = AUTHORIZATION) -> bytes:
    """Returns a request as most clients send it."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: {authorization}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


_PIECES = st.one_of(
    st.sampled_from(
        [
            whole(_BODY),
            whole(_STREAMED),
            b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\n",
            b"POST /v1/completions HTTP/1.0\r\n",
            b"GET / HTTP/9.9\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"Host: x\r\n",
            b"Host: x\r\nHost: y\r\n",
            _KEY,
            _KEY + _KEY,
            b"Content-Length: 5\r\n",
            b"Content-Length: 5\r\nContent-Length: 6\r\n",
            b"Content-Length: -1\r\n",
            b"Content-Length: 99999999999999999999\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"Transfer-Encoding: gzip, chunked\r\n",
            b"Expect: 100-continue\r\n",
            b"Connection: upgrade\r\nUpgrade: websocket\r\n",
            b"X: " + b"a" * 70_000 + b"\r\n",
            b"X: a\r\n" * 500,
            b": no name\r\n",
            b" folded\r\n",
            b"X\0: \0\r\n",
            b"\r\n",
            b"\n\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"FFFFFFFFFFFFFFFF\r\n",
            b"0;" + b"e" * 1000 + b"\r\n\r\n",
            _BODY,
            _BODY[:20],
        ]
    ),
    st.binary(max_size=30),
)
_ENDS = st.sampled_from(["reset", "close", "half"])


def replies(listener: tuple[str, int], pieces: Sequence[bytes], end: str) -> bytes:
    """Sends `pieces` and ends the connection; returns the reply if `end` is `half`, b"" otherwise.

    `end`: `reset` the connection, close it, or close its sending half and read until the router closes it.
    """
    with socket.create_connection(listener, timeout=_REPLY_S) as connection:
        try:
            for piece in pieces:
                connection.sendall(piece)
            if end == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end != "half":
                return b""
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except OSError:  # the router closed the connection first
            return b""


@cases(0.15)
@given(pieces=st.lists(_PIECES, min_size=1, max_size=6), end=_ENDS)
def test_any_bytes_and_any_end(router: FuzzedRouter, pieces: list[bytes], end: str) -> None:
    assert not _SERVERS_FAULT.search(replies(router.http_listener, pieces, end))
    router.assert_next_one_works(every=10)
