"""Compares two plans: model, cluster, options, pipeline, strategies, and the figures of the step.

Layers are compared by name.  Layers with the same role in a repeated block that change in the same way are one row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.units import format_bytes, format_count, format_ranges, format_seconds

from .explain import PlanView
from .explain.groups import group_name, place_of

__all__ = ["Changed", "Figure", "LayerChange", "PlanDifference", "compare", "difference_document"]

FORMAT = "autoddl-plan-difference"
#: The fields of a `LayerAssessment` that are compared, and of a `LayerChange` that hold the differences.
_LAYER_FIELDS = ("compute_s", "communication_s", "sent_bytes", "memory_bytes")


@dataclass(frozen=True)
class Changed:
    """A property that differs.

    Attributes:
        what: name of the property.
        before, after: its values as text.
    """

    what: str
    before: str
    after: str


@dataclass(frozen=True)
class Figure:
    """A figure of both plans.

    Attributes:
        what: name of the figure.
        unit: ``s`` for seconds, ``B`` for bytes.
        before, after: its values.
    """

    what: str
    unit: str
    before: float
    after: float

    @property
    def is_equal(self) -> bool:
        """Whether the values are equal, except for rounding errors."""
        return abs(self.after - self.before) <= 1e-9 * max(abs(self.after), abs(self.before))


@dataclass(frozen=True)
class LayerChange:
    """Layers with the same role in a repeated block whose strategies change in the same way, or a single layer.

    Attributes:
        name: block and role (``h.*.mlp.c_fc``), or the name of a single layer.
        layers: names of the layers, in graph order.
        before, after: strategy as text, with the numbers of the stages if the plan has several.
        is_same: whether strategy and stages are the same in both plans.
        compute_s, communication_s: time after minus time before, on each device per step [s].
        sent_bytes, memory_bytes: bytes after minus bytes before, on each device.
    """

    name: str
    layers: tuple[str, ...]
    before: str
    after: str
    is_same: bool
    compute_s: float
    communication_s: float
    sent_bytes: float
    memory_bytes: float


@dataclass(frozen=True)
class PlanDifference:
    """The difference between two plans.

    Attributes:
        before, after: the plans.
        model, cluster, options, pipeline: the properties that differ.
        removed: layers that only the model of ``before`` has, one entry for all repetitions of a layer.
        added: layers that only the model of ``after`` has, one entry for all repetitions of a layer.
        layers: all layers that both models have, with changed strategies and with equal ones.
        figures: figures of the whole step, also equal ones.
    """

    before: PlanView
    after: PlanView
    model: tuple[Changed, ...]
    cluster: tuple[Changed, ...]
    options: tuple[Changed, ...]
    pipeline: tuple[Changed, ...]
    removed: tuple[str, ...]
    added: tuple[str, ...]
    layers: tuple[LayerChange, ...]
    figures: tuple[Figure, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the plans are the same.  How they were found does not count."""
        properties = (self.model, self.cluster, self.options, self.pipeline, self.removed, self.added)
        return (
            not any(properties)
            and all(layer.is_same for layer in self.layers)
            and all(figure.is_equal for figure in self.figures)
        )


def compare(before: PlanView, after: PlanView) -> PlanDifference:
    """Compare two plans, of the same model or of different ones.

    >>> import autoddl
    >>> from autoddl.explain import view_of
    >>> one, two = (autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=n, batch=64) for n in (1, 2))
    >>> [(row.what, row.before, row.after) for row in compare(view_of(one), view_of(two)).cluster][:1]
    [('nodes', '1', '2')]
    """
    layers_before, layers_after = _layers_of(before), _layers_of(after)
    return PlanDifference(
        before,
        after,
        model=_changed(_model(before), _model(after)),
        cluster=_changed(_cluster(before.plan.cluster), _cluster(after.plan.cluster)),
        options=_changed(_options(before), _options(after)),
        pipeline=_changed(_pipeline(before), _pipeline(after)),
        removed=_only_in(layers_before, layers_after),
        added=_only_in(layers_after, layers_before),
        layers=_layer_changes(layers_before, layers_after),
        figures=_figures(before, after),
    )


def _changed(before: dict[str, str], after: dict[str, str]) -> tuple[Changed, ...]:
    """The properties that differ; a property that a plan does not have is ``none``."""
    names = dict.fromkeys((*before, *after))
    properties = [Changed(name, before.get(name, "none"), after.get(name, "none")) for name in names]
    return tuple(one for one in properties if one.before != one.after)


def _model(view: PlanView) -> dict[str, str]:
    graph = view.plan.graph
    return {
        "name": graph.name,
        "layers": f"{len(graph.layers):,}",
        "parameters": f"{graph.num_parameters:,}",
        "FLOPs of a sample": f"{graph.flops:.6g}",
        "hash": graph.hash[:19],
    }


def _cluster(cluster: Cluster) -> dict[str, str]:
    device = cluster.device
    properties = {
        "name": cluster.name,
        "nodes": f"{cluster.num_nodes}",
        "devices per node": f"{cluster.devices_per_node}",
        "device": device.name,
        "device memory": format_bytes(device.memory_bytes),
        "memory bandwidth": f"{format_bytes(device.memory_bandwidth)}/s",
        "efficiency": f"{device.efficiency:.6g}",
        "kernel launch": format_seconds(device.launch_s),
    }
    properties |= {f"peak {precision}": f"{peak:.6g} FLOP/s" for precision, peak in device.peak_flops.items()}
    for name, link in zip(("inter-node", "intra-node"), cluster.links):
        properties[f"{name} latency"] = format_seconds(link.latency_s)
        properties[f"{name} bandwidth"] = f"{link.bandwidth / 1e9:.6g} GB/s"
    return {**properties, "hash": cluster.hash[:19]}


