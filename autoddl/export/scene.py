"""The data that all writers of an exported OneFlow file share: plan, prices, names, mesh axes and placements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.program import TracedCall
from autoddl.costmodel.strategy import PRODUCT, Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.comm.layouts import Layout
from autoddl.pipelines.runtime.comm.parameter_layouts import coarsest_mesh, common_mesh, split_dims
from autoddl.pipelines.runtime.statements import Call

from ..zoo.builtin import BuiltIn
from .source import Names, value_text

__all__ = ["ONE_STAGE", "PIPELINE", "ClassForm", "Scene", "cost_text", "layout_text", "layouts_text"]


def cost_text(steps: Sequence[Step], cluster: Cluster) -> str:
    """Return the total time of some communication steps, and the bytes that each rank sends in them, as text."""
    seconds, nbytes = sum(map(cluster.time, steps)), sum(step.sent_bytes for step in steps)
    return f"{format_seconds(seconds)}, {format_bytes(nbytes)}"


@dataclass(frozen=True)
class ClassForm:
    """What distinguishes the classes of a plan of one stage from those of a pipeline.

    Attributes:
        parameters: class that holds the parameters of a layer.
        weights: call of its method that returns this rank's blocks.
        mesh: expression of the mesh that parameters are placed on.
        block_arguments: further arguments of ``__init__`` of blocks, each with its type.
        forward_arguments: further arguments of ``forward``, each with its type.
        has_stage_input: whether ``forward`` of the model or stage begins with the output of the previous stage.
    """

    parameters: str
    weights: str
    mesh: str
    block_arguments: Mapping[str, str]
    forward_arguments: Mapping[str, str]
    has_stage_input: bool


#: The class of a single stage sums its gradients itself, in the backward pass of a step's last micro-batch (``sync``).
ONE_STAGE = ClassForm("LayerParameters", "local(sync)", "MESH", {}, {"sync": "bool = True"}, False)
#: The weights of a stage of a pipeline collect gradients on each rank; the instructions of the schedule say when these are summed.
PIPELINE = ClassForm("StageParameters", "local()", "placement", {"placement": "Any"}, {}, True)


@dataclass
class Scene:
    """A stage of an exported file while it is written; a plan without a pipeline has one.

    Attributes:
        graph: layers of the stage.
        model: layers of the whole model.
        cluster: devices of the stage.
        workload: batch, micro-batch, precision, optimizer and recomputation.
        strategies: strategy of each layer by name.
        assessed: price of each layer by name.
        built_in: the built-in model; None if a user's function makes the plain model.
        names: identifiers of the file for layers and variables.
        axes: names of the mesh axes that the file has used so far; stages of a file share them.
        form: form of the file's classes.
        is_mirrored: whether the positions of all samples of the model are in mirrored order.
        copies: for parameters that another stage holds too, the name under which the plain model stores the value.
    """

    graph: LayerGraph
    model: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: Mapping[str, Strategy]
    assessed: Mapping[str, LayerAssessment]
    built_in: BuiltIn | None
    names: Names
    axes: dict[Axis, str]
    form: ClassForm
    is_mirrored: bool
    copies: Mapping[str, str]

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the stage."""
        return self.cluster.num_devices

    # ---- Axes and layouts --------------------------------------------------------------------------------------------

    def axis(self, axis: Axis) -> str:
        """Return the name of a mesh axis in the file; the axis is added to `axes`."""
        key = Axis(axis.size, axis.stride)
        if key not in self.axes:
            is_all = (
                axis.size == self.num_ranks and self.form is ONE_STAGE
            )  # stages may have different numbers of ranks
            self.axes[key] = "ALL_RANKS" if is_all else f"AXIS_{axis.size}_STRIDE_{axis.stride}"
        return self.axes[key]

    @cached_property
    def is_traced(self) -> bool:
        """Whether a program of a layer reads arguments of the model, so that the model or its stages get all of them."""
        return any(program.reads_data for layer in self.model.layers for program in layer.programs)

    @property
    def is_replayed(self) -> bool:
        """Whether the file has the operators of all layers, and runs no module of the plain model."""
        return all(layer.program is not None or not kind_of(layer.kind).is_opaque for layer in self.model.layers)

    @property
    def has_synchronised_norms(self) -> bool:
        """Whether batch norms have the statistics of the samples of all ranks."""
        programs = (layer.program for layer in self.model.layers if layer.program is not None)
        in_programs = any(call.attributes.get("synchronised") for program in programs for call in program.calls)
        return in_programs or any(layer.attributes.get("synchronised") for layer in self.model.layers)

    @cached_property
    def has_dropouts(self) -> bool:
        """Whether layers of known kinds have dropouts, which GPUs draw with their own generators."""
        return any(layer.dropouts for layer in self.model.layers)

    @cached_property
    def random_places(self) -> Mapping[str, tuple[int, ...]]:
        """Where the samples lie in the results of the random operators of programs, by the name of the operator."""
        return {call.attributes["stream"]: tuple(call.attributes["place"]) for call in self._random_calls}

    @property
    def draws_noise(self) -> bool:
        """Whether a program draws random numbers other than for dropouts, perhaps in evaluation, too."""
        return any(call.kind != "dropout" for call in self._random_calls)

    @property
    def _random_calls(self) -> list[TracedCall]:
        programs = (program for layer in self.model.layers for program in layer.programs)
        return [call for program in programs for call in program.calls if "stream" in call.attributes]

    @property
    def draws_numbers(self) -> bool:
        """Whether a layer of the model draws random numbers, which depend on the number of the pass."""
        return self.has_dropouts or bool(self.random_places)

    @cached_property
    def common_mesh(self) -> tuple[Axis, ...] | None:
        """A mesh, outermost axis first, such that each axis of each layer is a product of its axes; None if there is none."""
        return common_mesh(self.strategies.values(), self.num_ranks)

    def annotation(self, cuts: Sequence[Sequence[Sequence[Axis]]]) -> str:
        """Return the arguments ``placement`` and ``sbp`` of some parameters as text.

        Args:
            cuts: for each parameter and each of its dimensions, the mesh axes that split the dimension.

        Raises:
            UserError: no mesh contains all these axes.
        """
        mesh, placement = self.common_mesh, self.form.mesh
        if mesh is None:
            axes = [axis for parameter in cuts for dim in parameter for axis in dim]
            mesh = coarsest_mesh(axes, self.num_ranks)
            if mesh is None:
                raise UserError(
                    "the strategies of this plan need several meshes for the parameters of one layer, which form='oneflow' "
                    "cannot write"
                )
            placement = _mesh_text(mesh)
        shown = ", ".join(_sbp_text(split_dims(cut, mesh)) for cut in cuts)
        return f"{placement}, sbp=[{shown}]"

    @property
    def mesh_text(self) -> str:
        """Expression of the common mesh in the file."""
        return _mesh_text(self.common_mesh or ())

    # ---- Prices --------------------------------------------------------------------------------------------------------

    def cost(self, steps: Sequence[Step]) -> str:
        """Return the price of some communication steps as text."""
        return cost_text(steps, self.cluster)

    def heading(self, layer: Layer, label: str) -> list[str]:
        """Return comments on a layer: its kind and sizes, its strategy and SBP signatures, its price per training step.

        Args:
            layer: a layer of the graph.
            label: name of the layer in the file.
        """
        assessed = self.assessed[layer.name]
        layouts = assessed.strategy.sbp(layer)
        sbp = ", ".join(
            f"{name} {layout.without_unit_axes()}"
            for name, layout in layouts.items()
            if name in PRODUCT and layout is not None
        )
        description = layer.describe()[len(layer.name) :].strip(" ()")
        return [
            f"{label}: {description}; strategy {assessed.strategy}: {sbp}",
            f"  per step: {format_seconds(assessed.compute_s)} compute, {format_seconds(assessed.communication_s)} "
            f"communication, {format_bytes(assessed.sent_bytes)} sent",
        ]


