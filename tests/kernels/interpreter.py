"""Triton's interpreter for these tests: fixes for NumPy 2.4 and for rounding, and without redundant work."""

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch_lang, _patch_lang_tensor, _get_np_dtype, _convert_float = (
    getattr(interpreter, name) for name in ("_patch_lang", "_patch_lang_tensor", "_get_np_dtype", "_convert_float")
)
_init_block, _broadcast = tl.core.block_type.__init__, TritonSemantic.broadcast_impl_value
_operands, _unwrap = TritonSemantic.binary_op_type_checking_impl, tl.core._unwrap_if_constexpr
is_builtin, constexpr, tensor = tl.core.is_builtin, tl.core.constexpr, tl.core.tensor
SCALAR = tl.core.tuple([]), constexpr(1)
"""The shape and the number of elements of a scalar."""
NUMBERS = {bool, int, float}
ROUNDED = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixes loop bounds with NumPy 2.4, and patches Triton's language once per launch, not once per call in it.

    A kernel makes some thousand blocks of a few types: each type is derived and checked once, not once per block.
    """
    for mended in (patch_lang_tensor, patch_lang, patch_builtin, get_np_dtype, convert_float, validate_np_data_size):
        monkeypatch.setattr(interpreter, f"_{mended.__name__}", mended)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", init_handle)
    monkeypatch.setattr(tl.core.block_type, "__init__", init_block)
    monkeypatch.setattr(tl.core.tensor, "__init__", init_tensor)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrap)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)
    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", operands)
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
    return [module for module in fn.__globals__.values() if module is tl or module is tl.core]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtins_of(package):
        member = getattr(package, name)
        if is_builtin(member):
            scope.set_attr(package, name, interpreted(member, builder))


@cache
def interpreted(member: Any, builder: Any) -> Any:
    """Returns a builtin that is called as within a kernel, where no builder is named."""
    semantic, function = TritonSemantic(builder), getattr(member, "__wrapped__", member)

    def call(*given: Any, _semantic: Any = None, **named: Any) -> Any:
        return function(*given, _semantic=semantic, **named)

    return call


@cache
def builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def init_block(self: Any, element_ty: Any, shape: Any) -> None:
    """Makes a block type that shares its attributes with all of its element type and shape."""
    sizes = tuple([size.value if isinstance(size, constexpr) else size for size in shape])
    known = vars(element_ty).setdefault("blocks", {})
    if sizes not in known:
        _init_block(self, element_ty, shape)
        self.sizes = tl.core.tuple([constexpr(size) for size in sizes]), constexpr(self.numel)
        known[sizes] = vars(self)
    self.__dict__ = known[sizes]


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Makes a tensor with the shape that its type keeps."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = type.sizes if type.is_block() else SCALAR


def init_handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """Makes the array of a tensor's elements, which must fit into its dtype."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if not validate_np_data_size(data, dtype):
        raise ValueError(f"elements of {data.itemsize} bytes are too large for {dtype}")


def validate_np_data_size(data: Any, dtype: Any) -> bool:
    """Returns whether an array's elements are as small as those of the dtype; those of pointers have 8 bytes."""
    return data.itemsize == 1 or data.itemsize <= getattr(dtype, "itemsize", 8)


def unwrap(given: Any) -> Any:
    return given if type(given) is tensor else _unwrap(given)


def operands(  # noqa: PLR0917
    semantic: Any,
    lhs: Any,
    rhs: Any,
    allow_lhs_ptr: bool = False,
    allow_rhs_ptr: bool = False,
    arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:
    """Prepares two operands; those of one dtype need no conversion, and numbers are converted once per dtype.

    Pointers, and division, which converts more types, are prepared as in the interpreter.
    """
    left, right = type(lhs) is tensor, type(rhs) is tensor
    if arithmetic_check and not div_or_mod:
        if left and right:
            if lhs.dtype is rhs.dtype and not lhs.dtype.is_ptr():
                return broadcast(semantic, lhs, rhs)
        elif left and type(rhs) in NUMBERS and (number := constant(semantic, rhs, lhs.dtype)) is not None:
            return broadcast(semantic, lhs, number)
        elif right and type(lhs) in NUMBERS and (number := constant(semantic, lhs, rhs.dtype)) is not None:
            return broadcast(semantic, number, rhs)
    return _operands(semantic, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


def constant(semantic: Any, number: float, dtype: Any) -> Any:
    """Returns a number as the operand beside a tensor of the dtype; None if the tensor would be converted."""
    known = vars(dtype).setdefault("numbers", {})
    key = number, type(number)
    if key not in known:
        known[key] = None
        if not dtype.is_ptr():
            zero = semantic.tensor(semantic.builder.get_null_value(dtype), dtype)
            converted, operand = _operands(semantic, zero, number)
            known[key] = operand if converted.dtype is dtype else None
    return known[key]


def broadcast(semantic: Any, lhs: Any, rhs: Any) -> Any:
    """Broadcasts two tensors unless they have one shape; a scalar gets the known type of the other tensor's blocks."""
    left, right = lhs.type.is_block(), rhs.type.is_block()
    if left and right:
        return (lhs, rhs) if lhs.type.shape.values == rhs.type.shape.values else _broadcast(semantic, lhs, rhs)
    if left:
        return lhs, splat(semantic, rhs, lhs.type)
    return (splat(semantic, lhs, rhs.type), rhs) if right else (lhs, rhs)


def splat(semantic: Any, scalar: Any, like: Any) -> Any:
    """Returns a block of the shape of the type `like`, filled with a scalar."""
    block = like.with_element_ty(scalar.type)
    return semantic.tensor(semantic.builder.create_splat(block, scalar.handle), block)


def convert_float(numbers: Any, given: Any, wanted: Any, rounding: Any) -> Any:
    """Rounds to bfloat16 and float8 as a GPU does: the interpreter truncates, and small float8 become large ones."""
    rounded = ROUNDED.get(wanted)
    if given != tl.float32 or rounded is None:
        return _convert_float(numbers, given, wanted, rounding)
    floats = torch.from_numpy(np.ascontiguousarray(numbers).view(np.float32))
    return floats.to(rounded).view(torch.uint8 if rounded.itemsize == 1 else torch.uint16).numpy()


def get_np_dtype(dtype: Any) -> Any:
    """Returns the NumPy dtype of a tensor's elements."""
    return np.dtype(np.uint64) if dtype.scalar.is_ptr() else np_dtype_of(dtype.scalar)


@cache
def np_dtype_of(scalar: Any) -> Any:
    return _get_np_dtype(scalar)
