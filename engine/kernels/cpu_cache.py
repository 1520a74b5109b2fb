"""Where compiled CPU kernels are kept between starts.

Not beside the sources: an installation may be read-only. And in a folder named after all the sources, because numba
compares the one file a function stands in, and would go on using code compiled from an older version of the others.
"""

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numba
from numba import njit


def cached_entry(function: Any, *, nogil: bool = True) -> Any:
    """`function` compiled for calls from Python, by default without Python's lock, its machine code kept on disk."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(_folder())
    try:
        return njit(nogil=nogil, cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def _folder() -> Path:
    name = f"kernels/{_sources_hash()}"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / name
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
    return home if os.access(home, os.W_OK) else Path(tempfile.mkdtemp(prefix="tandem-kernels-"))


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("cpu*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
