"""One training pass in sections, so that each phase of each layer can be measured by itself.

Between layers the graph of autograd is cut: every layer reads leaves, its backward pass is started with the gradient that its
readers' leaves have collected, and gradients of parameters are summed at the end, layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.collectives import Step

from .load import load_oneflow
from .program import LocalWeights, Program, RunLayer
from .setting import Batch
from .wire import Traffic

flow = load_oneflow()

__all__ = ["Measure", "TracedSection", "trace"]

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


def trace(program: Program, batch: Batch, measure: Measure | None) -> tuple[Tensor, list[TracedSection]]:
    """The loss (the output, without one) and all sections; gradients are added to the parameters' as ``backward`` would.

    Args:
        measure: called with every section, on all ranks in the same order.
    """
    tracer = _Tracer(program, measure)
    tracer.forward(batch)
    tracer.backward()
    tracer.sum_gradients()
    return tracer.values[program.layers[-1].name].detach(), tracer.sections


class _Tracer:
    def __init__(self, program: Program, measure: Measure | None):
        self.program = program
        self.measure = measure
        self.sections: list[TracedSection] = []
        self.values: dict[str, Tensor] = {}
        self.leaves: dict[str, list[Tensor]] = {}

    def forward(self, batch: Batch) -> None:
        weights = LocalWeights(is_summing=False)
        for ready in self.program.layers:
            leaves = [self.values[name].detach().requires_grad_(True) for name in ready.producers]

            def run(ready: RunLayer = ready, leaves: list[Tensor] = leaves) -> Tensor:
                inputs = self.program.arriving(ready, leaves, batch.num_samples)
                return ready.body(inputs, weights.of(ready), batch)

            self.leaves[ready.name] = leaves
            self.values[ready.name] = self.section(ready.name, "forward", run)

    def backward(self) -> None:
        last = self.program.layers[-1].name
        gradients = {last: flow.ones_like(self.values[last])}
        for ready in reversed(self.program.layers):
            value, gradient = self.values[ready.name], gradients.pop(ready.name, None)
            if gradient is None or not value.requires_grad:
                continue

            def run(value: Tensor = value, gradient: Tensor = gradient) -> None:
                flow.autograd.backward([value], [gradient])

            self.section(ready.name, "backward", run)
            for name, leaf in zip(ready.producers, self.leaves[ready.name]):
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad

    def sum_gradients(self) -> None:
        for ready in self.program.layers:
            for group in ready.groups:
                if group.reduced:
                    self.section(ready.name, "gradient", group.sum_leaves)
                else:
                    group.sum_leaves()

    def section(self, layer: str, phase: str, run: Callable[[], Any]) -> Any:
        with self.program.stepper.logging() as steps:
            result, traffic = (run(), None) if self.measure is None else self.measure(run)
        self.sections.append(TracedSection(layer, phase, tuple(steps), traffic))
        return result
