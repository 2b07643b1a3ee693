"""Attention on a rank: its heads, on whole sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.kinds.attention import head_sections, is_changed, key_slices
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layer import Layer

from ..replay.statements import score_calls, weight_name
from ..statements import ALL_STEPS, RANKS, Call, LayerContext, LayerProgram, Name, Statement, X

__all__ = ["check_attention", "program"]


def program(context: LayerContext) -> LayerProgram:
    """Return the program of attention.

    Raises:
        UserError: The layer does not read q, k and v, or the features that it reads cannot be split into heads.
    """
    layer, attributes, producers = context.layer, context.layer.attributes, context.producers
    check_attention(layer)
    _, sections = head_sections(layer)
    slices, num_parts = key_slices(layer), context.layout.num_parts
    # Query heads of this rank, and its groups of features: each has a slice of key and value.
    heads = attributes["heads"] // num_parts
    num_groups = heads if slices > 1 else attributes["kv_heads"] // num_parts
    kv_heads = max(attributes["kv_heads"] // num_parts, 1)
    is_grouped = len(producers) == 1 and kind_of(context.graph[producers[0]].kind).follows_groups
    if len(producers) not in (1, 3):  # 0: it reads the model's input
        raise UserError(
            f"{layer.describe()}: reads {len(producers)} tensors, should read q, k and v or all of them in one"
        )
    statements: list[Statement] = []
    is_across = "key_rows" in attributes
    if is_across and len(producers) != 3:
        raise UserError(
            f"{layer.describe()}: attention to other rows is executed on ranks if it reads queries, keys and values; "
            f"it reads {len(producers)} tensors, and is priced only"
        )
    if len(producers) == 3 and not is_across:
        statements.append(Call("concat_heads", ([X, Name("input_1"), Name("input_2")],), {"groups": num_groups}))
    elif not is_grouped and not is_across:
        if num_parts > 1:
            raise UserError(
                f"{layer.describe()}: it reads {producers[0]!r}, whose features cannot be split into heads; "
                "only a linear layer's can"
            )
        statements.append(Call("flow.split", (X, list(sections)), {"dim": 2}, ("parts",)))
        statements.append(Call("concat_heads", (Name("parts"),), {"groups": num_groups}))
    sizes = {"groups": kv_heads, "group_heads": heads // kv_heads, "head_dim": attributes["head_dim"]}
    options: dict[str, Any] = {**sizes, **_rotary_options(context)}
    if is_dropped := kind_of(layer.kind).drops_elements(layer):
        dropout = context.fact("dropout", "dropout_of", layer.name, -1, *layer.dropouts[-1:])
        arguments = (dropout, Name("step"), RANKS, context.layout, Name("num_samples"), layer.rows, attributes["heads"])
        further = {name: attributes[name] for name in ("windows", "key_rows") if name in attributes}
        statements.append(Call("bind_dropout", arguments, further, result=("drop_probabilities",)))
        options["drop"] = Name("drop_probabilities")
    if slices > 1 and not is_across:
        options["slices"] = slices
    if context.strategy.key_copies:
        options["copy_axes"] = list(context.strategy.key_copy_axes)
    if layer.scores is not None or is_across:
        return _with_changed_scores(context, statements, options)
    options["causal"] = bool(attributes["causal"])
    options |= {"window": attributes["window"]} if "window" in attributes else {}
    options |= {"is_fused": True} if context.attention == "fused" and not is_dropped else {}
    if context.strategy.positions:
        options |= {"way": context.strategy.sequence, "axes": list(context.strategy.position_axes)}
    options |= context.order
    call = Call("attend", (X, RANKS), options, num_steps=ALL_STEPS, computes=True)
    statements += context.recomputable(("x",), [call])
    return LayerProgram((), tuple(statements))


def _rotary_options(context: LayerContext) -> dict[str, Any]:
    """Return the options of rotary positions. What a graph does not say of them is an attribute of the user's module."""
    attributes = context.layer.attributes
    if "rotary_base" not in attributes:
        return {"theta": context.fact("theta", "rotary_base_of")}
    return {
        "theta": float(attributes["rotary_base"]) or None,
        **({"turned": attributes["rotary_features"]} if "rotary_features" in attributes else {}),
        **({"is_of_neighbours": True} if attributes.get("rotary_neighbours") else {}),
    }


def _with_changed_scores(
    context: LayerContext, statements: Sequence[Statement], options: Mapping[str, Any]
) -> LayerProgram:
    """Return the program of attention whose scores a traced model changes, given the statements that make its input."""
    layer, attributes = context.layer, context.layer.attributes
    before, changes = ([], []) if layer.scores is None else score_calls(context, layer.scores, attributes["heads"])
    others = ["input_1", "input_2"] if "key_rows" in attributes else []
    options = {
        **options,
        **({"changes": changes} if changes else {}),
        **({"others": list(map(Name, others))} if others else {}),
        **({"windows": attributes["windows"]} if "windows" in attributes else {}),
    }
    call = Call("attend_changed", (X, RANKS), options, num_steps=ALL_STEPS, computes=True)
    kept = ("x", *others, *(name.text for _, name, _ in changes))
    weights = tuple(weight_name(i) for i in range(len(layer.parameters)))
    return LayerProgram(weights, (*statements, *before, *context.recomputable(kept, [call])))


def check_attention(layer: Layer) -> None:
    """Check that ranks have a program for the layer.

    Raises:
        UserError: It has parameters of its own that do not change its scores, or what changes its scores is not known.
    """
    if is_changed(layer) and layer.scores is None:
        raise UserError(f"{layer.describe()}: its scores are changed, and the graph does not say how")
    if layer.parameters and layer.scores is None:
        raise UserError(
            f"{layer.describe()}: attention with parameters, such as {layer.parameters[0].name}, "
            "is priced, but not executed on ranks"
        )
