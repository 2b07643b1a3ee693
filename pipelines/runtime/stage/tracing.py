"""One training pass in sections, so that each phase of each layer can be measured by itself.

Between layers the graph of autograd is cut: every layer reads leaves, and its backward pass is started with the gradient that its
readers' leaves have collected. Gradients of parameters are left to the caller.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.collectives import Step

from ..detaching import detached
from ..load import load_oneflow
from ..setting import Batch
from ..wire import Traffic
from .stage import Stage

flow = load_oneflow()

__all__ = ["Measure", "StageTracer", "TracedSection"]

Tensor = Any
#: Runs a function and counts what all ranks send meanwhile, such as ``wire.measure`` with its baseline.
Measure = Callable[[Callable[[], Any]], "tuple[Any, Traffic]"]


@dataclass(frozen=True)
class TracedSection:
    """One phase of one layer, run by itself.

    Attributes:
        layer: its name.
        phase: ``forward``, ``backward`` (both with the redistributions of the layer's inputs) or ``gradient``.
        steps: the communication that this rank took part in, as it ran.
        traffic: what all ranks sent; None where it was not measured.
    """

    layer: str
    phase: str
    steps: tuple[Step, ...]
    traffic: Traffic | None


class StageTracer:
    """One pass through a stage, phase by phase.

    Args:
        stage: whose layers run.
        weights: its local weights.
        measure: called with every section, on all ranks in the same order.

    Attributes:
        sections: so far.
    """

    def __init__(self, stage: Stage, weights: Sequence[Tensor], measure: Measure | None) -> None:
        self.sections: list[TracedSection] = []
        self._stage = stage
        self._weights = weights
        self._measure = measure

    def run(self, x: Tensor | None, batch: Batch) -> Tensor:
        """The last layer's value; arguments as of `Stage.run`. Backward it goes from a gradient of one.

        There are two sections for each layer, in the order of the layers forward and then against it backward; a layer that no
        gradient reaches has an empty one.
        """
        values: dict[str | None, Tensor] = {self._stage.given: x}
        leaves: dict[str, list[Tensor]] = {}
        for ready in self._stage.layers:
            own = leaves[ready.name] = [detached(values[name]).requires_grad_(True) for name in ready.producers]
            arguments = ready, own, self._weights, batch
            values[ready.name] = self.section(ready.name, "forward", self._stage.run_layer, *arguments)
        last = self._stage.layers[-1].name
        gradients = {last: flow.ones_like(values[last])}
        for ready in reversed(self._stage.layers):
            gradient = gradients.pop(ready.name, None)
            self.section(ready.name, "backward", _go_back, values[ready.name], gradient)
            for name, leaf in zip(ready.producers, leaves[ready.name]):
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad
        return detached(values[last])

    def section(self, layer: str, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a section; what it returns."""
        run = functools.partial(function, *arguments)
        with self._stage.stepper.logging() as steps:
            result, traffic = (run(), None) if self._measure is None else self._measure(run)
        self.sections.append(TracedSection(layer, phase, tuple(steps), traffic))
        return result


def _go_back(value: Tensor, gradient: Tensor | None) -> None:
    if gradient is not None and value.requires_grad:
        flow.autograd.backward([value], [gradient])