def layout_text(layout: Layout) -> str:
    """Return the expression of a layout.

    >>> layout_text(Layout((2, 1, 1), (1, 4, 2), summa=True))
    'Layout((2, 1, 1), (1, 4, 2), summa=True)'
    """
    values = {name: getattr(layout, name) for name in ("embedding", "summa", "zero", "hybrid", "experts", "columns")}
    options = [f"{name}={value}" for name, value in values.items() if value]
    return f"Layout({', '.join([*map(value_text, layout.splits), *options])})"


def layouts_text(call: Call, path: Callable[[str], str]) -> str:
    """Return the expression of a call that describes how ranks store parameters.

    Args:
        call: the call, from :func:`autoddl.pipelines.runtime.kinds.registry.layouts_call`.
        path: function that turns the name of a parameter into an expression of the file.
    """

    def text(value: Any) -> str:
        if isinstance(value, Layout):
            return layout_text(value)
        if isinstance(value, str):
            return path(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{path(name)}: {value_text(sizes)}" for name, sizes in value.items()) + "}"
        return value_text(value)

    options = [f"{name}={text(value)}" for name, value in call.options.items()]
    return f"{call.function}({', '.join([*map(text, call.arguments), *options])})"


def _mesh_text(mesh: Iterable[Axis]) -> str:
    return f"RANKS.mesh({', '.join(str(axis.size) for axis in mesh)})"


def _sbp_text(dims: Sequence[int | None]) -> str:
    return f"[{', '.join('B' if dim is None else f'S{dim}' for dim in dims) or 'B'}]"