def _options(view: PlanView) -> dict[str, str]:
    workload = view.plan.workload
    size = 0 if view.certificate is None else view.certificate.space_size
    return {
        "batch": f"{workload.batch}",
        "micro-batch": f"{workload.micro_batch}",
        "precision": workload.precision,
        "optimizer": workload.optimizer,
        "recomputation": view.recomputation,
        "objective": view.objective,
        "method": view.method,
        "executor": view.plan.executor,
        "memory limit": format_bytes(view.memory_limit_bytes),
        "plans to choose from": format_count(size) if size else "not counted",
        "certificate": view.verdict,
    }


def _pipeline(view: PlanView) -> dict[str, str]:
    if not view.has_pipeline:
        return {}
    configuration = view.evaluation.configuration
    spec, stages = configuration.schedule, configuration.stages
    return {
        "stages": f"{spec.num_stages}",
        "workers": f"{spec.num_workers}",
        "devices per worker": str(configuration.mesh),
        "schedule": spec.label,
        "micro-batches": f"{spec.num_micro_batches}",
        "cut": " ".join(f"{stage.num_units}" for stage in stages),
        "recomputation": " ".join(stage.recompute for stage in stages),
    }


# ------------------------------------------------------------------------------------------------------------ layers


@dataclass(frozen=True)
class _PlacedLayer:
    """A layer, and the number of its stage; None if the plan has one stage."""

    assessed: LayerAssessment
    stage: int | None


def _layers_of(view: PlanView) -> dict[str, _PlacedLayer]:
    return {
        assessed.layer.name: _PlacedLayer(assessed, number if view.has_pipeline else None)
        for number, stage in enumerate(view.evaluation.stages)
        for assessed in stage.assessment.layers
    }


def _only_in(layers: Mapping[str, _PlacedLayer], others: Mapping[str, _PlacedLayer]) -> tuple[str, ...]:
    """Names of the layers that are not among the others, with one name and a number for the repetitions of a layer."""
    groups: dict[object, list[_PlacedLayer]] = {}
    for name, placed in layers.items():
        if name not in others:
            groups.setdefault(place_of(placed.assessed.layer), []).append(placed)
    return tuple(_group_name(group) + (f" x {len(group)}" if len(group) > 1 else "") for group in groups.values())


def _group_name(layers: Sequence[_PlacedLayer]) -> str:
    return group_name([placed.assessed.layer for placed in layers])


def _layer_changes(before: Mapping[str, _PlacedLayer], after: Mapping[str, _PlacedLayer]) -> tuple[LayerChange, ...]:
    groups: dict[object, list[tuple[_PlacedLayer, _PlacedLayer]]] = {}
    for name, layer_before in before.items():
        if name in after:
            old, new = layer_before.assessed, after[name].assessed
            key = (place_of(old.layer), old.strategy, new.strategy)
            groups.setdefault(key, []).append((layer_before, after[name]))
    return tuple(_layer_change(group) for group in groups.values())


def _layer_change(pairs: Sequence[tuple[_PlacedLayer, _PlacedLayer]]) -> LayerChange:
    before, after = zip(*pairs)
    texts = _strategy_text(before), _strategy_text(after)
    growth = {
        name: sum(getattr(new.assessed, name) - getattr(old.assessed, name) for old, new in pairs)
        for name in _LAYER_FIELDS
    }
    return LayerChange(
        name=_group_name(before),
        layers=tuple(placed.assessed.layer.name for placed in before),
        before=texts[0],
        after=texts[1],
        is_same=texts[0] == texts[1],
        **growth,
    )


def _strategy_text(layers: Sequence[_PlacedLayer]) -> str:
    strategy = str(layers[0].assessed.strategy)
    stages = sorted({placed.stage for placed in layers if placed.stage is not None})
    if not stages:
        return strategy
    return f"{strategy} in stage{'s' if len(stages) > 1 else ''} {format_ranges(stages)}"


def _figures(before: PlanView, after: PlanView) -> tuple[Figure, ...]:
    names = (
        ("step", "s", "step_s"),
        ("compute", "s", "compute_s"),
        ("communication", "s", "communication_s"),
        ("sent", "B", "sent_bytes"),
        ("memory", "B", "memory_bytes"),
    )
    figures = [Figure(what, unit, getattr(before, name), getattr(after, name)) for what, unit, name in names]
    if before.bubble_s or after.bubble_s:
        figures.insert(3, Figure("pipeline bubble", "s", before.bubble_s, after.bubble_s))
    return tuple(figures)


# ------------------------------------------------------------------------------------------------------------ the document


def difference_document(difference: PlanDifference) -> dict[str, Any]:
    """Return the JSON document of a difference: all properties that differ, all layers and all figures."""

    def rows(changed: Sequence[Changed]) -> dict[str, list[str]]:
        return {row.what: [row.before, row.after] for row in changed}

    return {
        "format": FORMAT,
        "version": 1,
        "plans": [difference.before.heading, difference.after.heading],
        "equal": difference.is_empty,
        "model": rows(difference.model),
        "cluster": rows(difference.cluster),
        "options": rows(difference.options),
        "pipeline": rows(difference.pipeline),
        "removed_layers": list(difference.removed),
        "added_layers": list(difference.added),
        "layers": [
            {
                "name": row.name,
                "layers": list(row.layers),
                "before": row.before,
                "after": row.after,
                "equal": row.is_same,
                **{name: getattr(row, name) for name in _LAYER_FIELDS},
            }
            for row in difference.layers
        ],
        "figures": {
            row.what: {"unit": row.unit, "before": row.before, "after": row.after} for row in difference.figures
        },
    }
