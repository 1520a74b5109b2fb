"""The process of a follower, a rank other than the first: a child of the worker's process, which ends with it.

It is a command of its own and not one of multiprocessing, which would run Ray's main module again and import Ray.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection, Pipe

from tandem.net.heap import keep_imports

PR_SET_PDEATHSIG = 1
"""The option of prctl(2) for the signal that the kernel sends this process when its parent ends."""


class FollowerProcess:
    """The first rank's handle on a follower, and its ends of the connections to it. `RankGroup` owns it.

    The follower imports its modules, then waits for its `FollowerSettings` from `calls`.
    """

    def __init__(self) -> None:
        """Start the process. The kernel kills it when the thread that calls this ends."""
        self.steps, steps = socket.socketpair()
        """The steps that the follower has to run."""
        self.adapters, adapters = socket.socketpair()
        """The adapters that the follower has to load at runtime."""
        self.calls, calls = Pipe()
        """The follower's settings, then the calls of its transport or, if it has none, its reports."""
        ends = [end.fileno() for end in (steps, adapters, calls)]
        command = sys.executable, "-P", "-m", __name__, str(os.getpid()), *map(str, ends)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environment = {**os.environ, "PYTHONPATH": path}
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, pass_fds=ends)
        self.pid = self._process.pid
        for end in (steps, adapters, calls):
            end.close()

    @property
    def is_alive(self) -> bool:
        """True until the process has ended."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process at once."""
        self._process.kill()

    def end(self, timeout_s: float) -> None:
        """Close `steps` and `adapters`, and kill the process if it has not ended after `timeout_s` seconds."""
        self.steps.close()
        self.adapters.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(parent: int, steps: int, adapters: int, calls: int) -> None:
    """Run as a follower of the process `parent`, with these descriptors of its ends of the connections."""
    _end_with(parent)
    with keep_imports():
        from tandem.worker.follower import follow
    follow(socket.socket(fileno=steps), socket.socket(fileno=adapters), Connection(calls))


def _end_with(parent: int) -> None:
    """Let the kernel kill this process, even if it is stopped, when the thread of the first rank that started it ends.

    The thread ends with its process at the latest.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # It has ended before the call.
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
