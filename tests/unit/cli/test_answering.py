"""Answers, errors and interrupts at the terminal, each on a line of its own."""

import asyncio
import socket
from collections.abc import Callable

import grpc
import grpc.aio
import pytest
from typer.testing import CliRunner

from tandem.cli.connection.client import Answer, RouterClient, Sampling
from tandem.cli.main import app
from tandem.cli.requests.answering import answer_chat
from tandem.net.rpc import ERROR_CODE
from tandem.protocol.errors import TandemError, Unauthenticated, Unavailable


def broken(code: grpc.StatusCode, *trailing: tuple[str, str]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), "Stream removed (fd 7)")


class Talker(RouterClient):
    """A client that streams `text`, then raises `error`."""

    def __init__(self, text: str, error: BaseException) -> None:
        super().__init__("r:1")
        self._says, self._error = text, error

    async def chat(self, messages: object, sampling: Sampling, on_text: Callable[[str], None]) -> Answer:
        if self._says:
            on_text(self._says)
        raise self._error


@pytest.mark.parametrize(
    ("text", "error", "shown"),
    [
        ("Well", Unavailable("gone"), "Well\n"),
        ("", Unavailable("gone"), ""),
        ("Well", asyncio.CancelledError(), "Well\n"),
        ("", asyncio.CancelledError(), "\n"),
    ],
)
async def test_what_follows_an_answer_begins_on_a_new_line(
    text: str, error: BaseException, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(type(error)):
        await answer_chat(Talker(text, error), [], Sampling())
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize("command", [["generate", "x"], ["status"]])
def test_a_router_that_is_not_there_is_told_in_plain_words(command: list[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        result = CliRunner().invoke(app, [*command, "--address", where])
    assert result.exit_code == 4
    assert result.stderr == f"error: cannot reach the router at {where}; is `tandem up` running there?\n"


def test_only_the_transport_s_words_are_replaced() -> None:
    client = RouterClient("r:1")

    def words(error: grpc.aio.AioRpcError, *, begun: bool) -> str:
        typed: TandemError = client._typed(error, begun=begun)
        return typed.message

    assert words(broken(grpc.StatusCode.UNKNOWN), begun=True).startswith("lost the router at r:1 ")
    assert words(broken(grpc.StatusCode.UNAVAILABLE), begun=False).startswith("cannot reach the router at r:1; ")
    own = broken(grpc.StatusCode.UNAVAILABLE, (ERROR_CODE, Unavailable.code))
    assert words(own, begun=True) == "the router at r:1: Stream removed (fd 7)"


@pytest.mark.parametrize(("key", "what"), [("", "asks for an API key"), ("k", "does not accept this API key")])
def test_a_router_that_wants_a_key_is_told_with_the_option_that_gives_one(key: str, what: str) -> None:
    refused = broken(grpc.StatusCode.UNAUTHENTICATED, (ERROR_CODE, Unauthenticated.code))
    typed = RouterClient("r:1", key)._typed(refused)
    assert isinstance(typed, Unauthenticated)
    assert typed.message == f"the router at r:1 {what}; give --api-key or --api-key-file (TANDEM_API_KEY)"
