"""Protobuf messages of many small frames over a stream socket, each message behind its length."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

log = logging.getLogger(__name__)

_LENGTH_BYTES = 4

Out = TypeVar("Out", bound=Message)
In = TypeVar("In", bound=Message)


@dataclass(slots=True)
class Tally:
    """What went over streams, in both directions."""

    frames: int = 0
    bytes: int = 0

    def add(self, frames: int, data: int) -> None:
        """A message of so many frames, and of so many bytes behind its length."""
        self.frames += frames
        self.bytes += _LENGTH_BYTES + data


class FrameStream(Generic[Out, In]):
    """One end. What is sent within a turn of the event loop goes as one message. `Out` and `In` are messages with
    repeated `frames`, each of which has the number of its `call`.

    Nothing here bounds what the other end has not read: whoever sends bounds that for each call, by `send_in_turn` or
    by a window of what the other end says it has read. So no call ends the stream, however much it sends.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outgoing: type[Out],
        incoming: type[In],
        tally: Tally | None = None,
    ) -> None:
        """`tally` counts what goes over it."""
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming = outgoing, incoming
        self._tally = tally or Tally()
        self._batch: Any = outgoing()
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self.on_failed: Callable[[int], None] = lambda call: None
        """Is told the number of each call one of whose frames could not be sent."""

    def send(self, call: int, **what: Any) -> None:
        """A frame with one of its fields, as protobuf takes them. What is sent behind the stream's end is lost."""
        if not self._batch.frames:
            self._loop.call_soon(self._flush)
        self._batch.frames.add(call=call, **what)

    async def send_in_turn(self, call: int, **what: Any) -> None:
        """`send` as soon as the other end has read nearly all that was sent, one after the other of those that wait for
        that. Nobody waits for an end that is gone.
        """
        async with self._turn:
            with contextlib.suppress(OSError):
                await self._writer.drain()
            self.send(call, **what)
            self._flush()

    async def received(self) -> AsyncIterator[Any]:
        """The other end's frames, until it closes the stream, is gone, or sends something else."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                batch: Any = self._incoming.FromString(await self._reader.readexactly(length))
                self._tally.add(len(batch.frames), length)
                for frame in batch.frames:
                    yield frame
        except (asyncio.IncompleteReadError, OSError):
            return
        except DecodeError as error:
            log.error("a message that is none: %s", error)

    def close(self) -> None:
        """Send what is left and end."""
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        batch, self._batch = self._batch, self._outgoing()
        if not batch.frames or self._writer.is_closing():
            return
        try:
            self._write(batch)
        except Exception as error:
            self._write_one_by_one(batch, error)

    def _write(self, batch: Any) -> None:
        data: bytes = batch.SerializeToString()
        length = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._tally.add(len(batch.frames), len(data))
        self._writer.write(length + data)

    def _write_one_by_one(self, batch: Any, error: Exception) -> None:
        """Send what can be sent of a batch that cannot, and fail the calls of the rest."""
        failed: set[int] = set()
        for frame in batch.frames:
            try:
                self._write(self._outgoing(frames=[frame]))
            except Exception:
                failed.add(frame.call)
        log.error("%d frames could not be sent, of calls %s", len(batch.frames), sorted(failed), exc_info=error)
        for call in sorted(failed):
            self.on_failed(call)
