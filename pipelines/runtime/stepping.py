"""The ranks of a model or of a stage, and the collectives between them.

`Ranks` is the part that running a model needs; exported files contain it. `Stepper` can also log the communication steps that run
in the forward and backward pass, with the bytes of their tensors. Verification compares this log with the priced steps, which
:mod:`autoddl.costmodel.layerwork` and :mod:`autoddl.costmodel.redistribution` list.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis

from .backend import Backend
from .comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter, shift
from .comm.mesh import RankAxis
from .load import load_oneflow

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

if TYPE_CHECKING:
    from .recording import Recorder

__all__ = ["Ranks", "Stepper", "num_bytes"]

Tensor = Any


def num_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Ranks:
    """The ranks ``first_rank`` to ``first_rank + num_ranks - 1`` of the job, counted from 0, and their collectives.

    Tensors are local. Every collective is differentiable. Its backward pass is the adjoint collective, which sends the same number
    of bytes. All ranks must call the same methods in the same order.

    Args:
        num_ranks: Number of ranks.
        backend: Where their tensors lie, and in which types they compute.
        first_rank: The lowest rank in the job.
    """

    def __init__(self, num_ranks: int, backend: Backend, first_rank: int = 0):
        self.num_ranks = num_ranks
        self.backend = backend
        self.first_rank = first_rank

    @property
    def rank(self) -> int:
        """The rank of this process, relative to ``first_rank``."""
        return flow.env.get_rank() - self.first_rank

    def axis(self, axis: Axis) -> RankAxis:
        """Convert a mesh axis of these ranks to an axis of the ranks of the job."""
        return RankAxis(axis.size, axis.stride, self.num_ranks, self.first_rank, self.backend.handshake)

    def mesh(self, *lengths: int) -> Any:
        """Return OneFlow's placement of these ranks, in ascending order, on a mesh with axes of these lengths."""
        ranks = np.arange(self.first_rank, self.first_rank + self.num_ranks)
        return self.backend.placement(ranks.reshape(lengths or (self.num_ranks,)).tolist())

    # ---- Along one axis ----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """S(dim) -> B: each rank sends (p - 1) / p of the output."""
        return self._communicate(lambda t: all_gather(t, self.axis(axis), dim), x, "all-gather", axis, axis.size)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """P -> S(dim): each rank sends (p - 1) / p of the input."""
        return self._communicate(lambda t: reduce_scatter(t, self.axis(axis), dim), x, "reduce-scatter", axis)

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """P -> B: each rank sends 2 (p - 1) / p of the tensor."""
        return self._communicate(lambda t: all_reduce(t, self.axis(axis)), x, "all-reduce", axis)

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """S(concat_dim) -> S(split_dim): each rank sends (p - 1) / p of the tensor."""
        return self._communicate(lambda t: all_to_all(t, self.axis(axis), split_dim, concat_dim), x, "all-to-all", axis)

    def shift(self, x: Tensor, axis: Axis, backwards: bool = False) -> Tensor:
        """Send a tensor to the next rank along a ring, and return that of the previous one; without autograd.

        ``backwards``: to the previous one, from the next one.
        """
        return self._communicate(lambda t: shift(t, self.axis(axis), backwards), x, "shift", axis)

    def _communicate(
        self, run: Callable[[Tensor], Tensor], x: Tensor, collective: str, axis: Axis, factor: int = 1
    ) -> Tensor:
        """Run a collective on ``factor`` times the bytes of ``x``. `Stepper` logs and records the step here."""
        return run(x)

    # ---- Along axes of several network levels ------------------------------------------------------------------------

    def gather(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """All-gather along several axes. The outermost, slowest level comes first, while the tensor is small."""
        for axis in axes:
            x = self.all_gather(x, axis, dim)
        return x

    def scatter(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """Reduce-scatter along several axes, the innermost level first."""
        for axis in reversed(axes):
            x = self.reduce_scatter(x, axis, dim)
        return x

    def sum(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """All-reduce a small tensor along several axes, the innermost level first."""
        for axis in reversed(axes):
            x = self.all_reduce(x, axis)
        return x

    def reduce(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """Sum a vector: reduce-scatter along inner axes, all-reduce along the outermost axis, all-gather along inner axes."""
        return self.reduce_between(x, axes[1:], lambda own: self.all_reduce(own, axes[0])) if axes else x

    def reduce_between(self, x: Tensor, axes: Sequence[Axis], between: Callable[[Tensor], Tensor]) -> Tensor:
        """Sum a vector over axes of these ranks and over further ranks.

        Args:
            x: A vector.
            axes: Axes of these ranks, along which the vector is reduce-scattered at first and all-gathered at last.
            between: Sums each slice over the further ranks.
        """
        parts, length = prod(axis.size for axis in axes), x.shape[0]
        if length % parts:
            x = flow.cat([x, flow.zeros(parts - length % parts, dtype=x.dtype, device=x.device)], dim=0)
        x = self.gather(between(self.scatter(x, axes, 0)), axes, 0)
        return x[:length] if x.shape[0] != length else x


class Stepper(Ranks):
    """Ranks that can log their communication steps, and record when they run.

    Attributes:
        recorder: Records the steps and layers that run (:mod:`.recording`); None: nothing is recorded.
    """

    def __init__(self, num_ranks: int, backend: Backend, first_rank: int = 0):
        super().__init__(num_ranks, backend, first_rank)
        self._log: list[Step] | None = None
        self.recorder: Recorder | None = None

    def _communicate(
        self, run: Callable[[Tensor], Tensor], x: Tensor, collective: str, axis: Axis, factor: int = 1
    ) -> Tensor:
        if self._log is None and self.recorder is None:
            return run(x)
        return self.run_steps(run, x, [Step(Collective(collective), axis, float(num_bytes(x) * factor))])

    def run_steps(self, run: Callable[[Tensor], Tensor], x: Tensor, steps: Sequence[Step]) -> Tensor:
        """Run communication that consists of some steps: log them, and record when they run."""

        def logged(t: Tensor) -> Tensor:
            for step in steps:
                t = self._logged(t, step)
            return run(t)

        return logged(x) if self.recorder is None else self.recorder.communicate(steps, logged, x)

    def reduce_between(self, x: Tensor, axes: Sequence[Axis], between: Callable[[Tensor], Tensor]) -> Tensor:
        run = super().reduce_between
        if self.recorder is None:
            return run(x, axes, between)
        with self.recorder.summing_gradients():
            return run(x, axes, between)

    @contextlib.contextmanager
    def logging(self) -> Iterator[list[Step]]:
        """Log every communication step that runs in this context, including backward steps, in the returned list."""
        outer, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = outer

    @contextlib.contextmanager
    def not_logging(self) -> Iterator[None]:
        """Log no steps in this context."""
        outer, self._log = self._log, None
        try:
            yield
        finally:
            self._log = outer

    def run(self, x: Tensor, step: Step, dim: int = 0) -> Tensor:
        """Run a step: an all-gather or reduce-scatter along dimension ``dim``, or an all-reduce."""
        if step.collective is Collective.ALL_GATHER:
            return self.all_gather(x, step.axis, dim)
        if step.collective is Collective.REDUCE_SCATTER:
            return self.reduce_scatter(x, step.axis, dim)
        assert step.collective is Collective.ALL_REDUCE, step
        return self.all_reduce(x, step.axis)

    def _logged(self, x: Tensor, step: Step) -> Tensor:
        """Log the step now and its adjoint in the backward pass. Returns ``x``, which the step must be applied to."""
        if self._log is None or step.axis.size == 1:
            return x
        self._log.append(step)
        if not (x.requires_grad and flow.is_grad_enabled()):
            return x

        def backward(ctx: Any, dy: Tensor) -> Tensor:
            if self._log is not None:
                self._log.append(step.adjoint())
            return dy.clone()

        return _Function.apply("log", lambda ctx, t: t.clone(), backward, x)
