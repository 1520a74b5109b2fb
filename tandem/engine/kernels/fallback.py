"""Fallbacks for a library that is missing, or that fails to be imported or to compile."""

import importlib
import logging
from collections.abc import Callable

import torch

from tandem.engine.memory import ran_out_of_memory

log = logging.getLogger(__name__)

_FLASH_CAPABILITY = (9, 0)
_SHOWN = 300
"""Maximum number of characters of an error that a message contains."""


def why_no_flash(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why flash-attn-4 cannot compute in this dtype on this device, or "" if it can."""
    if dtype not in {torch.bfloat16, torch.float16}:
        return "flash-attn-4 computes bfloat16 and float16 only"
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY:
        return "flash-attn-4 needs a GPU of compute capability 9.0"
    return ""


def why_not_imported(module: str, package: str) -> str:
    """Import `module` of `package`, which can take seconds; return the reason if the import fails, else "".

    A package that is installed but broken is logged as a warning, because it was meant to be used.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return f"the package {package} is not installed"
        return _broken(package, error)
    except Exception as error:  # incompatible versions fail with any error
        return _broken(package, error)
    return ""


def _broken(package: str, error: Exception) -> str:
    log.debug("the import of %s", package, exc_info=True)
    reason = f"{package} cannot be imported: {_message(error)}"
    log.warning("%s", reason)
    return reason


def failure_of(compile_kernels: Callable[[], object]) -> str:
    """Compile a library's kernels; return the compiler's error, or "" if there is none.

    Errors are not raised, because a fallback computes the same, and incompatible versions must not make a start fail.
    Only out-of-memory errors are raised.
    """
    try:
        compile_kernels()
    except Exception as error:
        if isinstance(error, RuntimeError) and ran_out_of_memory(error):
            raise
        log.debug("a library's kernels", exc_info=True)
        return _message(error)
    return ""


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:_SHOWN]
