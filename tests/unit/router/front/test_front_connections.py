"""Connections are counted by their port, and counting leaves no descriptor open."""

import os
import socket

import pytest

from router.front.connections import count_connections


def test_connections_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        port, elsewhere = server.getsockname()[1], other.getsockname()[1]
        assert count_connections((port, elsewhere)) == 0
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
        accepted = [server.accept()[0] for _ in clients]
        with socket.create_connection(("127.0.0.1", elsewhere)), other.accept()[0]:
            before = sorted(os.listdir("/dev/fd"))
            assert (count_connections((port,)), count_connections((port, elsewhere))) == (3, 4)
            assert sorted(os.listdir("/dev/fd")) == before
        accepted.pop().close()
        assert count_connections((port, elsewhere)) == 2
        for each in (*clients, *accepted):
            each.close()


def test_where_nobody_can_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.front.connections._DESCRIPTORS", "/nowhere")
    assert count_connections((1,)) == 0
