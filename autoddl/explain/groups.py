"""Groups of equal stages, and in each stage groups of equal layers of a repeated block; reports show one row for each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_ranges
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.result import recomputed_text

__all__ = ["LayerGroup", "StageGroup", "group_name", "place_of", "stage_groups"]


@dataclass(frozen=True)
class LayerGroup:
    """Layers of a stage with the same role in a repeated block and the same strategy, or a single layer.

    Attributes:
        name: block and role (``h.*.mlp.c_fc``), or the name of a single layer.
        layers: names of the layers, in graph order.
        strategy: the strategy of all layers.
        sbp: SBP layouts of ``input``, ``weight`` and ``output`` as text; empty for the weight of a layer without weights.
        compute_s: computation of all layers, per step on each device [s].
        communication_s: communication of all layers, per step on each device [s].
    """

    name: str
    layers: tuple[str, ...]
    strategy: Strategy
    sbp: Mapping[str, str]
    compute_s: float
    communication_s: float

    @property
    def seconds(self) -> float:
        """Computation and communication [s]."""
        return self.compute_s + self.communication_s

    @property
    def label(self) -> str:
        """The name, followed by the number of layers if there are several."""
        return f"{self.name} x {len(self.layers)}" if len(self.layers) > 1 else self.name


@dataclass(frozen=True)
class StageGroup:
    """Stages with equal layers, strategies and recomputation.

    Attributes:
        title: the numbers of the stages and their recomputation as text; empty if the plan has one stage.
        stages: numbers of the stages.
        layers: groups of the layers of the first stage.
    """

    title: str
    stages: tuple[int, ...]
    layers: tuple[LayerGroup, ...]


def stage_groups(evaluation: Evaluation) -> tuple[StageGroup, ...]:
    """Return the groups of equal stages, in the order of the first stage of each group.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [(group.title, group.stages, [layers.name for layers in group.layers]) for group in stage_groups(plan.evaluation)]
    [('', (0,), ['fc1', 'fc2'])]
    """
    by_signature: dict[object, list[int]] = {}
    for stage in range(len(evaluation.stages)):
        by_signature.setdefault(_signature(evaluation, stage), []).append(stage)
    return tuple(
        StageGroup(
            _title(evaluation, stages), tuple(stages), _layer_groups(evaluation.stages[stages[0]].assessment.layers)
        )
        for stages in by_signature.values()
    )


def _signature(evaluation: Evaluation, stage: int) -> object:
    """A key that equal stages share: their layers, the positions of the layers' inputs, the strategies and the recomputation."""
    graph, choice = evaluation.stages[stage].graph.graph, evaluation.configuration.stages[stage]
    position = {layer.name: i for i, layer in enumerate(graph.layers)}
    rows = tuple(
        (
            layer.signature(),
            layer.role,
            tuple(position[name] for name in graph.inputs(layer.name)),
            choice.strategies[layer.name],
        )
        for layer in graph.layers
    )
    return rows, choice.recompute


def _title(evaluation: Evaluation, stages: Sequence[int]) -> str:
    if len(evaluation.stages) == 1:
        return ""
    recompute = evaluation.configuration.stages[stages[0]].recompute
    recomputed = ", recomputed" if recompute == "stage" else recomputed_text(recompute)
    return f"{'stage' if len(stages) == 1 else 'stages'} {format_ranges(stages)}{recomputed}"


def _layer_groups(layers: Sequence[LayerAssessment]) -> tuple[LayerGroup, ...]:
    groups: dict[object, list[LayerAssessment]] = {}
    for assessed in layers:
        groups.setdefault((place_of(assessed.layer), assessed.strategy), []).append(assessed)
    return tuple(_layer_group(members) for members in groups.values())


def place_of(layer: Layer) -> object:
    """A key that the repetitions of a layer share: its block and role; for a layer outside of repeated blocks its name."""
    return (layer.block, layer.role) if layer.block else layer.name


def group_name(layers: Sequence[Layer]) -> str:
    """The common name of repetitions of a layer: block and role (``h.*.mlp.c_fc``), or the name of a single layer."""
    first = layers[0]
    return f"{first.block}.*.{first.role}" if len(layers) > 1 else first.name


def _layer_group(members: Sequence[LayerAssessment]) -> LayerGroup:
    first = members[0]
    layouts = first.strategy.sbp(first.layer)
    return LayerGroup(
        name=group_name([member.layer for member in members]),
        layers=tuple(member.layer.name for member in members),
        strategy=first.strategy,
        sbp={tensor: str(layout.without_unit_axes()) if layout else "" for tensor, layout in layouts.items()},
        compute_s=sum(member.compute_s for member in members),
        communication_s=sum(member.communication_s for member in members),
    )
