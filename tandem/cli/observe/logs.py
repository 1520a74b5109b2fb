"""`tandem logs`: prints the logs of this host's processes."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from tandem.cli.plain_errors import plain_errors
from tandem.logging.log_file import KEPT, earlier


class LogTail:
    """Follows the log files of one run in the folder `root`, or of the newest and of every run that starts later."""

    def __init__(self, root: Path, run: str = "") -> None:
        """Start with the run of this name, or with the newest; `root` need not exist yet."""
        self._root, self._run = root, run
        self._oldest = max((run.name for run in self._runs()), default="")
        self._read: dict[Path, dict[tuple[int, int], int]] = {}
        """For each log file, the number of bytes already read of it and of its rotated files.

        The inner keys are device and inode, because rotation changes the names.
        """
        self._rest: dict[Path, bytes] = {}
        """The last line of each file, if it is incomplete."""

    def lines(self) -> Iterator[str]:
        """Yield the new complete lines since the last call, file by file, without line ends."""
        for run in sorted(self._runs()):
            if run.name >= self._oldest:
                for file in sorted(run.glob("*.log")):
                    yield from self._lines_of(file)

    def _runs(self) -> list[Path]:
        """Return the folders of the runs, in no order; their names sort by the start times of the runs."""
        try:
            return [entry for entry in self._root.iterdir() if entry.is_dir() and self._run in {"", entry.name}]
        except FileNotFoundError:
            return []

    def _lines_of(self, file: Path) -> Iterator[str]:
        """Yield the new lines of a log file and its rotated predecessors, oldest first, as one stream."""
        known, read = self._read.get(file, {}), {}
        fresh = [self._rest.get(file, b"")]
        with ExitStack() as stack:
            for part in reversed(_parts(file, stack)):
                status = os.fstat(part.fileno())
                name = status.st_dev, status.st_ino
                if name in read:
                    continue  # the file was rotated between two openings
                before = known.get(name, 0)
                part.seek(before if before <= status.st_size else 0)
                fresh.append(part.read())
                read[name] = part.tell()
        self._read[file] = read
        *lines, self._rest[file] = b"".join(fresh).split(b"\n")
        yield from (line.decode(errors="replace") for line in lines)


def _parts(file: Path, stack: ExitStack) -> list[BinaryIO]:
    """Open a log file and its rotated predecessors as far as they exist, newest first.

    A file that is rotated while the others are opened is found under its next name. `stack` closes the files.
    """
    parts: list[BinaryIO] = []
    for path in (file, *(earlier(file, number) for number in range(1, KEPT + 1))):
        with suppress(FileNotFoundError):  # not written yet, or an old run whose folder was deleted
            parts.append(stack.enter_context(path.open("rb")))
    return parts


LOOK_S = 0.5


def chosen_run(root: Path, address: str, run: str) -> str:
    """Return the name of the run with this name, or of the cluster with a router at `address`; "" = the newest run.

    If several clusters run and none is chosen, a note on stderr says so. Raises InvalidArgument for both an address and
    a name, and NotFound, with the possible values, for one that does not exist.
    """
    from tandem.cli.connection.state import running
    from tandem.protocol.errors import InvalidArgument, NotFound

    if address and run:
        raise InvalidArgument("--run", "names another run than --address; give one of them")
    clusters = [cluster for cluster in running() if cluster.logs]
    if address:
        for cluster in clusters:
            if address in {cluster.grpc, cluster.http.rpartition("/")[2]}:
                return Path(cluster.logs).name
        known = ", ".join(cluster.grpc for cluster in clusters) or "none"
        raise NotFound(f"no cluster of this user has its router at {address} on this host; running: {known}")
    if run and not (root / run).is_dir():
        names = sorted(folder.name for folder in root.glob("*/"))
        raise NotFound(f"no run is called {run}; runs with logs: {', '.join(names) or 'none'}")
    if not run and len(clusters) > 1:
        named = ", ".join(f"{Path(cluster.logs).name} at {cluster.grpc}" for cluster in clusters)
        print(
            f"logs of the newest of {len(clusters)} clusters; --run or --address choose one: {named}", file=sys.stderr
        )
    return run


@plain_errors
def logs(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines; of the newest run, also those of later ones.")
    ] = False,
    address: Annotated[
        str, typer.Option("--address", help="host:port of the router of a cluster that runs on this host.")
    ] = "",
    run: Annotated[
        str, typer.Option("--run", help="Name of a run, which is that of its folder; default: the newest run.")
    ] = "",
) -> None:
    """Print the logs of all processes of a cluster on this host: router, controller, workers."""
    import time

    from tandem.cli.observe.log_folder import log_root
    from tandem.protocol.errors import NotFound

    root = log_root()
    tail, any_lines = LogTail(root, chosen_run(root, address, run)), False
    while True:
        for line in tail.lines():
            any_lines = True
            print(line)
        if not follow:
            break
        print(end="", flush=True)
        time.sleep(LOOK_S)
    if not any_lines:
        raise NotFound(f"no process of a cluster has logged under {root}; `tandem up` starts one")
