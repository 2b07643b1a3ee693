"""The figures of a plan's layers and stages, as values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoddl.costmodel.strategy import Strategy

from ..planfile import PlanFile

__all__ = ["PlannedLayer", "PlannedStage", "layers_of", "stages_of"]


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of a plan. Seconds and bytes are per training step, on each device of its stage.

    Attributes:
        name, kind: of the layer.
        stage: its number; 0 in a plan without a pipeline.
        strategy: (p0, p1, p2) for each network level.
        input, weight, output: their layouts, as text; "" where there is none.
        compute_s, communication_s: of all micro-batches.
        sent_bytes: what a device sends.
        memory_bytes: of parameters, gradients, optimizer states and activations that are kept.
    """

    name: str
    kind: str
    stage: int
    strategy: Strategy
    input: str
    weight: str
    output: str
    compute_s: float
    communication_s: float
    sent_bytes: float
    memory_bytes: float

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """The names of all attributes, in order."""
        return tuple(each.name for each in fields(cls))

    def record(self) -> dict[str, Any]:
        """All attributes by name, the strategy as text."""
        return {**asdict(self), "strategy": str(self.strategy)}


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan. Seconds are those of one micro-batch, with the communication inside the stage.

    Attributes:
        number: from 0 on.
        layers: their names, in order.
        workers: that hold the stage: several where pipelines run in both directions.
        num_devices: of each worker.
        recompute: what is recomputed before the backward pass: ``none``, ``layers`` (their activations) or ``stage`` (all of it).
        forward_s, backward_s: of a micro-batch, recomputation counted as backward.
        all_reduce_s: of the gradients, once per step.
        memory_bytes: of its fullest worker, on each device.
    """

    number: int
    layers: tuple[str, ...] = field(repr=False)
    workers: tuple[int, ...]
    num_devices: int
    recompute: str
    forward_s: float
    backward_s: float
    all_reduce_s: float
    memory_bytes: float


def layers_of(plan: PlanFile) -> Iterator[PlannedLayer]:
    """The layers of a plan, in order."""
    for entry in plan.document["layers"]:
        layouts = {name: text or "" for name, text in entry["sbp"].items()}
        yield PlannedLayer(
            name=entry["name"],
            kind=entry["kind"],
            stage=entry["stage"],
            strategy=plan.strategies[entry["name"]],
            input=layouts["input"],
            weight=layouts["weight"],
            output=layouts["output"],
            compute_s=float(entry["compute_s"]),
            communication_s=float(entry["communication_s"]),
            sent_bytes=float(entry["sent_bytes"]),
            memory_bytes=float(entry["memory_bytes"]),
        )


def stages_of(plan: PlanFile) -> Iterator[PlannedStage]:
    """The stages of a plan: one where it has no pipeline."""
    pipeline = plan.evaluation
    widths = pipeline.schedule.widths
    for number, (figures, choice) in enumerate(zip(pipeline.stages, pipeline.configuration.stages)):
        workers = tuple(replica.worker for replica in pipeline.schedule.replicas_of(number))
        yield PlannedStage(
            number=number,
            layers=tuple(layer.name for layer in figures.graph.layers),
            workers=workers,
            num_devices=widths[workers[0]],
            recompute=choice.recompute,
            forward_s=figures.forward_s,
            backward_s=figures.backward_s + figures.recompute_s,
            all_reduce_s=figures.all_reduce_s,
            memory_bytes=max(pipeline.memory[worker] for worker in workers),
        )
