"""The lines that processes write to their log files, as they come."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

from wire.logging.log_file import KEPT, earlier


class LogTail:
    """Follows the files of the newest run under a folder of runs, and those of every run that begins later."""

    def __init__(self, root: Path) -> None:
        """`root` need not be there yet."""
        self._root = root
        self._oldest = max((run.name for run in self._runs()), default="")
        self._told: dict[Path, dict[tuple[int, int], int]] = {}
        """Bytes that were read of each file that is kept, by device and inode: names change."""
        self._rest: dict[Path, bytes] = {}
        """A last line that has no end yet."""

    def lines(self) -> Iterator[str]:
        """What is new since the last call, whole lines only, file by file; without their ends."""
        for run in sorted(self._runs()):
            if run.name >= self._oldest:
                for file in sorted(run.glob("*.log")):
                    yield from self._lines_of(file)

    def _runs(self) -> list[Path]:
        """By name they are in the order in which they began."""
        try:
            return [each for each in self._root.iterdir() if each.is_dir()]
        except FileNotFoundError:
            return []

    def _lines_of(self, file: Path) -> Iterator[str]:
        """Of a file and those that it was before it was full: together they are one stream, the oldest first."""
        known, told = self._told.get(file, {}), {}
        fresh = [self._rest.get(file, b"")]
        with ExitStack() as stack:
            for part in reversed(_parts(file, stack)):
                status = os.fstat(part.fileno())
                name = status.st_dev, status.st_ino
                if name in told:
                    continue  # it was turned over between two of these openings
                before = known.get(name, 0)
                part.seek(before if before <= status.st_size else 0)
                fresh.append(part.read())
                told[name] = part.tell()
        self._told[file] = told
        *lines, self._rest[file] = b"".join(fresh).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _parts(file: Path, stack: ExitStack) -> list[BinaryIO]:
    """Those that are there, the youngest first: whatever is turned over meanwhile is found under its next name."""
    parts: list[BinaryIO] = []
    for path in (file, *(earlier(file, number) for number in range(1, KEPT + 1))):
        with suppress(FileNotFoundError):  # none so far, or an old run that was cleared away
            parts.append(stack.enter_context(path.open("rb")))
    return parts
