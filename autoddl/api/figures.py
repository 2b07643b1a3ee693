"""Layers and stages of a plan with their predicted times, traffic and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from autoddl.costmodel.strategy import Strategy

from ..planfile import PlanFile

__all__ = ["PlannedLayer", "PlannedStage", "layers_of", "stages_of"]


@dataclass(frozen=True)
class PlannedLayer:
    """A layer of a plan.  Times and bytes are those of one training step on one device of the layer's stage.

    Attributes:
        name: Name of the layer.
        kind: Kind of the layer, such as ``linear`` or ``embedding``.
        stage: Index of the stage that holds the layer; 0 in a plan without a pipeline.
        strategy: Strategy (p0, p1, p2) on each network level.
        input, weight, output: SBP layouts as text; empty if the layer has no such tensor.
        compute_s: Computation time of all micro-batches, in seconds.
        communication_s: Communication time of all micro-batches, in seconds.
        sent_bytes: Bytes that the device sends.
        memory_bytes: Memory of parameters, gradients, optimizer states and stored activations, in bytes.
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
        """Return the names of all attributes, in the order of their definition.

        >>> import autoddl
        >>> autoddl.PlannedLayer.columns()[:2]
        ('name', 'kind')
        """
        return tuple(each.name for each in fields(cls))

    def record(self) -> dict[str, Any]:
        """Return all attributes as a dictionary, with the strategy as text.

        >>> import autoddl
        >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
        >>> plan.layers[0].record()["strategy"]
        '(1,8,1)'
        """
        return {**asdict(self), "strategy": str(self.strategy)}


@dataclass(frozen=True)
class PlannedStage:
    """A stage of a plan.  Times of passes include the communication inside the stage.

    Attributes:
        number: Index of the stage, from 0.
        layers: Names of the layers, in graph order.
        workers: Workers that hold the stage; several if pipelines run in both directions.
        num_devices: Number of devices of each worker.
        recompute: What is recomputed in the backward pass: ``none``, ``layers`` (the activations inside layers) or ``stage`` (the
            whole forward pass).
        forward_s: Forward pass of one micro-batch, in seconds.
        backward_s: Backward pass of one micro-batch including recomputation, in seconds.
        all_reduce_s: All-reduce of the gradients, once per step, in seconds.
        update_s: Optimizer step, once per step, in seconds.
        memory_bytes: Peak memory of each device of the worker that needs the most, in bytes.
    """

    number: int
    layers: tuple[str, ...] = field(repr=False)
    workers: tuple[int, ...]
    num_devices: int
    recompute: str
    forward_s: float
    backward_s: float
    all_reduce_s: float
    update_s: float
    memory_bytes: float


def layers_of(plan: PlanFile) -> Iterator[PlannedLayer]:
    """Yield the layers of a plan, in graph order."""
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
    """Yield the stages of a plan; a plan without a pipeline has one stage."""
    evaluation = plan.evaluation
    widths = evaluation.schedule.widths
    for number, (figures, choice) in enumerate(zip(evaluation.stages, evaluation.configuration.stages)):
        workers = tuple(replica.worker for replica in evaluation.schedule.replicas_of(number))
        yield PlannedStage(
            number=number,
            layers=tuple(layer.name for layer in figures.graph.layers),
            workers=workers,
            num_devices=widths[workers[0]],
            recompute=choice.recompute,
            forward_s=figures.forward_s,
            backward_s=figures.backward_s + figures.recompute_s,
            all_reduce_s=figures.all_reduce_s,
            update_s=figures.update_s,
            memory_bytes=max(evaluation.worker_memory_bytes[worker] for worker in workers),
        )
