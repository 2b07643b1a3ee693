"""What the user's modules say and a layer graph does not: each fact is looked up once, when a layer is made ready.

function(model, path, ...)          ``path`` is that of the module that the layer stands for
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError

from .attending import rotary_angles

__all__ = ["OwnModule", "angles_of", "check_table", "convolution_options", "eps_of", "find_module", "own_module"]

Tensor = Any


def find_module(module: Any, path: str) -> Any:
    """The submodule at a path; None where there is none."""
    for part in path.split(".") if path else []:
        module = getattr(module, "_modules", {}).get(part)
        if module is None:
            return None
    return module


def module_at(module: Any, path: str) -> Any:
    """The submodule at a path."""
    found = find_module(module, path)
    if found is None:
        raise UserError(f"the model has no module {path!r}")
    return found


def eps_of(model: Any, path: str) -> float:
    """What a norm adds to the variance."""
    module = module_at(model, path)
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(getattr(module, name, None), (int, float)):
            return float(getattr(module, name))
    raise UserError(f"{type(module).__name__} has no eps, which its norm should have")


def angles_of(model: Any, path: str, rows: int, head_dim: int) -> tuple[Tensor, Tensor] | None:
    """Angles of rotary positions, where the attention's module or the nearest one around it that has it says their base."""
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = find_module(model, ".".join(names[:end]))
        for name in ("rope_theta", "rotary_theta", "theta"):
            theta = getattr(module, name, None)
            if isinstance(theta, (int, float)):
                return rotary_angles(rows, head_dim, float(theta))
    return None


def convolution_options(model: Any, path: str) -> dict[str, Any]:
    """How a convolution is done."""
    module = module_at(model, path)
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise UserError(f"padding_mode {module.padding_mode!r} cannot be run, should be 'zeros'")
    return {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}


def check_table(model: Any, path: str) -> None:
    """Whether an embedding is a plain one."""
    module = module_at(model, path)
    for name, plain in (("padding_idx", None), ("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, name, plain) not in (plain, False):
            raise UserError(f"{name} = {getattr(module, name)} cannot be run, should be {plain}")


class OwnModule:
    """A copy of one of the model's modules, to be run with parameters that it is given.

    Attributes:
        module: the copy.
        places: for each parameter the module that has it, and its name there.
    """

    def __init__(self, module: Any, parameters: Sequence[str] = ()):
        self.module = copy.deepcopy(module)
        self.places = []
        for parameter in parameters:
            owner, _, name = parameter.rpartition(".")
            self.places.append((module_at(self.module, owner), name))


def own_module(model: Any, path: str, parameters: Sequence[str], num_slices: int) -> OwnModule:
    """The module at a path, which runs on one of ``num_slices`` slices of the samples."""
    own = OwnModule(module_at(model, path), parameters)
    norms = [name for name, part in own.module.named_modules() if "BatchNorm" in type(part).__name__]
    if norms and num_slices > 1:
        raise UserError(
            f"the BatchNorm {norms[0] or 'that it is'} needs statistics of all samples, which are on {num_slices} ranks; "
            "another norm would do"
        )
    return own
