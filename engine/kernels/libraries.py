"""Libraries that compile their kernels when an engine starts: where they keep them, and what becomes of a failure."""

import logging
import os
from collections.abc import Callable

from engine.compiled_folder import compiled_folder
from engine.memory import ran_out_of_memory

log = logging.getLogger(__name__)

_SHOWN = 300
"""Characters of an error."""


def keep_compiled() -> None:
    """Let flash-attn-4 and quack find what they compiled for an earlier start, where the environment does not say
    otherwise. Before either is imported.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(compiled_folder("flash-attn-4")))
    os.environ.setdefault("QUACK_CACHE_DIR", str(compiled_folder("quack")))


def failure_of(compile_kernels: Callable[[], object]) -> str:
    """What went wrong in a library's compiler, empty if nothing did: there is another way to compute the same, and a
    start must not hang on versions that do not go together. Running out of memory is raised.
    """
    try:
        compile_kernels()
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        log.debug("a library's kernels", exc_info=True)
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:_SHOWN]
    return ""
