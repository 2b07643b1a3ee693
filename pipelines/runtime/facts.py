"""Reads properties of the user's modules that a layer graph does not contain.

The statements of a layer refer to these functions (`statements.Fact`). They are called once, when the layer is built:
``function(model, path, ...)``, where ``path`` is the path of the layer's module.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError

from .backend import place_buffers

__all__ = [
    "OwnModule",
    "buffer_of",
    "check_table",
    "convolution_options",
    "eps_of",
    "find_eps",
    "find_module",
    "own_module",
    "rotary_base_of",
]

Tensor = Any


def find_module(module: Any, path: str) -> Any:
    """Return the submodule at a path, or None if there is none."""
    for part in path.split(".") if path else []:
        module = getattr(module, "_modules", {}).get(part)
        if module is None:
            return None
    return module


def module_at(module: Any, path: str) -> Any:
    """Return the submodule at a path.

    Raises:
        UserError: The model has no such submodule.
    """
    found = find_module(module, path)
    if found is None:
        raise UserError(f"the model has no module {path!r}")
    return found


def find_eps(model: Any, path: str) -> float | None:
    """Return the number that the module at a path says a norm adds to the variance; None if it says none."""
    module = find_module(model, path)
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(getattr(module, name, None), (int, float)):
            return float(getattr(module, name))
    return None


def eps_of(model: Any, path: str) -> float:
    """Return the number that a norm adds to the variance.

    Raises:
        UserError: The module has no such attribute.
    """
    eps = find_eps(model, path)
    if eps is None:
        kind = type(module_at(model, path)).__name__
        raise UserError(f"{kind} has no attribute eps, variance_epsilon or epsilon; a norm should have one")
    return eps


def buffer_of(model: Any, path: str, name: str) -> np.ndarray:
    """Return the values of a buffer, or of a tensor that is a plain attribute of the module at a path.

    Raises:
        UserError: The module has no such tensor.
    """
    value = getattr(module_at(model, path), name, None)
    if value is None or not hasattr(value, "numpy"):
        raise UserError(f"the model has no tensor {path + '.' if path else ''}{name}; it was made for another model")
    return np.array(value.detach().numpy())


def rotary_base_of(model: Any, path: str) -> float | None:
    """Return the base of the frequencies of rotary positions, or None if no module defines one.

    The base is read from the attention module or its nearest parent that defines it.
    """
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = find_module(model, ".".join(names[:end]))
        for name in ("rope_theta", "rotary_theta", "theta"):
            theta = getattr(module, name, None)
            if isinstance(theta, (int, float)):
                return float(theta)
    return None


def convolution_options(model: Any, path: str) -> dict[str, Any]:
    """Return the stride, padding, dilation and groups of a Conv2d.

    Raises:
        UserError: Its padding mode is not supported.
    """
    module = module_at(model, path)
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise UserError(f"padding_mode {module.padding_mode!r} is not supported, should be 'zeros'")
    return {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}


def check_table(model: Any, path: str) -> None:
    """Check that an embedding uses none of the unsupported options.

    Raises:
        UserError: It has a padding index, a maximal norm, or gradients scaled by frequency.
    """
    module = module_at(model, path)
    for name, plain in (("padding_idx", None), ("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, name, plain) not in (plain, False):
            raise UserError(f"{name} = {getattr(module, name)} is not supported, should be {plain}")


class OwnModule:
    """A copy of one of the model's modules, which runs with other tensors as its parameters.

    Attributes:
        module: The copy.
        places: For each parameter, the submodule that has it, and its name there.
    """

    def __init__(self, module: Any, parameters: Sequence[str] = ()):
        self.module = copy.deepcopy(module)
        self.places = []
        for parameter in parameters:
            owner, _, name = parameter.rpartition(".")
            self.places.append((module_at(self.module, owner), name))

    def place(self, x: Tensor) -> None:
        """Move the module's buffers to the device of its input ``x``, floating ones also to its type."""
        place_buffers(self.module, x.device.type, x.dtype)


def own_module(model: Any, path: str, parameters: Sequence[str], num_slices: int) -> OwnModule:
    """Return a copy of the module at a path.

    Args:
        model: The user's model.
        path: Path of the module.
        parameters: Paths of its parameters, relative to the module.
        num_slices: Number of slices of the samples. Each rank runs the module on one slice.

    Raises:
        UserError: The module has a BatchNorm, and the samples are split.
    """
    own = OwnModule(module_at(model, path), parameters)
    norms = [name for name, part in own.module.named_modules() if "BatchNorm" in type(part).__name__]
    if norms and num_slices > 1:
        raise UserError(
            f"BatchNorm{' ' + norms[0] if norms[0] else ''} needs the statistics of all samples, which are split over "
            f"{num_slices} ranks; use a norm that does not mix samples"
        )
    return own
