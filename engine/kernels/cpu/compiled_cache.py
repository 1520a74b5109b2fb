"""The folder of compiled CPU kernels, kept between starts.

It is not next to the sources: an installation may be read-only. It is named after all the sources, because numba
compares only the file of a function, and would go on using code compiled from an older version of the others.
"""

import hashlib
from pathlib import Path
from typing import Any

import numba
from numba import njit

from engine.compiled_folder import compiled_folder


def cached_entry(function: Any, *, nogil: bool = True) -> Any:
    """Returns `function` compiled for calls from Python, by default without the GIL, its machine code kept on disk."""
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
