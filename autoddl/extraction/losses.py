"""Finds losses over all samples that have a kind of layer, or that a linear layer computes itself.

- The mean cross entropy over all targets but the ignored ones.
- The mean squared or absolute difference between an output and the targets.

Both read the model's last input as their targets, and are the only output of the model. Every other loss is a traced program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddl.costmodel.program import Scaled

from .operators import Operator, OperatorGraph
from .samples import Samples
from .scales import attributes_of

__all__ = ["LossRegion", "find_loss"]

#: Target that the cross entropy of ranks ignores.
_IGNORED = -100
#: Operators that change neither elements nor their order.
_SAME_ELEMENTS = frozenset({"reshape", "squeeze", "expand_dims", "cast", "identity"})
#: Operators after a difference, and the loss that they make of it.
_ERRORS = {"square": "mse_loss", "abs": "l1_loss"}


@dataclass(frozen=True)
class LossRegion:
    """The operators of a loss.

    Attributes:
        operators: Its operators.
        first: The operator at which the loss begins.
        source: Tensor of logits, or of predictions.
        output: The loss.
        error: ``mse_loss`` or ``l1_loss``; "" for a cross entropy.
    """

    operators: tuple[Operator, ...]
    first: Operator
    source: str
    output: str
    error: str = ""


def find_loss(graph: OperatorGraph, samples: Samples) -> LossRegion | None:
    """Return the loss of a model; None if it has none, or one that is a traced program."""
    if len(graph.outputs) != 1 or graph.elements(graph.outputs[0]) != 1:
        return None
    output = graph.outputs[0]
    members: list[Operator] = []
    tensor = _above(graph, output, members)
    op = graph.producer.get(tensor)
    if op is None:
        return None
    members.append(op)
    if op.kind == "broadcast_div":
        return _likelihood_loss(graph, op, output, members)
    if op.kind not in ("scalar_mul", "scalar_div"):
        return None
    total = graph.producer.get(_above(graph, op.inputs[0], members))
    if total is None or not _sums_all(graph, total) or not _is_mean(graph, op, total):
        return None
    members.append(total)
    each = graph.producer.get(_above(graph, total.inputs[0], members))
    if each is None:
        return None
    members.append(each)
    if each.kind == "sparse_softmax_cross_entropy" and _are_targets(graph, each.arguments["label"][0], members):
        return LossRegion(tuple(members), each, each.arguments["prediction"][0], output)
    if each.kind not in _ERRORS:
        return None
    difference = graph.producer.get(_above(graph, each.inputs[0], members))
    if difference is None or difference.kind != "broadcast_sub":
        return None
    members.append(difference)
    active = graph.active_inputs(difference)
    others = [tensor for tensor in difference.inputs if tensor not in active]
    if len(active) != 1 or len(others) != 1 or graph.shapes[active[0]] != graph.shapes[others[0]]:
        return None
    if not _are_targets(graph, others[0], members):
        return None
    return LossRegion(tuple(members), difference, active[0], output, _ERRORS[each.kind])


def _likelihood_loss(graph: OperatorGraph, op: Operator, output: str, members: list[Operator]) -> LossRegion | None:
    """The sum of likelihoods divided by the sum of their weights."""
    sums = [graph.producer.get(_above(graph, op.arguments[key][0], members)) for key in ("x", "y")]
    if any(total is None or not _sums_all(graph, total) for total in sums):
        return None
    tensors = []
    for total in sums:
        assert total is not None
        members.append(total)
        tensors.append(_above(graph, total.inputs[0], members))
    nll = graph.producer.get(tensors[0])
    if nll is None or nll.kind != "nll" or tensors != [nll.results["output"][0], nll.results["out_weight"][0]]:
        return None
    softmax = graph.producer.get(_above(graph, nll.arguments["input"][0], members))
    if softmax is None or softmax.kind != "log_softmax" or nll.attributes["ignore_index"] != _IGNORED:
        return None
    if nll.arguments.get("weight") or graph.sole_consumer(softmax.output) is None:
        return None
    if not _are_targets(graph, nll.arguments["target"][0], members):
        return None
    return LossRegion((*members, nll, softmax), softmax, softmax.inputs[0], output)


def _above(graph: OperatorGraph, tensor: str, members: list[Operator]) -> str:
    """Return the tensor that has the same elements before changes of its shape, which are added to ``members``."""
    while (op := graph.producer.get(tensor)) is not None and op.kind in _SAME_ELEMENTS:
        members.append(op)
        tensor = op.inputs[0]
    return tensor


def _sums_all(graph: OperatorGraph, op: Operator) -> bool:
    return op.kind == "reduce_sum" and graph.elements(op.output) == 1


def _is_mean(graph: OperatorGraph, op: Operator, total: Operator) -> bool:
    """Return whether an operator divides a sum by the number of its elements."""
    attributes = attributes_of(graph, op)
    number = attributes["float_operand"] if op.attributes["has_float_operand"] else attributes["int_operand"]
    value = number.of(graph.batch) if isinstance(number, Scaled) else number
    factor = value if op.kind == "scalar_mul" else 1 / value
    return isinstance(number, Scaled) and math.isclose(factor, 1 / graph.elements(total.inputs[0]), rel_tol=1e-5)


def _are_targets(graph: OperatorGraph, tensor: str, members: list[Operator]) -> bool:
    """Return whether a tensor is the last input of the model, in another shape or type."""
    path: list[Operator] = []
    source = _above(graph, tensor, path)
    members += path
    return source == graph.data[-1] and source in graph.inputs and len(graph.data) > 1
