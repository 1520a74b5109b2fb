"""Keeps compiled CPU kernels between starts.

Their folder is not next to the sources, because an installation may be read-only.
"""

from typing import Any

import numba
from numba import njit
from numba.core.caching import UserProvidedCacheLocator

from tandem.engine.kernels.cpu.compile_ahead import kernels_folder


def cached_entry(function: Any, *, nogil: bool = True) -> Any:
    """Return `function` compiled for calls from Python, with its machine code kept on disk.

    By default it runs without the GIL.
    """
    config = numba.config
    before = config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES
    config.CACHE_DIR = str(kernels_folder())
    config.CACHE_LOCATOR_CLASSES = f"{__name__}.{_OneFolder.__name__}"
    try:
        return njit(nogil=nogil, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR, config.CACHE_LOCATOR_CLASSES = before


class _OneFolder(UserProvidedCacheLocator):  # type: ignore[misc]  # numba has no types
    """Makes numba keep compiled code directly in the configured folder, without a sub-folder for the source's path."""

    @classmethod
    def get_suitable_cache_subpath(cls, py_file: str) -> str:
        return ""
