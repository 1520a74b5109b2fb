"""A library that fails to compile is replaced by what needs none."""

import logging
from collections.abc import Callable

from engine.memory import ran_out_of_memory

log = logging.getLogger(__name__)

_SHOWN = 300
"""Characters of an error."""


def failure_of(compile_kernels: Callable[[], object]) -> str:
    """What went wrong in a library's compiler, empty if nothing did: there is another way to compute the same, and a
    start must not fail over versions that do not go together. Running out of memory is raised.
    """
    try:
        compile_kernels()
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        log.debug("a library's kernels", exc_info=True)
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:_SHOWN]
    return ""
