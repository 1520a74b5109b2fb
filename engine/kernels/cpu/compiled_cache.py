"""Where compiled CPU kernels are kept between starts.

Not beside the sources: an installation may be read-only. And in a folder named after all the sources, because numba
compares the one file a function stands in, and would go on using code compiled from an older version of the others.
"""

import hashlib
from pathlib import Path
from typing import Any

import numba
from numba import njit

from engine.compiled_folder import compiled_folder


def cached_entry(function: Any, *, nogil: bool = True) -> Any:
    """`function` compiled for calls from Python, by default without Python's lock, its machine code kept on disk."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(compiled_folder(_sources_hash()))
    try:
        return njit(nogil=nogil, cache=True, error_model="numpy")(function)
    finally:
        numba.config.CACHE_DIR = before


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
