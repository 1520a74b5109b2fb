"""A library that is missing, or fails to be imported or to compile, is replaced by what needs none."""

import importlib
import logging
from collections.abc import Callable

from engine.memory import ran_out_of_memory

log = logging.getLogger(__name__)

_SHOWN = 300
"""Characters of an error."""


def why_not_imported(module: str, package: str) -> str:
    """Empty once `module` of `package` is imported, which can take seconds; a broken one is warned of, as it was meant
    to be used.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return f"the package {package} is not installed"
        return _broken(package, error)
    except Exception as error:  # versions that do not go together fail in any way
        return _broken(package, error)
    return ""


def _broken(package: str, error: Exception) -> str:
    log.debug("the import of %s", package, exc_info=True)
    reason = f"{package} cannot be imported: {_in_words(error)}"
    log.warning("%s", reason)
    return reason


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
        return _in_words(error)
    return ""


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_SHOWN]
