"""Executors, and the meshes of devices on which OneFlow's ``nn.Graph`` executes a strategy.

A plan is executed *eagerly*, by the collectives of :mod:`autoddl.pipelines.runtime`, or as a *graph*: a ``nn.Graph`` whose
tensors have the layouts of the plan. In a graph a layer runs on a mesh with one or two axes: over one the samples are split,
over the other the features. The mesh of a strategy (:func:`graph_mesh`) has the factors of all network levels in rank order,
without those of 1, and neighbours of the same role are merged:

=====================  ============================  ====================================================
strategy               mesh                          weight
=====================  ============================  ====================================================
(2,1,1) | (8,1,1)      (samples:16)                  whole
(2,1,1) | (2,2,1)      (samples:4, features:2)       split by columns over the 2
(4,1,1) | (1,1,2)      (samples:4, features:2)       split by rows over the 2
(1,2,1) | (2,2,1)      three axes: none
(1,2,2)                none                          split by columns and by rows
=====================  ============================  ====================================================

With OneFlow 0.9.0, ``nn.Graph`` compiles neither meshes of three axes nor axes of length 1.  A weight that is split by columns and
by rows would send up to 3 times the price.  :func:`why_not_graph` decides which strategies a graph executes.

**Changes of layout.**  Activations between layers are split over the mesh in rank order.  Measured inside ``nn.Graph`` on 4 ranks,
bytes of all ranks as a multiple of the tensor:

==============================================  =======  =======
change (outer axis first)                         sent     price
==============================================  =======  =======
(S0:4) <-> (S1:4)                                  0.76     0.75
(S0:4) <-> (S0:2, S1:2)                            0.50     0.50
(S1:4) <-> (S1:2, S0:2)                            0.50     0.50
(S0:4) <-> (S1:2, S0:2)                            1.26
(S1:4) <-> (S0:2, S1:2)                            1.26     0.50
(S0:2, S1:2) <-> (S1:2, S0:2)                      1.76
==============================================  =======  =======

So a graph executes a change if it changes what one mesh axis splits (:func:`is_simple_change`).

**Families.** A search chooses the meshes of all layers from one family, in which every change is simple: the two meshes of a
single axis, or one mesh of two axes and the single-axis mesh of its outer role. The best plan is the best over all families
(:func:`families_of`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

from .graph import Layer, LayerGraph
from .kinds.registry import kind_of
from .nearest import divisors
from .strategy import Strategy

__all__ = [
    "EAGER",
    "EXECUTORS",
    "FEATURES",
    "GRAPH",
    "LEFT_OUT",
    "NO_PIPELINE",
    "SAMPLES",
    "GraphMesh",
    "are_one_family",
    "executes",
    "families_of",
    "family_of",
    "graph_mesh",
    "is_executable",
    "is_simple_change",
    "shared_positions",
    "why_not_executable",
    "why_not_graph",
]

EAGER, GRAPH = "eager", "graph"
#: Names of the executors; the first one is the default and executes every plan.
EXECUTORS = (EAGER, GRAPH)
#: What a search for the executor ``graph`` leaves out.
LEFT_OUT = (
    "what nn.Graph does not execute at its price: Summa, ranks that share a sample or a key, "
    "weights split by rows and columns at once, meshes of more than two axes, "
    "and different meshes of two axes in one plan"
)
#: Why a graph does not execute pipelines.
NO_PIPELINE = "nn.Graph orders the micro-batches of stages itself, not by a plan's schedule"
#: Roles of mesh axes.
SAMPLES, FEATURES = "samples", "features"
#: Largest number of mesh axes.
_MAX_AXES = 2


@dataclass(frozen=True)
class GraphMesh:
    """The mesh of a layer in a graph.

    Attributes:
        axes: (role, size) of each axis, outermost first; neighbours have different roles.  One device has an axis of size 1.

    >>> print(GraphMesh((("samples", 4), ("features", 2))))
    (samples:4, features:2)
    """

    axes: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return "(" + ", ".join(f"{role}:{size}" for role, size in self.axes) + ")"

    @property
    def roles(self) -> tuple[str, ...]:
        """Role of each axis."""
        return tuple(role for role, _ in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return prod(self.shape)

    def size(self, role: str) -> int:
        """Number of parts of the samples, or of the features."""
        return prod(size for own_role, size in self.axes if own_role == role)


def graph_mesh(strategy: Strategy) -> GraphMesh | None:
    """The mesh on which a graph executes a strategy; None if it cannot.

    >>> print(graph_mesh(Strategy(((2, 1, 1), (2, 2, 1)))))
    (samples:4, features:2)
    >>> graph_mesh(Strategy(((1, 2, 2),))) is None
    True
    """
    if why_not_graph(strategy):
        return None
    return GraphMesh(_merged_axes(strategy) or ((SAMPLES, 1),))


def why_not_graph(strategy: Strategy) -> str:
    """Why a graph cannot execute a strategy; empty if it can.

    >>> why_not_graph(Strategy(((1, 2, 1), (2, 2, 1))))
    'nn.Graph compiles meshes of at most 2 axes, this one has 3 (features:2, samples:2, features:2)'
    """
    if strategy.positions or strategy.key_copies:
        return "its ranks share samples, or keys and values"
    if strategy.summa:
        return "nn.Graph has no Summa product"
    if strategy.experts:
        return "nn.Graph does not divide experts"
    if strategy.zero or strategy.regathers:
        return f"nn.Graph divides parameters in its own way, not by {' '.join(strategy.words)}"
    if strategy.p1 > 1 and strategy.p2 > 1:
        return (
            "its weight is split by columns (p1) and by rows (p2), where nn.Graph would send up to 3 times the price; only one of "
            "p1 and p2 may be above 1"
        )
    axes = _merged_axes(strategy)
    if len(axes) > _MAX_AXES:
        mesh = ", ".join(f"{role}:{length}" for role, length in axes)
        return f"nn.Graph compiles meshes of at most {_MAX_AXES} axes, this one has {len(axes)} ({mesh})"
    return ""


def _merged_axes(strategy: Strategy) -> tuple[tuple[str, int], ...]:
    """The axes of all levels, outermost first, without those of length 1; neighbours of the same role are merged."""
    axes: list[tuple[str, int]] = []
    for p0, p1, p2 in strategy.splits:
        for role, size in ((SAMPLES, p0), (FEATURES, p1 * p2)):
            if size > 1 and axes and axes[-1][0] == role:
                axes[-1] = (role, axes[-1][1] * size)
            elif size > 1:
                axes.append((role, size))
    return tuple(axes)


def is_simple_change(source: GraphMesh, target: GraphMesh) -> bool:
    """Whether evenly split activations can change from one mesh to another with an all-to-all along one mesh axis.

    >>> data, model = GraphMesh((("samples", 4),)), GraphMesh((("features", 4),))
    >>> both = GraphMesh((("samples", 2), ("features", 2)))
    >>> is_simple_change(data, model), is_simple_change(both, data), is_simple_change(both, model)
    (True, True, False)
    """
    if source == target:
        return True
    fewer, more = sorted((source, target), key=lambda mesh: len(mesh.axes))
    if len(fewer.axes) == len(more.axes):
        return len(fewer.axes) == 1
    return fewer.roles[0] == more.roles[0]


# ---- Families ----------------------------------------------------------------------------------------------------------------


def families_of(executor: str, num_devices: int) -> tuple[str, ...]:
    """The names of restricted executors, each with the meshes of one family; an eager executor has no families.

    >>> families_of("graph", 4)[:2]
    ('graph|(samples:4)|(features:4)', 'graph|(samples:4)|(samples:2, features:2)')
    """
    if executor == EAGER or num_devices == 1:
        return (executor,)
    whole = {role: GraphMesh(((role, num_devices),)) for role in (SAMPLES, FEATURES)}
    families = [tuple(whole.values())]
    for outer, inner in ((SAMPLES, FEATURES), (FEATURES, SAMPLES)):
        for size in divisors(num_devices):
            if 1 < size < num_devices:
                families.append((whole[outer], GraphMesh(((outer, num_devices // size), (inner, size)))))
    return tuple("|".join([executor, *map(str, meshes)]) for meshes in families)


def family_of(executor: str, strategies: Iterable[Strategy], num_devices: int) -> str:
    """The restricted executor whose family has the meshes of all strategies; the executor itself if there is none."""
    chosen = set(strategies)
    families = families_of(executor, num_devices)
    return next((family for family in families if all(is_executable(family, s) for s in chosen)), executor)


def are_one_family(executor: str, strategies: Iterable[Strategy]) -> bool:
    """Whether a search for the executor chooses from the strategies together: every change between their meshes is simple."""
    if executor == EAGER:
        return True
    meshes = {graph_mesh(strategy) for strategy in strategies}
    return None not in meshes and all(is_simple_change(*pair) for pair in combinations(meshes, 2))  # type: ignore[arg-type]


# ---- Executors ---------------------------------------------------------------------------------------------------------------


def is_executable(executor: str, strategy: Strategy) -> bool:
    """Whether an executor, or a restricted one (:func:`families_of`), can execute a strategy."""
    name, *family = executor.split("|")
    if name == EAGER:
        return True
    mesh = graph_mesh(strategy)
    return mesh is not None and (not family or str(mesh) in family)


def executes(executor: str, layer: Layer, strategy: Strategy) -> bool:
    """Whether an executor can execute a layer at a strategy; a graph does not split the channels of images."""
    splits_channels = layer.is_image and strategy.p1 * strategy.p2 > 1
    return is_executable(executor, strategy) and (not splits_channels or executor.split("|")[0] == EAGER)


def shared_positions(executor: str, layer: Layer) -> int:
    """The number of positions of a sample that any number of ranks may share (:meth:`.LayerKind.positions`); 1 in a graph.

    A graph splits whole samples only.
    """
    return kind_of(layer.kind).positions(layer) if executor.split("|")[0] == EAGER else 1


def why_not_executable(executor: str, graph: LayerGraph, strategies: Mapping[str, Strategy]) -> str:
    """Which layer's strategy, or change of layout, an executor cannot execute, and why; empty if it can execute all.

    Args:
        executor: One of :data:`EXECUTORS`, or a restricted one.
        graph: The model.
        strategies: The strategy of each layer, by name.
    """
    name = executor.split("|")[0]
    if name == EAGER:
        return ""
    for layer in graph.layers:
        strategy = strategies[layer.name]
        if not executes(executor, layer, strategy):
            reason = why_not_graph(strategy) or (
                "it splits channels" if layer.is_image else "its mesh is of another family"
            )
            return f"executor {name!r} cannot execute {layer.name} at {strategy}: {reason}"
    meshes = {layer: graph_mesh(strategy) for layer, strategy in strategies.items()}
    for source, target in graph.edges:
        before, after = meshes[source], meshes[target]
        assert before is not None and after is not None
        if not is_simple_change(before, after):
            return (
                f"executor {name!r} cannot change the layout of the input of {target} from {before} to {after}: nn.Graph would "
                "send more than the price; only one mesh axis may change"
            )
    return ""
