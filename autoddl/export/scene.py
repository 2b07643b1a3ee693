"""What the writers of a OneFlow file share: the plan with its prices, names, and the annotations of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload

from ..zoo.builtin import BuiltIn
from .source import Names, value_text

__all__ = ["Scene", "cost_text", "stored_rows"]


def cost_text(steps: Sequence[Step], cluster: Cluster) -> str:
    """Time, and bytes sent by each rank."""
    seconds, nbytes = sum(map(cluster.time, steps)), sum(step.sent_bytes for step in steps)
    return f"{format_seconds(seconds)}, {format_bytes(nbytes)}"


def stored_rows(shape: Sequence[int]) -> int:
    """Rows of a tensor between layers: images are one row."""
    return prod(shape[:-1]) if len(shape) <= 2 else 1


@dataclass
class Scene:
    """One file in the making.

    Attributes:
        graph, cluster, workload, strategies: the plan's.
        assessed: every layer's price.
        built_in: the model; None where a user's function makes it.
        names: of variables and attributes.
        axes: the mesh axes that the file names so far.
        is_stage: whether this is a stage of a pipeline, one of several scenes of a file: `num_ranks` are the stage's, and weights
            collect gradients that are summed when the schedule says so.
        copies: of layers whose weight is a copy of another stage's, the module that it belongs to in the plain model.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: Mapping[str, Strategy]
    assessed: Mapping[str, LayerAssessment]
    built_in: BuiltIn | None
    names: Names
    axes: dict[Axis, str] = field(default_factory=dict)
    is_stage: bool = False
    copies: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return self.cluster.num_devices

    # ---- Axes and layouts --------------------------------------------------------------------------------------------

    def axis(self, axis: Axis) -> str:
        """The name of a mesh axis."""
        key = Axis(axis.size, axis.stride)
        if key not in self.axes:
            is_all = axis.size == self.num_ranks and not self.is_stage
            self.axes[key] = "ALL_RANKS" if is_all else f"AXIS_{axis.size}_STRIDE_{axis.stride}"
        return self.axes[key]

    def axis_list(self, axes: Iterable[Axis]) -> str:
        """A list of mesh axes."""
        return f"[{', '.join(map(self.axis, axes))}]"

    def layout(self, layer: Layer) -> str:
        """The expression of a layer's layout."""
        levels = ", ".join(map(value_text, self.strategies[layer.name].splits))
        return f"Layout({levels}{', embedding=True' if layer.kind == 'embedding' else ''})"

    @cached_property
    def common_mesh(self) -> tuple[Axis, ...] | None:
        """The mesh, outermost axis first, that all axes of all layers can be put together from; None where there is none."""
        cuts = {1, self.num_ranks}
        for strategy in set(self.strategies.values()):
            for is_embedding in (False, True):
                axes = [axis for which in range(3) for axis in strategy.axes(which, is_embedding)]
                cuts |= {axis.stride for axis in axes} | {axis.stride * axis.size for axis in axes}
        return _mesh(cuts)

    def annotation(self, cut: Sequence[Sequence[Axis]], name: str = "sbp") -> str:
        """The arguments ``placement`` and SBP of a parameter whose dimensions the axes of ``cut`` cut."""
        mesh, placement = self.common_mesh, "placement" if self.is_stage else "MESH"
        if mesh is None:
            cuts = {1, self.num_ranks}
            cuts |= {edge for axes in cut for axis in axes for edge in (axis.stride, axis.stride * axis.size)}
            mesh = _mesh(cuts)
            assert mesh is not None, "the axes of one parameter are a mesh"
            placement = _mesh_text(mesh)
        return f"{placement}, {name}={self.sbp(cut, mesh)}"

    @property
    def mesh_text(self) -> str:
        """The expression of the common mesh."""
        return _mesh_text(self.common_mesh or ())

    def sbp(self, cut: Sequence[Sequence[Axis]], mesh: Sequence[Axis] | None = None) -> str:
        """The SBP signature of a parameter on a mesh, the common one by default."""
        states = []
        for part in (self.common_mesh or ()) if mesh is None else mesh:
            dims = [dim for dim, axes in enumerate(cut) for a in axes if a.stride <= part.stride < a.stride * a.size]
            states.append(f"S{dims[0]}" if dims else "B")
        return f"[{', '.join(states or ['B'])}]"

    # ---- Prices --------------------------------------------------------------------------------------------------------

    def cost(self, steps: Sequence[Step]) -> str:
        """Of some steps."""
        return cost_text(steps, self.cluster)

    def heading(self, layer: Layer, label: str) -> list[str]:
        """What a layer is, how it lies, and what it is predicted to cost in a training step."""
        found = self.assessed[layer.name]
        layouts = found.strategy.sbp(layer)
        sbp = ", ".join(
            f"{name} {layout.without_unit_axes()}" for name, layout in layouts.items() if layout is not None
        )
        what = layer.describe()[len(layer.name) :].strip(" ()")
        return [
            f"{label}: {what}; at {found.strategy}: {sbp}",
            f"  a step: {format_seconds(found.compute_s)} compute, {format_seconds(found.communication_s)} communication, "
            f"{format_bytes(found.sent_bytes)} sent",
        ]


def _mesh_text(mesh: Iterable[Axis]) -> str:
    return f"mesh({', '.join(str(axis.size) for axis in mesh)})"


def _mesh(cuts: Iterable[int]) -> tuple[Axis, ...] | None:
    ordered = sorted(cuts)
    if any(larger % smaller for smaller, larger in zip(ordered, ordered[1:])):
        return None
    return tuple(Axis(end // stride, stride) for stride, end in reversed(list(zip(ordered, ordered[1:]))))
