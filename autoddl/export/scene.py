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
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.layouts import Layout, coarsest_mesh, common_mesh, split_dims

from ..zoo.builtin import BuiltIn
from .source import Names, value_text

__all__ = ["Scene", "cost_text", "layout_text", "stored_rows"]


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
        copies: of parameters that are copies of another stage's, the name of that in the plain model.
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

    @cached_property
    def common_mesh(self) -> tuple[Axis, ...] | None:
        """The mesh, outermost axis first, that all axes of all layers can be put together from; None where there is none."""
        return common_mesh(self.strategies.values(), self.num_ranks)

    def annotation(self, cuts: Sequence[Sequence[Sequence[Axis]]]) -> str:
        """The arguments ``placement`` and ``sbp`` of parameters whose dimensions these axes cut."""
        mesh, placement = self.common_mesh, "placement" if self.is_stage else "MESH"
        if mesh is None:
            axes = [axis for cut in cuts for of_dim in cut for axis in of_dim]
            mesh = coarsest_mesh(axes, self.num_ranks)
            if mesh is None:
                raise UserError(
                    "the strategies of this plan have no mesh in common for the parameters of a layer, which form='oneflow' "
                    "cannot write"
                )
            placement = _mesh_text(mesh)
        shown = ", ".join(_sbp_text(split_dims(cut, mesh)) for cut in cuts)
        return f"{placement}, sbp=[{shown}]"

    @property
    def mesh_text(self) -> str:
        """The expression of the common mesh."""
        return _mesh_text(self.common_mesh or ())

    # ---- Prices --------------------------------------------------------------------------------------------------------

    def cost(self, steps: Sequence[Step]) -> str:
        """Of some steps."""
        return cost_text(steps, self.cluster)

    def seconds(self, value: float) -> str:
        """A time."""
        return format_seconds(value)

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


def layout_text(layout: Layout) -> str:
    """The expression of a layout."""
    options = [name for name in ("embedding", "summa") if getattr(layout, name)]
    return f"Layout({', '.join([*map(value_text, layout.splits), *(f'{name}=True' for name in options)])})"


def _mesh_text(mesh: Iterable[Axis]) -> str:
    return f"RANKS.mesh({', '.join(str(axis.size) for axis in mesh)})"


def _sbp_text(dims: Sequence[int | None]) -> str:
    return f"[{', '.join('B' if dim is None else f'S{dim}' for dim in dims) or 'B'}]"
