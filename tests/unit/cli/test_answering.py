"""Answers, errors and interrupts at the terminal, each on a line of its own."""

import socket
from collections.abc import Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from tandem.cli.connection.router import COMMANDS, Sampling, router_client
from tandem.cli.main import app
from tandem.cli.requests.answering import answer_chat
from tandem.client.connection import Connection
from tandem.net.rpc import ERROR_CODE
from tandem.protocol.errors import TandemError, Unauthenticated, Unavailable
from tandem.protocol.generated.tandem.v1 import inference_pb2


def broken(code: grpc.StatusCode, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "Stream removed (fd 7)")


class Talking:
    """A call that brings chunks, then raises `error`."""

    def __init__(self, chunks: list[inference_pb2.Chunk], error: BaseException) -> None:
        self._chunks, self._error = chunks, error

    def __iter__(self) -> Iterator[inference_pb2.GenerateResponse]:
        for chunk in self._chunks:
            yield inference_pb2.GenerateResponse(chunk=chunk)
        raise self._error

    def cancel(self) -> None:
        """Does nothing: the call has ended."""


def show(monkeypatch: pytest.MonkeyPatch, chunks: list[inference_pb2.Chunk], error: BaseException) -> None:
    with router_client("r:1") as client:
        monkeypatch.setattr(client._stub, "Chat", lambda *_, **__: Talking(chunks, error))
        with pytest.raises(type(error)):
            answer_chat(client, [], Sampling())


@pytest.mark.parametrize(
    ("text", "error", "shown"),
    [
        ("Well", Unavailable("gone"), "Well\n"),
        ("", Unavailable("gone"), ""),
        ("Well", KeyboardInterrupt(), "Well\n"),
        ("", KeyboardInterrupt(), "\n"),
    ],
)
def test_what_follows_an_answer_begins_on_a_new_line(
    text: str, error: BaseException, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show(monkeypatch, [inference_pb2.Chunk(text=text)] if text else [], error)
    assert capsys.readouterr().out == shown


def test_an_empty_line_divides_reasoning_from_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks: list[Any] = [{"reasoning": "Hm"}, {"reasoning": "."}, {"text": "Yes"}, {"text": "."}]
    show(monkeypatch, [inference_pb2.Chunk(**chunk) for chunk in chunks], Unavailable("gone"))
    assert capsys.readouterr().out == "Hm.\n\nYes.\n"


@pytest.mark.parametrize("command", [["generate", "x"], ["status"]])
def test_a_missing_router_is_reported_in_plain_words(command: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        result = CliRunner().invoke(app, [*command, "--address", where])
    assert result.exit_code == 4
    assert result.stderr == f"error: cannot reach the router at {where}; is `tandem up` running there?\n"


def test_only_the_transport_s_words_are_replaced() -> None:
    connection = Connection("r:1", "", None, COMMANDS)

    def words(error: grpc.aio.AioRpcError, *, begun: bool) -> str:
        typed: TandemError = connection.error(error, begun=begun)
        return typed.message

    assert words(broken(grpc.StatusCode.UNKNOWN), begun=True).startswith("lost the router at r:1 ")
    assert words(broken(grpc.StatusCode.UNAVAILABLE), begun=False).startswith("cannot reach the router at r:1; ")
    own = broken(grpc.StatusCode.UNAVAILABLE, (ERROR_CODE, Unavailable.code))
    assert words(own, begun=True) == "the router at r:1: Stream removed (fd 7)"


@pytest.mark.parametrize(("key", "what"), [("", "asks for an API key"), ("k", "does not accept this API key")])
def test_a_missing_key_is_reported_with_the_option_that_sets_it(key: str, what: str) -> None:
    refused = broken(grpc.StatusCode.UNAUTHENTICATED, (ERROR_CODE, Unauthenticated.code))
    typed = Connection("r:1", key, None, COMMANDS).error(refused)
    assert isinstance(typed, Unauthenticated)
    assert typed.message == f"the router at r:1 {what}; give --api-key or --api-key-file (TANDEM_API_KEY)"
