"""Finds norms over the last dimension, whichever operators they are written with.

A norm reads one tensor x and computes *statistics* of each row: reductions over the last dimension that keep it with length 1.
The operators of a norm are found by growing a region, for each statistic:

1. Choose x.  The statistic may read x or a tensor computed from x: in ``mean(x * x)`` it reads a product.  The candidates for x
   are therefore the statistic's input and its element-wise ancestors, the nearest ones first.
2. Add, in execution order, every element-wise operator and every statistic that reads nothing but x and the region.
3. The region may end where it is *closed*: only one of its tensors is read outside of it, and this tensor has the shape of x.
   A region of a wrong x never closes.
4. Add the scale and the shift that follow: products and sums with learned vectors.
5. Run the region on numbers. It ends where it computes a norm of x, with the learned vectors w and b:

       layer norm:  (x - mean(x)) / sqrt(variance(x) + eps) w + b          RMS norm:  x / sqrt(mean(x^2) + eps) w

   A row of small numbers, of variance v, tells eps: it is divided by sqrt(v + eps).

This finds layer norm (nine operators on CPU) and RMS norm in all their usual spellings, and no other norm: not one that divides by
an unbiased deviation, or adds eps to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from .behaviour import Part, part_between
from .operators import ELEMENTWISE, PRODUCTS, REDUCTIONS, SUMS, UNARY, Operator, OperatorGraph

__all__ = ["NormRegion", "find_norms"]

#: Operators of a norm without its scale and shift; a larger region is not a norm.
MAX_NORM_OPERATORS = 24
#: Operators after the first reader of x that are examined, those of other layers included.
MAX_EXAMINED_OPERATORS = 4 * MAX_NORM_OPERATORS
#: Element-wise operators between x and a statistic.
MAX_ELEMENTWISE_DEPTH = 3
#: Standard deviations of the rows that tell what a norm adds to the variance, the smallest first.
_DEVIATIONS = (1e-4, 1e-2, 1.0)
#: What single precision cannot tell from nothing, beside the variance of the smallest rows.
_LEAST_EPS = 1e-13


@dataclass(frozen=True)
class NormRegion:
    """The operators of one norm.

    Attributes:
        operators: All operators of the norm.
        source: Tensor x that the norm reads.
        output: Tensor that the norm computes; it has the shape of x.
        learned: Learned vectors (scale and shift).
        statistics: Number of statistics of a row: 2 for layer norm, 1 for RMS norm, 0 if it is not known.
        eps: What is added to the variance.
        reason: Why it is no norm that ranks know, as the end of a sentence. "" if it is one.
    """

    operators: tuple[Operator, ...]
    source: str
    output: str
    learned: tuple[str, ...]
    statistics: int = 0
    eps: float = 0.0
    reason: str = ""


def find_norms(graph: OperatorGraph) -> list[NormRegion]:
    """Return all norms of a graph; they share no operator.

    A norm of raw data is returned only if it has a learned scale or shift.
    """
    regions: list[NormRegion] = []
    taken: set[str] = set()
    for op in graph.operators:
        if op.kind == "layer_norm" and op.attributes.get("begin_norm_axis") == len(graph.shapes[op.output]) - 1:
            affine = (*op.arguments.get("gamma", ()), *op.arguments.get("beta", ()))
            regions.append(
                NormRegion((op,), op.arguments["x"][0], op.output, affine, 2, float(op.attributes["epsilon"]))
            )
            continue
        if op.name in taken or not _is_statistic(graph, op):
            continue
        region = _best(
            _tried(graph, candidate)
            for source in _possible_sources(graph, op)
            for candidate in _grow(graph, op, source)
        )
        if (
            region is not None
            and graph.is_active(region.output)
            and taken.isdisjoint(member.name for member in region.operators)
        ):
            regions.append(region)
            taken.update(member.name for member in region.operators)
    return regions


def _best(regions: Iterator[NormRegion]) -> NormRegion | None:
    """Return the first norm that ranks know; else the first region, if there is one."""
    first = None
    for region in regions:
        if not region.reason:
            return region
        first = first or region
    return first


def _tried(graph: OperatorGraph, region: NormRegion) -> NormRegion:
    """Return a region with what its behaviour tells: the statistics and eps, or the reason why it is no norm."""
    part = part_between(graph, (region.source, *region.learned), region.output)
    if isinstance(part, str):
        return replace(region, reason=f"its norm {part}")
    features = graph.shapes[region.source][-1]
    if len(region.learned) > 2 or any(graph.elements(tensor) != features for tensor in region.learned):
        return replace(region, reason="its norm has no scale that is a parameter with an element for each feature")
    found = _behaviour(part, features, len(region.learned))
    if found is None:
        return replace(region, reason="its norm is neither a layer norm nor an RMS norm")
    return replace(region, statistics=found[0], eps=found[1])


@functools.lru_cache(maxsize=64)  # the layers of a model are alike
def _behaviour(part: Part, features: int, num_learned: int) -> tuple[int, float] | None:
    """Return the number of statistics of a norm and its eps; None if it is neither a layer norm nor an RMS norm.

    Args:
        part: Computes the norm from x, and from scale and shift if it has them.
        features: Elements of a row.
        num_learned: Number of learned vectors.
    """
    random = np.random.default_rng(0)
    scale, shift = random.uniform(0.5, 1.5, features), random.uniform(-1.0, 1.0, features)
    learned = (scale, shift)[:num_learned]
    scale, shift = (scale if num_learned else np.ones(features)), (shift if num_learned == 2 else np.zeros(features))
    shape = part.elements // features, features

    def tried(deviation: float) -> tuple[np.ndarray, np.ndarray]:
        """Return rows of this standard deviation and what the part makes of them, without scale and shift."""
        x = ((random.standard_normal(shape) + 0.5) * deviation).astype(np.float32)
        return x.astype(float), (part.run(x, *learned).reshape(shape) - shift) / scale

    def matches(x: np.ndarray, y: np.ndarray, statistics: int, eps: float) -> bool:
        centred = x - x.mean(axis=-1, keepdims=True) if statistics == 2 else x
        expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return np.allclose(y, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())

    # The smallest numbers, divided by sqrt(v + eps), tell eps best.
    smallest, *others = _DEVIATIONS
    x, y = tried(smallest)
    norms = (y**2).mean(axis=-1)
    if not np.isfinite(y).all() or not norms.all():
        return None
    for statistics, variances in ((2, x.var(axis=-1)), (1, (x**2).mean(axis=-1))):
        found = float(np.median(variances / norms - variances))
        eps = float(f"{found:.3g}") if found > _LEAST_EPS else 0.0
        if matches(x, y, statistics, eps):
            return (statistics, eps) if all(matches(*tried(d), statistics, eps) for d in others) else None
    return None


def _is_statistic(graph: OperatorGraph, op: Operator) -> bool:
    """Return whether an operator reduces a data-dependent tensor over its last dimension and keeps the dimension."""
    if op.kind not in REDUCTIONS or graph.is_fixed(op.inputs[0]):
        return False
    shape = graph.shapes[op.inputs[0]]
    return (
        len(shape) > 1
        and shape[-1] > 1
        and graph.reduced_dims(op) == (len(shape) - 1,)
        and graph.shapes[op.output] == (*shape[:-1], 1)
    )


def _possible_sources(graph: OperatorGraph, statistic: Operator) -> Iterator[str]:
    """Yield the candidates for x: the statistic's input and its element-wise ancestors, the nearest ones first."""
    source = statistic.inputs[0]
    for _ in range(MAX_ELEMENTWISE_DEPTH + 1):
        yield source
        op = graph.producer.get(source)
        if op is None or op.kind not in ELEMENTWISE:
            return
        data_inputs = graph.data_inputs(op)
        if len(data_inputs) != 1 or graph.shapes[data_inputs[0]] != graph.shapes[source]:
            return
        source = data_inputs[0]


