"""A process that cleans up after a private Ray whose owner was killed.

Most of Ray's processes get SIGKILL when the thread that started them ends, but Ray's two agents run for minutes more.
"""

import os
import subprocess
import sys
from pathlib import Path

from tandem.cluster.ray_processes.temp_folder import clean_up


class Watchdog:
    """The owner's handle of the process that cleans up Ray's folder once the owner ends or calls `stop`."""

    def __init__(self, folder: Path) -> None:
        """Start the watchdog process in a new session, so that it gets no signals of the terminal."""
        command = sys.executable, "-P", "-m", "tandem.cluster.ray_processes.watchdog"
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(folder))
        self._process.stdin.flush()

    def stop(self) -> None:
        """Have the process clean up now; return when it has ended."""
        self._process.communicate()


def main() -> None:
    """Read a folder's path from standard input until the writer closes it or ends, and clean up the folder."""
    clean_up(Path(os.fsdecode(sys.stdin.buffer.read())))


if __name__ == "__main__":
    main()
