"""Frames over a stream socket, batched into protobuf messages, each preceded by its length."""

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
    """Counts the frames and bytes of streams in both directions."""

    frames: int = 0
    bytes: int = 0

    def add(self, frames: int, data: int) -> None:
        """Count a message of `frames` frames and `data` bytes without the length prefix."""
        self.frames += frames
        self.bytes += _LENGTH_BYTES + data


class FrameStream(Generic[Out, In]):
    """One end of a stream, which batches the frames of one event loop turn into one message.

    `Out` and `In` are message types with repeated `frames`, each with the number of its `call`.

    The stream does not bound the unread data: the sender must bound it for each call, by `send_in_turn` or by a window
    of acknowledged frames. So a call that sends too much never ends the stream.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        outgoing: type[Out],
        incoming: type[In],
        tally: Tally | None = None,
    ) -> None:
        """`tally` counts the traffic."""
        self._reader, self._writer = reader, writer
        self._outgoing, self._incoming = outgoing, incoming
        self._tally = tally or Tally()
        self._batch: Any = outgoing()
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self.on_failed: Callable[[int], None] = lambda call: None
        """Called with the number of each call of which a frame could not be sent."""

    def send(self, call: int, **what: Any) -> None:
        """Send a frame with one field, given as a keyword of protobuf. Frames after the stream's end are lost."""
        if not self._batch.frames:
            self._loop.call_soon(self._flush)
        self._batch.frames.add(call=call, **what)

    async def send_in_turn(self, call: int, **what: Any) -> None:
        """Send a frame once the other end has read nearly everything; waiting callers are served in order.

        Does not wait if the other end is gone.
        """
        async with self._turn:
            with contextlib.suppress(OSError):
                await self._writer.drain()
            self.send(call, **what)
            self._flush()

    async def received(self) -> AsyncIterator[Any]:
        """Yield the other end's frames until it closes the stream, is gone, or sends an invalid message."""
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
            log.error("invalid message on a stream: %s", error)

    def close(self) -> None:
        """Send the remaining frames and close the stream."""
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
        """Send the valid frames of a batch that failed, and fail the calls of the others."""
        failed: set[int] = set()
        for frame in batch.frames:
            try:
                self._write(self._outgoing(frames=[frame]))
            except Exception:
                failed.add(frame.call)
        log.error("%d frames could not be sent, of calls %s", len(batch.frames), sorted(failed), exc_info=error)
        for call in sorted(failed):
            self.on_failed(call)
