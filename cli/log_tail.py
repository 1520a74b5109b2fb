"""The lines that processes write to their log files, as they come."""

from collections.abc import Iterator
from pathlib import Path


class LogTail:
    """Follows the files of the newest run under a folder of runs, and those of every run that begins later."""

    def __init__(self, root: Path) -> None:
        """`root` need not be there yet."""
        self._root = root
        self._oldest = max((run.name for run in self._runs()), default="")
        self._read: dict[Path, int] = {}
        """Bytes of each file that were told."""

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
        told = self._read.get(file, 0)
        try:
            with file.open("rb") as content:
                content.seek(told)
                fresh = content.read()
        except FileNotFoundError:  # an old run that was cleared away
            return
        whole = fresh.rfind(b"\n") + 1
        self._read[file] = told + whole
        yield from fresh[:whole].decode(errors="replace").split("\n")[:-1]
