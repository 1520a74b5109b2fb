"""The folder of compiled CPU kernels, kept between starts.

It is not next to the sources: an installation may be read-only. It is named after all the sources, because numba
compares only the file of a function, and would go on using code compiled from an older version of the others. It does
not depend on where the sources are installed: their content decides.
"""

import hashlib
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import UserProvidedCacheLocator

from tandem.engine.compiled_folder import compiled_folder


def cached_entry(function: Any, *, nogil: bool = True) -> Any:
    """Return `function` compiled for calls from Python, by default without the GIL, its machine code kept on disk."""
    config = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = str(compiled_folder(_sources_hash()))
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{_OneFolder.__name__}"
    try:
        return njit(nogil=nogil, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


class _OneFolder(UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    """Keeps compiled code in the configured folder itself, without a sub-folder for the path of its source file."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return ""


def _sources_hash() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
