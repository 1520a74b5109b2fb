"""How a process of the cluster logs: the same lines everywhere, into one file for each role in the cluster."""

import logging
import os
import sys
from pathlib import Path

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def begin_log(file: Path | None) -> None:
    """Log from INFO on, to `file` if there is one, whose folder is made where it is missing, else to stderr.

    The whole process's output goes there, what native code prints as it dies too; an earlier incarnation's stays.
    """
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
    logging.basicConfig(level=logging.INFO, format=FORMAT)
