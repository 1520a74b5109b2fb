"""The log folders of `tandem up`: one per run, kept after its end."""

import contextlib
import os
import shutil
import time
from pathlib import Path

from tandem.engine.user_cache import user_cache

KEPT_RUNS = 10


def log_root() -> Path:
    """Returns the folder of all runs' log folders, whose names sort by start time."""
    return user_cache("logs")


def new_log_folder() -> Path:
    """Creates a log folder for this run, readable by this user alone; the last few earlier ones are kept."""
    root = log_root()
    folder = root / f"{time.strftime('%Y-%m-%dT%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)
    for old in sorted(each for each in root.iterdir() if each.is_dir())[:-KEPT_RUNS]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
    return folder
