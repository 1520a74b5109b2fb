"""Triton's interpreter for these tests: fixes for NumPy 2.4 and float8, and without redundant work."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_lang, _patch_lang_tensor, _get_np_dtype, _convert_float = (
    getattr(interpreter, name) for name in ("_patch_lang", "_patch_lang_tensor", "_get_np_dtype", "_convert_float")
)
is_builtin = tl.core.is_builtin


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes loop bounds with NumPy 2.4, and patches Triton's language once per launch, not once per call in it."""
    for mended in (patch_lang_tensor, patch_lang, patch_builtin, get_np_dtype, convert_float):
        monkeypatch.setattr(interpreter, f"_{mended.__name__}", mended)
    options = interpreter.interpreter_builder.options
    assert not options.debug, "else overflows would be reported"
    # It checks for overflows, a third of its time, and without `debug` drops the result.
    monkeypatch.setattr(interpreter.interpreter_builder, "options", replace(options, sanitize_overflow=False))


def patch_lang_tensor(tensor: Any, scope: Any) -> None:
    """Makes scalars, kept as arrays of one number, usable as a loop's bounds, which NumPy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def patch_lang(fn: Any) -> Any:
    """Skips the patch of a called function whose caller has patched the same languages."""
    patched = (tl.tensor.__add__, *(language.load for language in languages_of(fn)))
    return _patch_lang(fn) if any(map(is_builtin, patched)) else interpreter._LangPatchScope()


@cache
def languages_of(fn: Any) -> list[Any]:
    return [each for each in fn.__globals__.values() if each is tl or each is tl.core]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(package):
        member = getattr(package, name)
        if is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def convert_float(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Rounds to float8 as a GPU does: the interpreter truncates, and small numbers become large ones."""
    if (given, wanted) == (tl.float32, tl.float8e4nv):
        floats = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
        return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert_float(numbers, given, wanted, rounding)


def get_np_dtype(dtype: Any) -> Any:
    """Returns the NumPy dtype of a tensor's elements."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_dtype_of(dtype.scalar)


@cache
def np_dtype_of(scalar: Any) -> Any:
    return _get_np_dtype(scalar)
