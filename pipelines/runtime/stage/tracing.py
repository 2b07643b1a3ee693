"""One training pass divided into sections, so that each phase of each layer can be measured separately.

The autograd graph is cut between layers. Every layer reads detached leaf tensors, and its backward pass starts from the sum of the
gradients in its readers' leaves. The gradients of parameters collect in the leaves that the caller passes as weights, until they
are summed over the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis

from ..comm.parameter_layouts import ParameterLayout
from ..detaching import detached
from ..load import load_oneflow
from ..parameters import sum_gradients
from ..ranks.wire import Traffic
from ..setting import Batch
from ..shards import HeldWeight, readable_weights, update_shards
from .stage import Stage

flow = load_oneflow()

__all__ = ["Measure", "StageTracer", "TracedSection"]

Tensor = Any
#: Runs a function and returns its result with the traffic of all ranks meanwhile, such as ``wire.measure`` with its baseline.
Measure = Callable[[Callable[[], Any]], "tuple[Any, Traffic]"]


@dataclass(frozen=True)
class TracedSection:
    """One phase of one layer, run separately.

    Attributes:
        layer: Name of the layer.
        phase: ``forward`` or ``backward``, both with the redistributions of the layer's inputs, or ``gradient``.
        steps: Communication steps that this rank took part in, in the order in which they ran.
        traffic: Bytes and messages that all ranks sent; None if not measured.
    """

    layer: str
    phase: str
    steps: tuple[Step, ...]
    traffic: Traffic | None


class StageTracer:
    """Runs one forward and backward pass through a stage, section by section.

    Args:
        stage: Stage to run.
        weights: This rank's weight shards, as in `Stage.run`.
        measure: Called with every section, on all ranks in the same order; None: sections are run without measuring.

    Attributes:
        sections: Sections that have run so far.
    """

    def __init__(self, stage: Stage, weights: Sequence[Tensor], measure: Measure | None) -> None:
        self.sections: list[TracedSection] = []
        self._stage = stage
        self._weights = weights
        self._measure = measure

    def run(self, x: Tensor | None, batch: Batch) -> Tensor:
        """Run a forward and a backward pass, and return the last layer's value.

        The arguments are those of `Stage.run`. The backward pass starts from a gradient of ones. Each layer has two sections:
        the forward sections come in graph order, the backward sections follow in reverse order. The backward section of a layer
        that no gradient reaches is empty.
        """
        values: dict[str | None, Tensor] = {}
        if self._stage.source is not None:
            values[self._stage.source] = self._stage.arrived(x, batch.num_samples)
        leaves: dict[str, list[Tensor]] = {}
        for ready in self._stage.layers:
            own = leaves[ready.name] = [detached(values[name]).requires_grad_(True) for name in ready.producers]
            arguments = ready, own, self._weights, batch
            values[ready.name] = self.section(ready.name, "forward", self._stage.run_layer, *arguments)
        last = self._stage.layers[-1].name
        gradients = {last: flow.ones_like(values[last])}
        for ready in reversed(self._stage.layers):
            gradient = gradients.pop(ready.name, None)
            self.section(ready.name, "backward", _backward, values[ready.name], gradient)
            for name, leaf in zip(ready.producers, leaves[ready.name]):
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
        return detached(values[last])

    def sum_gradients(self) -> dict[str, Tensor]:
        """Sum the gradients of the weights over the ranks of the stage, and remove them from the leaves.

        Each layer has a section, in which the weights that it is the first to use are summed, as the cost model prices them. A
        layer whose gradients are not summed has none.

        Returns:
            This rank's part of the sums, by the names of the stored weights that have a gradient.
        """
        groups: dict[tuple[str, tuple[Axis, ...], int], dict[str, Tensor]] = {}
        for (name, weight), held in zip(self._stage.weights.stored.items(), self._weights):
            leaf = held.shard if isinstance(held, HeldWeight) else held
            if leaf.grad is not None:
                groups.setdefault((weight.layer, weight.layout.reduced, weight.layout.zero), {})[name] = leaf.grad
                leaf.grad = None
        sums: dict[str, Tensor] = {}
        with flow.no_grad():
            for (layer, axes, _), gradients in groups.items():
                values = list(gradients.values())
                if axes:
                    layouts = [self._stage.weights.stored[name].layout for name in gradients]
                    values = self.section(layer, "gradient", self._summed, values, layouts)
                sums.update(zip(gradients, values))
        return sums

    def _summed(self, gradients: Sequence[Tensor], layouts: Sequence[ParameterLayout]) -> list[Tensor]:
        """Return this rank's sums of the gradients of a layer's weights; gather divided weights as after their update."""
        ranks, zero = self._stage.stepper, layouts[0].zero
        if not zero:
            return sum_gradients(gradients, layouts[0].reduced, ranks)
        sums = update_shards(gradients, layouts, ranks)
        readable_weights(sums, layouts, ranks)
        return sums

    def section(self, layer: str, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run ``function(*arguments)`` as a section, and return its result."""
        run = functools.partial(function, *arguments)
        with self._stage.stepper.logging() as steps:
            result, traffic = (run(), None) if self._measure is None else self._measure(run)
        self.sections.append(TracedSection(layer, phase, tuple(steps), traffic))
        return result


def _backward(value: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and value.requires_grad:
        flow.autograd.backward([value], [gradient])
