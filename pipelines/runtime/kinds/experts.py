"""Experts on a rank: tokens go to the slots of experts, are computed, and come back (:mod:`..routing`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Parameter

from ..statements import RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["layouts", "program"]

_WEIGHTS = ("gate", "up", "down")
_LOGITS = "input_1"


def program(context: LayerContext) -> LayerProgram:
    """Return the program of experts.

    Raises:
        UserError: The layer does not read tokens and logits.
    """
    layer, layout, attributes = context.layer, context.layout, context.layer.attributes
    if len(context.producers) != 2:
        raise UserError(f"{layer.describe()}: reads {len(context.producers)} tensors, should read tokens and logits")
    columns, experts = layout.axes(1), layout.expert_axes
    num, capacity = attributes["experts"], attributes["capacity"]
    options: dict[str, Any] = {"per_token": attributes["per_token"], "capacity": capacity}
    options.update({name: True for name in ("renormalises", "sigmoid") if attributes.get(name)})
    if "scaling" in attributes:
        options["scaling"] = attributes["scaling"] / 1000
    if "groups" in attributes:
        options["groups"] = [attributes["groups"], attributes["groups_per_token"]]
    # The inputs of a layer are not assigned again.
    logits, body = _LOGITS, list[Call]()
    for axis in columns:
        body.append(_along("all_gather", axis, 2, logits, "logits"))
        logits = "logits"
    if not experts:
        body += [_along("all_gather", axis, 2) for axis in columns]
    body.append(Call("route", (Name(logits), RANKS), options, result=("shares", "tokens", "places")))
    body.append(Call("dispatch", (X, Name("tokens")), {"num": num, "capacity": capacity}))
    if experts:
        body += [_exchange(axis, split_dim=0, concat_dim=1) for axis in experts]
        body += [_along("all_gather", axis, 3) for axis in columns]
    body.append(Call("expert_products", (X, *map(Name, _WEIGHTS)), computes=True))
    if experts:
        body += [_along("reduce_scatter", axis, 3) for axis in reversed(columns)]
        body += [_exchange(axis, split_dim=1, concat_dim=0) for axis in reversed(experts)]
    body.append(Call("collect", (X, Name("shares"), Name("places")), {"rows": layer.rows}))
    if not experts:
        body += [_along("reduce_scatter", axis, 2) for axis in reversed(columns)]
    return LayerProgram(_WEIGHTS, (*context.recomputable((X.text, _LOGITS, *_WEIGHTS), body), *epilogue(context)))


def _along(collective: str, axis: Any, dim: int, tensor: str = X.text, result: str = X.text) -> Call:
    return Call(f"ranks.{collective}", (Name(tensor),), {"axis": axis, "dim": dim}, result=(result,), num_steps=1)


def _exchange(axis: Any, split_dim: int, concat_dim: int) -> Call:
    options = {"axis": axis, "split_dim": split_dim, "concat_dim": concat_dim}
    return Call("ranks.all_to_all", (X,), options, num_steps=1)


def layouts(context: LayerContext, parameters: Sequence[Parameter]) -> Call:
    """Return the call that describes the layouts of the matrices: experts over e, features inside them over p1."""
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    inner = {name: 2 if name.endswith("down_proj") else 1 for name in shapes}
    return Call("expert_layouts", (shapes, inner, context.layout))