def _grow(graph: OperatorGraph, statistic: Operator, source: str) -> Iterator[NormRegion]:
    """Yield the closed regions of ``source`` that contain a statistic, the smallest one first."""
    members: dict[str, Operator] = {}
    inside = {source}
    start = graph.position[graph.consumers[source][0].name]
    shape = graph.shapes[source]
    statistic_shape = (*shape[:-1], 1)
    for op in graph.operators[start : start + MAX_EXAMINED_OPERATORS]:
        data_inputs = graph.data_inputs(op)
        if not data_inputs or not inside.issuperset(data_inputs):
            continue
        if not (_is_statistic(graph, op) or op.kind in ELEMENTWISE):
            continue
        # An element-wise operator that reads x alone is part of the norm only if a statistic is taken of its result.
        if set(data_inputs) == {source} and not _is_statistic(graph, op) and not _leads_to_statistic(graph, op):
            continue
        if graph.shapes[op.output] not in (shape, statistic_shape):
            continue
        # A learned tensor is a vector; if it has several dimensions, it has one element for each feature.
        if any(len(graph.shapes[t]) > 1 and graph.elements(t) != shape[-1] for t in graph.learned_inputs(op)):
            continue
        members[op.name] = op
        inside.update(op.outputs)
        if len(members) > MAX_NORM_OPERATORS:
            return
        results = graph.results_of(members.values())
        is_closed = len(results) == 1 and graph.shapes[results[0]] == shape
        if is_closed and statistic.name in members:
            yield _with_affine(graph, dict(members), source, results[0])


def _leads_to_statistic(graph: OperatorGraph, op: Operator) -> bool:
    """Return whether only statistics read an element-wise operator, directly or through a chain of element-wise operators."""
    for _ in range(MAX_ELEMENTWISE_DEPTH):
        readers = graph.consumers.get(op.output, ())
        if len(readers) != 1:
            return bool(readers) and all(_is_statistic(graph, reader) for reader in readers)
        if _is_statistic(graph, readers[0]):
            return True
        if readers[0].kind not in UNARY:
            return False
        op = readers[0]
    return False


def _with_affine(graph: OperatorGraph, members: dict[str, Operator], source: str, output: str) -> NormRegion:
    """Return the norm of a closed region, including the scale and the shift that follow the region."""
    features = graph.shapes[source][-1]
    while True:
        op = graph.sole_consumer(output)
        if op is None or op.kind not in PRODUCTS | SUMS | {"cast"} or graph.data_inputs(op) != (output,):
            break
        others = [tensor for tensor in op.inputs if tensor != output]
        if any(not graph.is_learned(t) or graph.elements(t) != features for t in others):
            break
        if graph.shapes[op.output] != graph.shapes[source]:
            break
        members[op.name] = op
        output = op.output
    learned = dict.fromkeys(tensor for op in members.values() for tensor in graph.learned_inputs(op))
    return NormRegion(tuple(members.values()), source, output, tuple(learned))
