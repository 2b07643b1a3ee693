"""Constructs modules whose parameters are far larger than memory.

A model that is only traced needs the shapes of its large parameters, but no memory for them.  All large parameters of one type are
views of one array that is never written to, so that the operating system never assigns a page of memory to it.  OneFlow has no
such tensors.  `untouched_parameters` therefore replaces the functions that create, initialize and convert tensors while its context
is active.

The values of these parameters are undefined.  Tensors of zeros, ones and other constants are created as usual up to
:data:`MAX_CONSTANT_ELEMENTS` elements, since masks are made of them, and the extraction reads the values of masks.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from autoddl.pipelines.runtime.load import load_oneflow

__all__ = ["untouched_parameters"]

#: Elements of the smallest tensor without memory; smaller ones are created as usual.
MIN_UNTOUCHED_ELEMENTS = 2**16
#: Elements of the largest tensor of zeros, ones or another constant that is created as usual.
MAX_CONSTANT_ELEMENTS = 2**26
#: Methods of ``flow.Tensor`` that convert the type.
_CONVERSIONS = ("bfloat16", "double", "float", "half", "to")
#: Methods of ``flow.Tensor`` whose result has the shape of the tensor.
_ARITHMETIC = (
    "__add__",
    "__mul__",
    "__radd__",
    "__rmul__",
    "__sub__",
    "__truediv__",
    "add",
    "clone",
    "div",
    "mul",
    "sub",
)
#: Methods of ``flow.Tensor`` that end in an underscore and write no elements.
_NOT_WRITING = ("contiguous_", "requires_grad_")


class _UntouchedArrays:
    """Creates tensors without memory: views of arrays that are never written to, one array for each type."""

    def __init__(self, flow: Any):
        self._flow = flow
        self._arrays: dict[np.dtype, np.ndarray] = {}
        self._types = {flow.float64: np.float64, flow.float16: np.float16, flow.bfloat16: np.float16}
        self._shapes: set[tuple[int, ...]] = set()
        self.active = True

    def tensor(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """Return a tensor without memory of its own.  float16 stands for bfloat16, which numpy does not have."""
        array_type = np.dtype(self._types.get(dtype, np.float32))
        num_elements = math.prod(shape)
        if array_type not in self._arrays or self._arrays[array_type].size < num_elements:
            self._arrays[array_type] = np.empty(num_elements, array_type)
        self._shapes.add(shape)
        return self._flow.from_numpy(self._arrays[array_type][:num_elements].reshape(shape))

    def may_have_created(self, value: Any) -> bool:
        """Return whether a value has the shape of a tensor that was created here; any such tensor is taken for one."""
        return self.active and isinstance(value, self._flow.Tensor) and tuple(value.shape) in self._shapes

    def can_create(self, dtype: Any) -> bool:
        """Return whether tensors of a type are created here: floating-point ones only, since values of integers may be read."""
        return self.active and (dtype is None or dtype in self._types or dtype == self._flow.float32)


@contextlib.contextmanager
def untouched_parameters() -> Iterator[None]:
    """Give no memory to large tensors that are created while the context is active."""
    flow: Any = load_oneflow()
    arrays = _UntouchedArrays(flow)
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            replaced.append((owner, name, original))
            setattr(owner, name, functools.wraps(original)(wrap(original)))

    # Functions that create tensors.
    replace(type(flow.Tensor), "__call__", lambda original: _constructor(original, arrays, flow))
    for name in ("empty", "rand", "randn"):
        replace(flow, name, lambda original: _creator(original, arrays, MIN_UNTOUCHED_ELEMENTS))
    for name in ("zeros", "ones", "full"):
        replace(flow, name, lambda original: _creator(original, arrays, MAX_CONSTANT_ELEMENTS + 1))
    replace(flow, "normal", lambda original: _normal(original, arrays))
    # Functions that write to tensors.
    for name in dir(flow.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            replace(flow.nn.init, name, lambda original: _filler(original, arrays))
    for name in ("__setitem__", *dir(flow.Tensor)):
        is_writing = name.endswith("_") and not name.startswith("_") and name not in _NOT_WRITING
        if is_writing or name == "__setitem__":
            replace(flow.Tensor, name, lambda original: _filler(original, arrays))
    # Functions that make a tensor of the same shape.
    for name in (*_CONVERSIONS, *_ARITHMETIC):
        result_type = getattr(flow, {"double": "float64", "float": "float32", "half": "float16"}.get(name, name), None)
        replace(flow.Tensor, name, functools.partial(_converter, arrays=arrays, flow=flow, result_type=result_type))
    try:
        yield
    finally:
        arrays.active = False  # modules that imported a replaced function by name still call it
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


def _shape(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, ...]:
    """Return the shape in the arguments of a function that creates a tensor; empty if there is none."""
    dims = named.get("size", named.get("shape", arguments))
    if isinstance(dims, int):
        dims = (dims,)
    if dims and isinstance(dims[0], (tuple, list)):
        dims = dims[0]
    lengths = []
    for length in dims:
        if not isinstance(length, int) or isinstance(length, bool):
            break
        lengths.append(length)
    return tuple(lengths)


def _constructor(original: Callable, arrays: _UntouchedArrays, flow: Any) -> Callable:
    """Replace the call ``flow.Tensor(2, 3)``, in the metaclass, so that ``flow.Tensor`` remains a class."""

    def call(cls: Any, *arguments: Any, **named: Any) -> Any:
        if arrays.active and cls is flow.Tensor and not named:
            of_lengths = all(isinstance(a, int) for a in arguments) or isinstance(arguments[0], flow.Size)
            shape = _shape(arguments, {}) if of_lengths else ()
            if math.prod(shape) >= MIN_UNTOUCHED_ELEMENTS:
                return arrays.tensor(shape)
        return original(cls, *arguments, **named)

    return call


def _creator(original: Callable, arrays: _UntouchedArrays, min_elements: int) -> Callable:
    """Replace a function like ``flow.empty(2, 3)`` for tensors of at least ``min_elements`` elements."""

    def create(*arguments: Any, **named: Any) -> Any:
        shape = _shape(arguments, named)
        if (
            math.prod(shape) >= min_elements
            and arrays.can_create(named.get("dtype"))
            and named.get("placement") is None
        ):
            return arrays.tensor(shape, named.get("dtype")).requires_grad_(bool(named.get("requires_grad")))
        return original(*arguments, **named)

    return create


def _normal(original: Callable, arrays: _UntouchedArrays) -> Callable:
    """Replace ``flow.normal(mean, std, size, out=...)``."""

    def normal(*arguments: Any, **named: Any) -> Any:
        if arrays.may_have_created(named.get("out")):
            return named["out"]
        shape = _shape(arguments[2:], named)
        if (
            math.prod(shape) >= MIN_UNTOUCHED_ELEMENTS
            and arrays.can_create(named.get("dtype"))
            and named.get("placement") is None
        ):
            return arrays.tensor(shape, named.get("dtype"))
        return original(*arguments, **named)

    return normal


def _filler(original: Callable, arrays: _UntouchedArrays) -> Callable:
    """Replace a function that writes to its first argument and returns it."""

    def fill(*arguments: Any, **named: Any) -> Any:
        target = arguments[0] if arguments else named.get("tensor")
        return target if arrays.may_have_created(target) else original(*arguments, **named)

    return fill


def _converter(original: Callable, arrays: _UntouchedArrays, flow: Any, result_type: Any) -> Callable:
    """Replace a method that returns a tensor of the same shape.

    The type of the result is that among the arguments, else ``result_type`` if it is a type, else that of the tensor.
    """

    def convert(tensor: Any, *arguments: Any, **named: Any) -> Any:
        shape = tuple(tensor.shape)
        operands = [value for value in (*arguments, *named.values()) if isinstance(value, flow.Tensor)]
        same_shape = all(math.prod(tuple(operand.shape)) <= 1 or tuple(operand.shape) == shape for operand in operands)
        if not arrays.may_have_created(tensor) or not same_shape:
            return original(tensor, *arguments, **named)
        types = [value for value in (*arguments, *named.values()) if isinstance(value, flow.dtype)]
        wanted = types[0] if types else result_type if isinstance(result_type, flow.dtype) else tensor.dtype
        if wanted == tensor.dtype and original.__name__ in _CONVERSIONS:
            return tensor
        return arrays.tensor(shape, wanted)

    return convert
