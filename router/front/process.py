"""A front process: both doors at the router's ports, every call carried to the router. `python -m router.front.process`
with a `FrontConfig` as JSON on its standard input; it ends when the router does.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import asdict, dataclass
from functools import partial

import grpc.aio

from router.doors import SERVICE, OwnDoors
from router.front.link import FrontStream, RouterLink
from router.front.relay import GrpcRelay, HttpRelay
from wire.frames import FrameStream
from wire.generated.tandem.v1 import front_pb2
from wire.heap import settle_heap
from wire.logs import LogFormat, begin_log

_SWITCH_INTERVAL_S = 0.5e-3
"""As in the router's process."""


@dataclass(frozen=True, slots=True)
class FrontConfig:
    """What a front process needs to know."""

    name: str
    """In its log."""
    socket: str
    """The router's, where fronts are attached."""
    host: str
    grpc_port: int
    http_port: int
    api_keys: tuple[str, ...]
    log_format: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FrontConfig:
        """What `to_json` made."""
        fields = json.loads(text)
        return cls(**{**fields, "api_keys": tuple(fields["api_keys"])})


async def serve(config: FrontConfig) -> None:
    """Until the router says so, or is gone."""
    reader, writer = await asyncio.open_unix_connection(config.socket)
    stream: FrontStream = FrameStream(reader, writer, front_pb2.FrontFrames, front_pb2.RouterFrames)
    leaving: asyncio.Future[float] = asyncio.get_running_loop().create_future()
    link = RouterLink(stream)

    def add_inference(server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((GrpcRelay(link, SERVICE),))

    doors = OwnDoors(
        config.host,
        (config.grpc_port, config.http_port),
        api_keys=config.api_keys,
        add_inference=add_inference,
        app=HttpRelay(link),
        shared=True,
    )
    await doors.open()
    link.opened()
    settle_heap()
    running = asyncio.create_task(link.run(doors.set_serving, partial(_set_once, leaving)))
    running.add_done_callback(lambda _: _set_once(leaving, 0.0))
    await doors.leave(await leaving)
    await doors.gone()
    stream.close()
    running.cancel()


def _set_once(future: asyncio.Future[float], seconds: float) -> None:
    if not future.done():
        future.set_result(seconds)


def main() -> None:
    config = FrontConfig.from_json(sys.stdin.read())
    # The router alone ends it: what a terminal sends to all its processes would cut answers off.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin_log(None, LogFormat(config.log_format), config.name)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    asyncio.run(serve(config))


if __name__ == "__main__":
    main()
