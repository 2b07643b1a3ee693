"""The ranks that run a model or a stage of one, and the collectives between them.

`Ranks` is all that a model needs, in an exported file too.  A `Stepper` can keep a log of the steps that really ran, forward and
backward, with the bytes of the tensors that they ran on: they are to be the steps that :mod:`autoddl.costmodel.layerwork` and
:mod:`autoddl.costmodel.redistribution` list, which are priced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis

from .comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from .comm.mesh import RankAxis
from .load import load_oneflow

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["Ranks", "Stepper", "num_bytes"]

Tensor = Any


def num_bytes(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Ranks:
    """The ranks ``first_rank`` to ``first_rank + num_ranks - 1`` of the job, counted from 0, and their collectives.

    Tensors are local. Everything is differentiable: the backward pass runs the adjoint of each collective, which sends as much.
    All ranks call, in the same order.
    """

    def __init__(self, num_ranks: int, first_rank: int = 0):
        self.num_ranks = num_ranks
        self.first_rank = first_rank

    @property
    def rank(self) -> int:
        """This process's rank, counted from the first one."""
        return flow.env.get_rank() - self.first_rank

    def axis(self, axis: Axis) -> RankAxis:
        """A mesh axis as the collectives of the job know it."""
        return RankAxis(axis.size, axis.stride, self.num_ranks, self.first_rank)

    def mesh(self, *lengths: int) -> Any:
        """The placement of all ranks in their order, on mesh axes of these lengths."""
        ranks = np.arange(self.first_rank, self.first_rank + self.num_ranks)
        return flow.placement("cpu", ranks.reshape(lengths or (self.num_ranks,)).tolist())

    # ---- Along one axis ----------------------------------------------------------------------------------------------

    def all_gather(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """S(dim) -> B: each rank sends (p - 1) / p of the output."""
        return all_gather(self._noted(x, "all-gather", axis, axis.size), self.axis(axis), dim)

    def reduce_scatter(self, x: Tensor, axis: Axis, dim: int) -> Tensor:
        """P -> S(dim): each rank sends (p - 1) / p of the input."""
        return reduce_scatter(self._noted(x, "reduce-scatter", axis), self.axis(axis), dim)

    def all_reduce(self, x: Tensor, axis: Axis) -> Tensor:
        """P -> B: each rank sends 2 (p - 1) / p of the tensor."""
        return all_reduce(self._noted(x, "all-reduce", axis), self.axis(axis))

    def all_to_all(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """S(concat_dim) -> S(split_dim): each rank sends (p - 1) / p of the tensor."""
        return all_to_all(self._noted(x, "all-to-all", axis), self.axis(axis), split_dim, concat_dim)

    def _noted(self, x: Tensor, collective: str, axis: Axis, factor: int = 1) -> Tensor:
        """``x``, on which a collective is about to run; it is of ``factor`` times as many bytes."""
        return x

    # ---- Along axes of several network levels ------------------------------------------------------------------------

    def gather(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """All-gathers, the outermost level first, while the tensor is small."""
        for axis in axes:
            x = self.all_gather(x, axis, dim)
        return x

    def scatter(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """Reduce-scatters, the innermost level first."""
        for axis in reversed(axes):
            x = self.reduce_scatter(x, axis, dim)
        return x

    def sum(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """All-reduces of a small tensor, the innermost level first."""
        for axis in reversed(axes):
            x = self.all_reduce(x, axis)
        return x

    def reduce(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """The sum of a vector: scattered inside, all-reduced along the outermost axis, gathered inside."""
        return self.reduce_between(x, axes[1:], lambda own: self.all_reduce(own, axes[0])) if axes else x

    def reduce_between(self, x: Tensor, axes: Sequence[Axis], between: Callable[[Tensor], Tensor]) -> Tensor:
        """The sum of a vector over the axes and over other ranks: scattered here, each slice summed ``between`` them, gathered."""
        parts, length = prod(axis.size for axis in axes), x.shape[0]
        if length % parts:
            x = flow.cat([x, flow.zeros(parts - length % parts, dtype=x.dtype)], dim=0)
        x = self.gather(between(self.scatter(x, axes, 0)), axes, 0)
        return x[:length] if x.shape[0] != length else x


class Stepper(Ranks):
    """Ranks that can log what runs between them."""

    def __init__(self, num_ranks: int, first_rank: int = 0):
        super().__init__(num_ranks, first_rank)
        self._log: list[Step] | None = None

    @contextlib.contextmanager
    def logging(self) -> Iterator[list[Step]]:
        """A list that grows by every step that runs; backward passes of what ran inside count too, while it lasts."""
        outer, self._log = self._log, []
        try:
            yield self._log
        finally:
            self._log = outer

    @contextlib.contextmanager
    def not_logging(self) -> Iterator[None]:
        """Steps that run meanwhile are in no log."""
        outer, self._log = self._log, None
        try:
            yield
        finally:
            self._log = outer

    def run(self, x: Tensor, step: Step, dim: int = 0) -> Tensor:
        """One all-gather, reduce-scatter (both along ``dim``) or all-reduce."""
        if step.collective is Collective.ALL_GATHER:
            return self.all_gather(x, step.axis, dim)
        if step.collective is Collective.REDUCE_SCATTER:
            return self.reduce_scatter(x, step.axis, dim)
        assert step.collective is Collective.ALL_REDUCE, step
        return self.all_reduce(x, step.axis)

    def _noted(self, x: Tensor, collective: str, axis: Axis, factor: int = 1) -> Tensor:
        if self._log is None:
            return x
        return self.logged(x, Step(Collective(collective), axis, float(num_bytes(x) * factor)))

    def logged(self, x: Tensor, step: Step) -> Tensor:
        """``x``, on which the step is about to run: an entry in the log now, and one when the gradient has come back through it."""
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
