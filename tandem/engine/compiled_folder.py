"""The folder that keeps compiled kernels between starts."""

import os
import tempfile
from pathlib import Path

from tandem.engine.user_cache import user_cache


def compiled_folder(name: str) -> Path:
    """Return a writable folder: kernels/`name` in the user's cache, or a temporary folder if the cache is read-only."""
    home = user_cache("kernels") / name
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary()
    return home if os.access(home, os.W_OK) else _temporary()


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
