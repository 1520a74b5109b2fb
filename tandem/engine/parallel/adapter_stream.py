"""Writes adapters that are loaded at runtime into the slots of all ranks of a group.

The first rank names an adapter's folder to the other ranks, and each reads its own part of the matrices. The connection
is not that of the steps, so that no step waits while an adapter is read. The first rank lists an adapter only after all
ranks have replied, so no step uses it before.
"""

import json
import socket
from collections.abc import Sequence
from pathlib import Path

from tandem.engine.adapters.folder import AdapterFolder
from tandem.engine.adapters.slots import AdapterSlots
from tandem.protocol.errors import ModelError, TandemError, Unavailable


class AdapterSender:
    """The first rank's connections to all followers. Adapters are written one after another, on any thread."""

    def __init__(self, followers: Sequence[socket.socket]) -> None:
        self._followers = followers
        self._replies = [follower.makefile() for follower in followers]

    def write(self, slot: int, folder: AdapterFolder) -> None:
        """Have each follower write its part of an adapter into a slot, and return when all have done it.

        Raises ModelError if a follower cannot read the adapter or reads other files than the first rank, Unavailable
        if a follower has ended.
        """
        try:
            for follower in self._followers:
                follower.sendall(_line((slot, str(folder.path), folder.identity)))
            lines = [replies.readline() for replies in self._replies]
            if not all(lines):
                raise ConnectionError("a follower has closed its connection")
        except OSError as error:
            raise Unavailable("a rank of this worker has ended, and the worker ends with it") from error
        for rank, line in enumerate(lines, 1):
            if problem := json.loads(line):
                raise ModelError(f"rank {rank}: {problem}")

    def close(self) -> None:
        """Close the connections."""
        for replies, follower in zip(self._replies, self._followers, strict=True):
            replies.close()
            follower.close()


def write_adapters(leader: socket.socket, slots: AdapterSlots) -> None:
    """Write the adapters that the first rank names into this rank's slots, until it closes the connection."""
    with leader, leader.makefile() as requests:
        for request in requests:
            slot, path, identity = json.loads(request)
            leader.sendall(_line(_write(slots, slot, Path(path), identity)))


def _write(slots: AdapterSlots, slot: int, path: Path, identity: str) -> str:
    """Write an adapter into a slot; return "", or the reason why it cannot be written."""
    try:
        folder = slots.read(path)
        if folder.identity != identity:
            return f"{path} changed while it was read; load it once it is written."
        slots.write(slot, folder)
    except (TandemError, RuntimeError) as error:
        return str(error)
    return ""


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"
