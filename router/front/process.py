"""A front process: listens on the router's ports and relays every call to the router.

Started as `python -m router.front.process` with the router's socket as its standard input, which carries a
`FrontConfig` as one line of JSON, then frames. It ends when the router does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import grpc.aio

from router.api.listeners import SERVICE, InProcessListeners
from router.front.connections import count_connections
from router.front.link import FrontStream, RouterLink
from router.front.relay import GrpcRelay, HttpRelay
from tandem.logging.logs import LogConfig, LogFormat, begin_log
from tandem.net.frames import FrameStream
from tandem.net.heap import settle_heap
from tandem.net.security.api_keys import ApiKeys, KeySource
from tandem.net.turns import take_short_turns
from tandem.protocol.errors import TandemError
from tandem.protocol.generated.tandem.v1 import front_pb2
from tandem.settings.listeners import ListenerLimits
from tandem.settings.tls import TlsFiles

log = logging.getLogger(__name__)

STREAM_LIMIT_BYTES = 1 << 20
"""The limit of the first line, and about the read-ahead of messages, in bytes."""


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """The settings of a front process."""

    name: str
    """The process name in its log."""
    host: str
    grpc_port: int
    http_port: int
    keys: KeySource
    """The accepted keys, of which gRPC calls must present one; the router checks them again."""
    log: LogConfig
    limits: ListenerLimits
    """The limits of each of its listeners."""
    tls: TlsFiles | None = None

    def to_json(self) -> str:
        """Return the settings as one line of JSON."""
        return json.dumps(asdict(self), default=_plain)

    @classmethod
    def from_json(cls, text: str) -> FrontConfig:
        """Parse the settings that `to_json` wrote."""
        fields = json.loads(text)
        keys, limits, log = fields["keys"], ListenerLimits(**fields["limits"]), fields["log"]
        key_file = None if keys["file"] is None else Path(keys["file"])
        keys = KeySource(tuple(keys["given"]), key_file, frozenset(keys["readers"]))
        file = None if log["file"] is None else Path(log["file"])
        log = LogConfig(file, LogFormat(log["format"]), log["max_bytes"])
        tls = fields["tls"] and TlsFiles(**{name: path and Path(path) for name, path in fields["tls"].items()})
        return cls(**{**fields, "keys": keys, "limits": limits, "log": log, "tls": tls})


async def serve(router: socket.socket) -> None:
    """Serve until the router ends this process or is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=router, limit=STREAM_LIMIT_BYTES)
    line = await reader.readline()
    if not line:
        return  # the router is gone
    config = FrontConfig.from_json(line.decode())
    begin_log(config.log, config.name)
    stream: FrontStream = FrameStream(reader, writer, front_pb2.FrontFrames, front_pb2.RouterFrames)
    leaving: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    link = RouterLink(stream)

    def add_inference(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((GrpcRelay(link, SERVICE),))

    listeners = InProcessListeners(
        config.host,
        (config.grpc_port, config.http_port),
        check=ApiKeys(config.keys).check,
        rejected=link.rejected,
        add_inference=add_inference,
        app=HttpRelay(link),
        limits=config.limits,
        tls=config.tls,
        shared=True,
    )

    async def tell() -> None:
        link.alive(await asyncio.to_thread(count_connections, (config.grpc_port, config.http_port)))

    telling: set[asyncio.Task[None]] = set()

    def on_ask() -> None:
        task = asyncio.create_task(tell())
        telling.add(task)
        task.add_done_callback(telling.discard)

    running = asyncio.create_task(link.run(listeners.set_serving, partial(_set_once, leaving), on_ask))
    running.add_done_callback(lambda _: _set_once(leaving, 0.0))
    try:
        await listeners.open()
    except TandemError as error:
        log.error("%s", error)
        sys.exit(1)
    link.opened()
    settle_heap()
    await listeners.leave(await leaving)
    await listeners.gone()
    stream.close()
    running.cancel()


def _plain(value: object) -> object:
    return list(value) if isinstance(value, frozenset) else str(value)


def _set_once(future: asyncio.Future[float], seconds: float) -> None:
    if not future.done():
        future.set_result(seconds)


def main() -> None:
    """Run a front process on the socket at standard input."""
    take_short_turns()
    asyncio.run(serve(socket.socket(fileno=sys.stdin.fileno())))


if __name__ == "__main__":
    main()
