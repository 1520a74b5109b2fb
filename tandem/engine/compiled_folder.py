"""The folder of compiled kernels, kept between starts."""

import os
import tempfile
from pathlib import Path

from tandem.engine.user_cache import user_cache


def compiled_folder(name: str) -> Path:
    """Returns a writable folder: kernels/`name` in the user's cache, or a new temporary one where that is read-only."""
    home = user_cache("kernels") / name
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return _temporary()
    return home if os.access(home, os.W_OK) else _temporary()


def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
