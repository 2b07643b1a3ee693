"""The layers of a plan as its readers see them: equal stages are one group, equal layers of a repeated block are one group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_ranges
from autoddl.pipelines.joint.evaluation import Evaluation

__all__ = ["LayerGroup", "StageGroup", "group_name", "place_of", "stage_groups"]


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers of a repeated block with one strategy, or a layer of its own.

    Attributes:
        name: of the block and role, or the layer's.
        layers: by name.
        strategy: of all of them.
        sbp: layouts of input, weight and output as text; a layer without weights has "" there.
        compute_s, communication_s: per step, on each device (of one stage, where it stands for several).
    """

    name: str
    layers: tuple[str, ...]
    strategy: Strategy
    sbp: Mapping[str, str]
    compute_s: float
    communication_s: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def label(self) -> str:
        """With the number of layers."""
        return f"{self.name} x {len(self.layers)}" if len(self.layers) > 1 else self.name


@dataclass(frozen=True)
class StageGroup:
    """Equal stages.

    Attributes:
        title: names the stages; empty where the plan has one stage alone.
        stages: their numbers.
        layers: of the first of them.
    """

    title: str
    stages: tuple[int, ...]
    layers: tuple[LayerGroup, ...]


def stage_groups(evaluation: Evaluation) -> tuple[StageGroup, ...]:
    """Groups of equal stages, in the order of their first ones.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> [(group.title, group.stages, [layers.name for layers in group.layers]) for group in stage_groups(plan.evaluation)]
    [('', (0,), ['fc1', 'fc2'])]
    """
    alike: dict[object, list[int]] = {}
    for stage in range(len(evaluation.stages)):
        alike.setdefault(_signature(evaluation, stage), []).append(stage)
    return tuple(
        StageGroup(
            _title(evaluation, stages), tuple(stages), _layer_groups(evaluation.stages[stages[0]].assessment.layers)
        )
        for stages in alike.values()
    )


def _signature(evaluation: Evaluation, stage: int) -> object:
    """What equal stages have in common: layers and their inputs, by place, and what was chosen for them."""
    graph, choice = evaluation.stages[stage].graph.graph, evaluation.configuration.stages[stage]
    place = {layer.name: i for i, layer in enumerate(graph.layers)}
    rows = tuple(
        (
            layer.signature(),
            layer.role,
            tuple(place[name] for name in graph.inputs(layer.name)),
            choice.strategies[layer.name],
        )
        for layer in graph.layers
    )
    return rows, choice.recompute


def _title(evaluation: Evaluation, stages: Sequence[int]) -> str:
    if len(evaluation.stages) == 1:
        return ""
    recompute = evaluation.configuration.stages[stages[0]].recompute
    kept = {"none": "", "layers": ", layers recomputed", "stage": ", recomputed"}[recompute]
    return f"{'stage' if len(stages) == 1 else 'stages'} {format_ranges(stages)}{kept}"


def _layer_groups(layers: Sequence[LayerAssessment]) -> tuple[LayerGroup, ...]:
    groups: dict[object, list[LayerAssessment]] = {}
    for assessed in layers:
        groups.setdefault((place_of(assessed.layer), assessed.strategy), []).append(assessed)
    return tuple(_group(members) for members in groups.values())


def place_of(layer: Layer) -> object:
    """What equal layers of repeated blocks have in common: block and role; of other layers the name."""
    return (layer.block, layer.role) if layer.block else layer.name


def group_name(layers: Sequence[Layer]) -> str:
    """What layers of one place in their blocks are called: by block and role, or by the name of a single layer."""
    first = layers[0]
    return f"{first.block}.*.{first.role}" if len(layers) > 1 else first.name


def _group(members: Sequence[LayerAssessment]) -> LayerGroup:
    first = members[0]
    layouts = first.strategy.sbp(first.layer)
    return LayerGroup(
        name=group_name([member.layer for member in members]),
        layers=tuple(member.layer.name for member in members),
        strategy=first.strategy,
        sbp={what: str(layout.without_unit_axes()) if layout else "" for what, layout in layouts.items()},
        compute_s=sum(member.compute_s for member in members),
        communication_s=sum(member.communication_s for member in members),
    )
