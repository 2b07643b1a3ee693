"""Executing the communication steps of the cost model on local tensors.

The lists come from :mod:`autoddl.costmodel.collectives` and :mod:`autoddl.costmodel.redistribution`, the very ones that are
priced; `collectives` does what each asks for.  A `Stepper` can keep a log of the steps that really ran, forward and backward,
with the bytes of the tensors that they ran on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from autoddl.costmodel.collectives import Collective, Step, all_reduce_steps, gather_steps, scatter_steps
from autoddl.costmodel.distribution import Axis

from .collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from .load import load_oneflow
from .mesh import RankAxis

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["Stepper", "num_bytes"]

Tensor = Any


def num_bytes(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


class Stepper:
    """Runs steps on the ranks ``first_rank`` to ``first_rank + num_ranks - 1``; all of them call, in the same order.

    Tensors are local; everything is differentiable, and sends in the backward pass what the adjoint step sends.
    """

    def __init__(self, num_ranks: int, first_rank: int = 0):
        self.num_ranks = num_ranks
        self.first_rank = first_rank
        self._log: list[Step] | None = None

    @property
    def rank(self) -> int:
        """This rank's place in the mesh."""
        return flow.env.get_rank() - self.first_rank

    def axis(self, axis: Axis) -> RankAxis:
        """A mesh axis of the cost model, as collectives know it."""
        return RankAxis(axis.size, axis.stride, self.num_ranks, self.first_rank)

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

    def gather(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """All-gather along ``dim`` over axes of several levels, the outermost first."""
        for step in gather_steps(axes, num_bytes(x) * prod(axis.size for axis in axes)):
            x = self.run(x, step, dim)
        return x

    def scatter(self, x: Tensor, axes: Sequence[Axis], dim: int) -> Tensor:
        """Reduce-scatter along ``dim`` over axes of several levels, the innermost first."""
        for step in scatter_steps(axes, num_bytes(x)):
            x = self.run(x, step, dim)
        return x

    def reduce(self, x: Tensor, axes: Sequence[Axis]) -> Tensor:
        """All-reduce of a vector over axes of several levels; only 1/inner of it crosses the outermost."""
        inner = prod(axis.size for axis in axes[1:])
        length = x.shape[0]
        if length % inner:
            x = flow.cat([x, flow.zeros(inner - length % inner, dtype=x.dtype)])
        for step in all_reduce_steps(axes, num_bytes(x)):
            x = self.run(x, step, 0)
        return x[:length] if x.shape[0] != length else x

    def run(self, x: Tensor, step: Step, dim: int = 0) -> Tensor:
        """One all-gather, reduce-scatter (both along ``dim``) or all-reduce."""
        axis = self.axis(step.axis)
        x = self.logged(x, step)
        if step.collective is Collective.ALL_GATHER:
            return all_gather(x, axis, dim)
        if step.collective is Collective.REDUCE_SCATTER:
            return reduce_scatter(x, axis, dim)
        assert step.collective is Collective.ALL_REDUCE, step
        return all_reduce(x, axis)

    def exchange(self, x: Tensor, axis: Axis, split_dim: int, concat_dim: int) -> Tensor:
        """One all-to-all."""
        x = self.logged(x, Step(Collective.ALL_TO_ALL, axis, num_bytes(x)))
        return all_to_all(x, self.axis(axis), split_dim, concat_dim)

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
