"""Making modules far larger than memory.

While a model is made for its shapes alone, its large parameters need no memory of their own: they are views of one array
that nobody writes to, and that therefore never gets a page of memory.  OneFlow has no such tensors; here the functions
that make tensors, initialise them and convert them are replaced for as long as the context lasts.

Values of the parameters are meaningless.  Tables of zeros and ones are left alone up to :data:`MAX_TABLE` elements,
since masks are made of them, whose values are looked at.
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

#: Tensors of fewer elements are made as usual.
SMALLEST = 2**16
#: Zeros, ones and other constants of up to as many elements are made as usual.
MAX_TABLE = 2**26
_CONVERSIONS = ("bfloat16", "double", "float", "half", "to")
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
_NOT_FILLING = ("contiguous_", "requires_grad_")


class _Buffers:
    """Arrays that are never written to, one for each type, and the shapes that were cut out of them."""

    def __init__(self, flow: Any):
        self._flow = flow
        self._arrays: dict[np.dtype, np.ndarray] = {}
        self._types = {flow.float64: np.float64, flow.float16: np.float16, flow.bfloat16: np.float16}
        self._shapes: set[tuple[int, ...]] = set()
        self.active = True

    def tensor(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """A tensor without memory of its own; bfloat16, which numpy does not know, as float16."""
        kind = np.dtype(self._types.get(dtype, np.float32))
        count = math.prod(shape)
        if kind not in self._arrays or self._arrays[kind].size < count:
            self._arrays[kind] = np.empty(count, kind)
        self._shapes.add(shape)
        return self._flow.from_numpy(self._arrays[kind][:count].reshape(shape))

    def holds(self, value: Any) -> bool:
        """Whether a value may be one of these tensors (another one of the same shape is taken for one)."""
        return self.active and isinstance(value, self._flow.Tensor) and tuple(value.shape) in self._shapes

    def replaces(self, dtype: Any) -> bool:
        """Whether tensors of a type are made here: floating point only, since token numbers may be looked at."""
        return self.active and (dtype is None or dtype in self._types or dtype == self._flow.float32)


@contextlib.contextmanager
def untouched_parameters() -> Iterator[None]:
    """Let large tensors that are made inside the context take no memory."""
    flow: Any = load_oneflow()
    buffers = _Buffers(flow)
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            replaced.append((owner, name, original))
            setattr(owner, name, functools.wraps(original)(wrap(original)))

    replace(type(flow.Tensor), "__call__", lambda original: _constructor(original, buffers, flow))
    for name in ("empty", "rand", "randn"):
        replace(flow, name, lambda original: _creator(original, buffers, SMALLEST))
    for name in ("zeros", "ones", "full"):
        replace(flow, name, lambda original: _creator(original, buffers, MAX_TABLE + 1))
    replace(flow, "normal", lambda original: _normal(original, buffers))
    for name in dir(flow.nn.init):
        if name.endswith("_") and not name.startswith("_"):
            replace(flow.nn.init, name, lambda original: _filler(original, buffers))
    for name in ("__setitem__", *dir(flow.Tensor)):
        filling = name.endswith("_") and not name.startswith("_") and name not in _NOT_FILLING
        if filling or name == "__setitem__":
            replace(flow.Tensor, name, lambda original: _filler(original, buffers))
    for name in (*_CONVERSIONS, *_ARITHMETIC):
        kind = getattr(flow, {"double": "float64", "float": "float32", "half": "float16"}.get(name, name), None)
        replace(flow.Tensor, name, functools.partial(_converter, buffers=buffers, flow=flow, kind=kind))
    try:
        yield
    finally:
        buffers.active = False  # whoever imported a replaced function keeps it
        for owner, name, original in reversed(replaced):
            setattr(owner, name, original)


def _shape(arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[int, ...]:
    """The shape that a tensor is made with; empty where there is none."""
    given = named.get("size", named.get("shape", arguments))
    if isinstance(given, int):
        given = (given,)
    if given and isinstance(given[0], (tuple, list)):
        given = given[0]
    lengths = []
    for length in given:
        if not isinstance(length, int) or isinstance(length, bool):
            break
        lengths.append(length)
    return tuple(lengths)


def _constructor(original: Callable, buffers: _Buffers, flow: Any) -> Callable:
    """``flow.Tensor(2, 3)``: the metaclass's call, so that ``flow.Tensor`` stays a class."""

    def call(cls: Any, *arguments: Any, **named: Any) -> Any:
        if buffers.active and cls is flow.Tensor and not named:
            of_lengths = all(isinstance(a, int) for a in arguments) or isinstance(arguments[0], flow.Size)
            shape = _shape(arguments, {}) if of_lengths else ()
            if math.prod(shape) >= SMALLEST:
                return buffers.tensor(shape)
        return original(cls, *arguments, **named)

    return call


def _creator(original: Callable, buffers: _Buffers, smallest: int) -> Callable:
    """``flow.empty(2, 3)`` and the like."""

    def create(*arguments: Any, **named: Any) -> Any:
        shape = _shape(arguments, named)
        if math.prod(shape) >= smallest and buffers.replaces(named.get("dtype")) and named.get("placement") is None:
            return buffers.tensor(shape, named.get("dtype")).requires_grad_(bool(named.get("requires_grad")))
        return original(*arguments, **named)

    return create


def _normal(original: Callable, buffers: _Buffers) -> Callable:
    """``flow.normal(mean, std, size, out=...)``."""

    def normal(*arguments: Any, **named: Any) -> Any:
        if buffers.holds(named.get("out")):
            return named["out"]
        shape = _shape(arguments[2:], named)
        if math.prod(shape) >= SMALLEST and buffers.replaces(named.get("dtype")) and named.get("placement") is None:
            return buffers.tensor(shape, named.get("dtype"))
        return original(*arguments, **named)

    return normal


def _filler(original: Callable, buffers: _Buffers) -> Callable:
    """What writes to its first argument and returns it."""

    def fill(*arguments: Any, **named: Any) -> Any:
        target = arguments[0] if arguments else named.get("tensor")
        return target if buffers.holds(target) else original(*arguments, **named)

    return fill


def _converter(original: Callable, buffers: _Buffers, flow: Any, kind: Any) -> Callable:
    """What makes a tensor of the same shape, maybe of another type."""

    def convert(tensor: Any, *arguments: Any, **named: Any) -> Any:
        shape = tuple(tensor.shape)
        operands = [value for value in (*arguments, *named.values()) if isinstance(value, flow.Tensor)]
        same_shape = all(math.prod(tuple(operand.shape)) <= 1 or tuple(operand.shape) == shape for operand in operands)
        if not buffers.holds(tensor) or not same_shape:
            return original(tensor, *arguments, **named)
        types = [value for value in (*arguments, *named.values()) if isinstance(value, flow.dtype)]
        wanted = types[0] if types else kind if isinstance(kind, flow.dtype) else tensor.dtype
        if wanted == tensor.dtype and original.__name__ in _CONVERSIONS:
            return tensor
        return buffers.tensor(shape, wanted)

    return convert
