"""Groups of an optimizer's parameters, such as those without weight decay: from those of the user's module to those of a plan.

A stored tensor can hold several parameters of the module (fused projections), and a divided one is a vector. So groups that are
chosen by the dimensions of a parameter, or by the type of its module, have to be chosen in the user's module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoddl.costmodel.errors import UserError

from .parameters import StoredParameter
from .userparameters import first_names

__all__ = ["check_optimizer", "stored_groups"]

Tensor = Any


def stored_groups(
    groups: Iterable[Mapping[str, Any]], module: Any, names: Mapping[str, str], stored: Mapping[str, StoredParameter]
) -> list[dict[str, Any]]:
    """Return groups of stored tensors, with the options of groups of the user's parameters.

    Args:
        groups: Options of each group, and its parameters under ``params``: parameters of the module, or their names.
        module: The user's module; None if it no longer exists.
        names: All names in the module, each with the first name of the same parameter.
        stored: The stored parameters, by name.

    Raises:
        UserError: A parameter is not one of the module, or is in no group or in several; or parameters that are stored as one
            tensor are in groups with different options.
    """
    options = [dict(group) for group in groups]
    known: Mapping[int, str] = {} if module is None else first_names(module)
    group_of: dict[str, int] = {}
    for number, group in enumerate(options):
        given = group.pop("params")
        for parameter in [given] if isinstance(given, str) or hasattr(given, "is_leaf") else given:
            name = _first_name(parameter, number, known, names)
            if group_of.setdefault(name, number) != number:
                raise UserError(
                    f"{name} is in groups {group_of[name]} and {number} of the optimizer; it should be in one"
                )
    result: list[dict[str, Any]] = [{**group, "params": []} for group in options]
    for parameter in stored.values():
        sources = [source for source, _ in parameter.layout.sources]
        missing = [source for source in sources if source not in group_of]
        if missing and len(missing) < len(sources):
            other = next(source for source in sources if source in group_of)
            raise UserError(
                f"{missing[0]} is in no group of the optimizer, but it is stored in one tensor with {other}"
            )
        if missing:
            continue
        first = group_of[sources[0]]
        for source in sources[1:]:
            if options[group_of[source]] != options[first]:
                raise UserError(
                    f"{sources[0]} and {source} are stored in one tensor, but are in groups {first} and {group_of[source]} of "
                    "the optimizer, whose options differ; they should be the same"
                )
        result[first]["params"].append(parameter.tensor)
    return result


def _first_name(parameter: Any, group: int, known: Mapping[int, str], names: Mapping[str, str]) -> str:
    """Return the first name of a parameter that is given as a tensor or by any of its names."""
    name = names.get(parameter) if isinstance(parameter, str) else known.get(id(parameter))
    if name is not None:
        return name
    if isinstance(parameter, str):
        raise UserError(f"group {group} of the optimizer has {parameter!r}, which is no parameter of the model")
    raise UserError(
        f"group {group} of the optimizer has a tensor of shape {tuple(parameter.shape)}, which should be a parameter of the module "
        "that the plan was applied to (or give names)"
    )


def check_optimizer(optimizer: Any, stored: Sequence[StoredParameter]) -> None:
    """Check that an optimizer updates stored tensors, and no others.

    Raises:
        UserError: It has another parameter, such as one of the user's module.
    """
    own = {id(parameter.tensor) for parameter in stored}
    for number, group in enumerate(optimizer.param_groups):
        for tensor in group.parameters:
            if id(tensor) not in own:
                raise UserError(
                    f"group {number} of the optimizer has a tensor of shape {tuple(tensor.shape)}, which is no parameter of the "
                    "applied module: make the optimizer of applied.parameters(), or of applied.parameter_groups(groups)"
                )
