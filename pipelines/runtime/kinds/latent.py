"""The core of latent attention on a rank: its heads, on whole sequences."""

from __future__ import annotations

from autoddl.costmodel.errors import UserError

from ..statements import RANKS, Call, LayerContext, LayerProgram, Name, X, epilogue

__all__ = ["program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of latent attention.

    Raises:
        UserError: The layer does not read queries, keys and values, and shared features.
    """
    layer, attributes, layout = context.layer, context.layer.attributes, context.layout
    if len(context.producers) != 3:
        raise UserError(
            f"{layer.describe()}: reads {len(context.producers)} tensors, should read queries, keys and values, and shared features"
        )
    shared, body = "input_2", list[Call]()
    for axis in layout.axes(1):
        options = {"axis": axis, "dim": 2}
        body.append(Call("ranks.all_gather", (Name(shared),), options, result=("shared",), num_steps=1))
        shared = "shared"
    options = {
        "heads": attributes["heads"] // layout.num_parts,
        "head_dim": attributes["head_dim"],
        "value_dim": attributes["value_dim"],
        "causal": bool(attributes["causal"]),
        "theta": context.fact("theta", "rotary_base_of"),
        **({"is_fused": True} if context.attention == "fused" else {}),
    }
    arguments = (X, Name("input_1"), Name(shared), RANKS)
    body.append(Call("attend_latent", arguments, options, computes=True))
    return LayerProgram((), (*context.recomputable(("x", "input_1", "input_2"), body), *epilogue(context)))
