"""The log folders of `tandem up`: one per run, kept after the run has ended."""

import contextlib
import os
import shutil
import time
from pathlib import Path

from tandem.engine.user_cache import user_cache

KEPT_RUNS = 10


def log_root() -> Path:
    """Return the folder with the log folders of all runs; their names sort by the start times of the runs."""
    return user_cache("logs")


def new_log_folder() -> Path:
    """Create a log folder for this run, readable by this user only, and delete all but the last few earlier ones."""
    root = log_root()
    folder = root / f"{time.strftime('%Y-%m-%dT%H%M%S')}-{os.getpid()}"
    folder.mkdir(parents=True, mode=0o700)
    for old in sorted(entry for entry in root.iterdir() if entry.is_dir())[:-KEPT_RUNS]:
        with contextlib.suppress(OSError):
            shutil.rmtree(old)
    return folder
