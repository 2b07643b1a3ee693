"""Records where the time of a training step goes on this rank: computation, communication, waiting and dispatch.

OneFlow returns from an operation before it has run.  While a step is recorded, the rank therefore waits after each layer and
around each communication step, so that the time in between belongs to one of them.  A recorded step takes longer than others, by
what would have overlapped; recordings say where time goes, not how long an undisturbed step takes.

Time between two waits is *computation* of the present layer and phase.  The part of it in which Python was busy, before it waited,
is *dispatch*: operations that are launched later than they could run.  Time around a communication step is *communication*; how
much of it a rank merely waited for others is seen when the spans of all ranks are together (:mod:`autoddl.pipelines.spans`).

Layers and steps have the names of those that price the plan.  A layer's backward pass is from the gradient of its output to those
of its inputs; what autograd does in between for other layers counts for it, and what it adds up between two layers for none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from autoddl.costmodel.collectives import Step

from ..schedule import Kind
from ..spans import Communication, Recorded, Span
from .detaching import detached
from .load import load_oneflow
from .pipeline.waiting import wait_for

flow: Any = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["LayerRanks", "RecordedWork", "Recorder", "Tracer"]

Tensor = Any
#: The phases of tasks, as the price calls them; the parts of a divided backward pass are one phase.
_PHASES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward",
    Kind.BACKWARD_WEIGHT: "backward",
    Kind.RECOMPUTE: "recomputation",
}
#: Computations that are shorter are left out [s].
_NEGLIGIBLE_S = 2e-6


class Recorder:
    """The spans of one rank.

    Attributes:
        spans: what was recorded, in the order of time; times are those of the machine's monotonic clock.
        begun, ended: time at which all ranks had begun the step, and at which this one had ended it.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.begun, self.ended = 0.0, 0.0
        self._layer, self._phase = "", ""
        self._since: float | None = None  # the end of the last wait; None outside of a task

    # ---- Steps and tasks ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record the step that runs in this context, in place of an earlier one; all ranks enter."""
        self.spans.clear()
        flow.comm.barrier()
        self.begun = time.monotonic()
        yield
        flow._oneflow_internal.eager.Sync()
        self.ended = time.monotonic()

    def record(self) -> Recorded:
        """Return what was recorded, with times since the beginning of the step, waiting between spans included."""
        spans, now = [], self.begun
        for span in sorted(self.spans, key=lambda span: span.start):
            if span.start - now > _NEGLIGIBLE_S:
                spans.append(Span("waiting", "", span.phase, now, span.start, now))
            spans.append(span)
            now = max(now, span.end)
        return Recorded(tuple(span.since(self.begun) for span in spans), self.ended - self.begun)

    @contextlib.contextmanager
    def task(self, layer: str, phase: str) -> Iterator[None]:
        """Record what runs in this context as computation of a layer and phase, until a layer begins in it; waits at the end."""
        self._layer, self._phase, self._since = layer, phase, time.monotonic()
        yield
        self.cut(None)
        self._since = None

    def cut(self, tensor: Tensor | None) -> None:
        """End the present computation when ``tensor`` is computed; None: when all that was launched has run."""
        if self._since is None:
            return
        launched = time.monotonic()
        end = _wait(tensor)
        if end - self._since > _NEGLIGIBLE_S:
            self.spans.append(Span("computation", self._layer, self._phase, self._since, end, launched))
        self._since = end

    @contextlib.contextmanager
    def of_layer(self, layer: str) -> Iterator[None]:
        """Attribute what communicates in this context to a layer."""
        before, self._layer = self._layer, layer
        yield
        self._layer = before

    @contextlib.contextmanager
    def summing_gradients(self) -> Iterator[None]:
        """Attribute what runs in this context to the sum of gradients, also inside of a backward pass."""
        before = self._layer, self._phase
        self.cut(None)
        self._layer, self._phase = "", "gradient"
        yield
        self.cut(None)
        self._layer, self._phase = before

    # ---- Layers ------------------------------------------------------------------------------------------------------

    def begin_pass(self, phase: str) -> None:
        """Attribute the computations that follow to a phase, of no layer yet."""
        self.cut(None)
        self._layer, self._phase = "", phase

    def begin_layer(self, layer: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of a layer, at which its forward pass begins and its backward pass ends."""
        self._layer = layer

        def backward(ctx: Any, dx: Tensor) -> Tensor:
            self._layer, self._phase = layer, "backward"
            self.cut(dx)
            self._layer = ""
            return detached(dx)

        if not flow.is_grad_enabled():
            return list(inputs)
        return [
            _Function.apply("record_input", lambda ctx, t: detached(t), backward, x) if x.requires_grad else x
            for x in inputs
        ]

    def end_layer(self, layer: str, y: Tensor) -> Tensor:
        """Return the output of a layer, at which its forward pass ends and its backward pass begins."""
        self.cut(y)
        if not (y.requires_grad and flow.is_grad_enabled()):
            return y

        def backward(ctx: Any, dy: Tensor) -> Tensor:
            self.cut(dy)
            self._layer, self._phase = layer, "backward"
            return detached(dy)

        return _Function.apply("record_layer", lambda ctx, t: detached(t), backward, y)

    # ---- Communication -----------------------------------------------------------------------------------------------

    def communicate(self, steps: Sequence[Step], run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Run communication that consists of some steps and record it, and its adjoint in the backward pass."""
        if all(step.axis.size == 1 for step in steps):
            return run(x)
        layer, begun = self._layer, 0.0

        def begin(t: Tensor) -> Tensor:
            nonlocal begun
            self.cut(t)
            begun = time.monotonic()
            return detached(t)

        def end(t: Tensor, what: Communication) -> Tensor:
            launched = time.monotonic()
            finished = _wait(t)
            self.spans.append(Span("communication", layer, self._phase, begun, finished, launched, what))
            if self._since is not None:
                self._since = finished
            return detached(t)

        there = Communication.of(steps)
        if not (x.requires_grad and flow.is_grad_enabled()):
            return end(run(begin(x)), there)
        back = Communication.of([step.adjoint() for step in steps])
        x = _Function.apply("record_begin", lambda ctx, t: begin(t), lambda ctx, dx: end(dx, back), x)
        return _Function.apply("record_end", lambda ctx, t: end(t, there), lambda ctx, dy: begin(dy), run(x))


def _wait(tensor: Tensor | None) -> float:
    """Wait until a tensor is computed, or everything; returns the time."""
    if tensor is None:
        flow._oneflow_internal.eager.Sync()
        return time.monotonic()
    return wait_for(tensor)


class Tracer(Protocol):
    """Runs the steps of a training, and decides which of them are recorded."""

    def run(self, step: Callable[[Recorder | None], Any]) -> Any:
        """Return the result of ``step``, which is called with a recorder if it is to be recorded."""


class LayerRanks:
    """The ranks of a stage, whose communication counts for one layer, whenever it runs.

    Args:
        ranks: The ranks.
        recorder: Records their steps.
        layer: Name of the layer.
    """

    def __init__(self, ranks: Any, recorder: Recorder, layer: str) -> None:
        self._ranks, self._recorder, self._layer = ranks, recorder, layer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._ranks, name)
        if not callable(value):
            return value

        def run(*arguments: Any, **options: Any) -> Any:
            with self._recorder.of_layer(self._layer):
                return value(*arguments, **options)

        return run


class RecordedWork:
    """The computations of a rank (`pipeline.work.Work`), recorded.

    The engine does nothing else of weight: between computations a rank waits, for tensors of other stages or for gradient sums.

    Args:
        work: The computations.
        recorder: Records them.
    """

    def __init__(self, work: Any, recorder: Recorder) -> None:
        self._work, self._recorder = work, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def compute(self, run: Any, x: Tensor | None) -> Tensor | None:
        with self._recorder.task("", _PHASES[run.task.kind]):
            return self._work.compute(run, x)

    def total(self, action: Any, transport: Any) -> Tensor | None:
        with self._recorder.task("", "gradient"):
            return self._work.total(action, transport)

    def set_gradient(self, stage: int, action: Any, total: Tensor) -> None:
        with self._recorder.task("", "gradient"):
            self._work.set_gradient(stage, action, total)

    def update(self, action: Any) -> None:
        with self._recorder.task("", "optimizer step"):
            self._work.update(action)
