"""Where the processes of a `tandem up` write their logs: one folder a run, kept after its end."""

import contextlib
import os
import shutil
import time
from pathlib import Path

from engine.user_cache import user_cache

KEPT_RUNS = 10


def log_root() -> Path:
    """Where the folders of all runs lie; their names are in the order of their beginnings."""
    return user_cache("logs")


def new_log_folder() -> Path:
    """A fresh folder for this run, readable by this user alone; of earlier runs the last few stay."""
    root = log_root()
    folder = root / f"{time.strftime('%Y-%m-%dT%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)
    for old in sorted(each for each in root.iterdir() if each.is_dir())[:-KEPT_RUNS]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
    return folder
