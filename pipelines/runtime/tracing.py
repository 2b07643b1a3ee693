"""One training pass in sections, so that each phase of each layer can be measured by itself.

Between layers the graph of autograd is cut: every layer reads leaves, its backward pass is started with the gradient that its
readers' leaves have collected, and gradients of parameters are summed at the end, layer by layer.

`LayerTracer` does that for any consecutive layers, such as a stage of a pipeline; `trace` for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from autoddl.costmodel.collectives import Step

from .detaching import detached
from .load import load_oneflow
from .program import LocalWeights, Program
from .sequence import LayerSequence, Ready
from .setting import Batch
from .wire import Traffic

flow = load_oneflow()

__all__ = ["LayerTracer", "Measure", "TracedSection", "trace"]

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
    weights = LocalWeights(is_summing=False)
    tracer = LayerTracer(program.sequence, program.layers, weights.of, measure)
    tracer.forward({}, batch)
    tracer.backward()
    for ready in program.layers:
        for group in ready.groups:
            if group.reduced:
                tracer.section(ready.name, "gradient", group.sum_leaves)
            else:
                group.sum_leaves()
    return detached(tracer.values[program.layers[-1].name]), tracer.sections


class LayerTracer(Generic[Ready]):
    """One pass through some layers of a sequence, phase by phase.

    Args:
        sequence: what runs them.
        layers: in order.
        weights_of: the local weights of a layer.
        measure: called with every section, on all ranks in the same order.

    Attributes:
        sections: so far; two for each layer, in the order of the layers forward and then against it backward.
        values: what the layers gave.
    """

    def __init__(
        self,
        sequence: LayerSequence,
        layers: Sequence[Ready],
        weights_of: Callable[[Ready], Sequence[Tensor]],
        measure: Measure | None,
    ) -> None:
        self.sections: list[TracedSection] = []
        self.values: dict[str, Tensor] = {}
        self._sequence = sequence
        self._layers = layers
        self._weights_of = weights_of
        self._measure = measure
        self._leaves: dict[str, list[Tensor]] = {}

    def forward(self, given: Mapping[str, Tensor], batch: Batch) -> None:
        """``given``: this rank's parts of what the layers read from others than themselves."""
        self.values.update(given)
        for ready in self._layers:
            leaves = [detached(self.values[name]).requires_grad_(True) for name in ready.producers]

            def run(ready: Ready = ready, leaves: list[Tensor] = leaves) -> Tensor:
                inputs = self._sequence.arriving(ready, leaves, batch.num_samples)
                return ready.body(inputs, self._weights_of(ready), batch)

            self._leaves[ready.name] = leaves
            self.values[ready.name] = self.section(ready.name, "forward", run)

    def backward(self) -> None:
        """From the gradient one of the last layer's value; a layer that no gradient reaches has an empty section."""
        last = self._layers[-1].name
        gradients = {last: flow.ones_like(self.values[last])}
        for ready in reversed(self._layers):
            value, gradient = self.values[ready.name], gradients.pop(ready.name, None)

            def run(value: Tensor = value, gradient: Tensor | None = gradient) -> None:
                if gradient is not None and value.requires_grad:
                    flow.autograd.backward([value], [gradient])

            self.section(ready.name, "backward", run)
            for name, leaf in zip(ready.producers, self._leaves[ready.name]):
                if leaf.grad is not None:
                    gradients[name] = gradients[name] + leaf.grad if name in gradients else leaf.grad

    def section(self, layer: str, phase: str, run: Callable[[], Any]) -> Any:
        """Run a section; what it returns."""
        with self._sequence.stepper.logging() as steps:
            result, traffic = (run(), None) if self._measure is None else self._measure(run)
        self.sections.append(TracedSection(layer, phase, tuple(steps), traffic))
        return result
