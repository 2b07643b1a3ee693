"""Parameters on the ranks: OneFlow global tensors at the plan's layouts, and the sums of their gradients.

A parameter is one global tensor whose SBP is the plan's (a linear layer's weight, (out, in) in OneFlow, is (B, S(0), S(1)) on
its axes (p0, p1, p2)).  Its logical value is the module's with rows and columns permuted (:mod:`layouts`), which element-wise
optimizers do not notice; ``state_dict`` undoes it.  Layers compute with ``to_local()``, which shares the storage.

Measured on OneFlow 0.9.0, CPU ranks: SGD, momentum, Adam and AdamW on such tensors agree bitwise with one device and send
nothing.  OneFlow's ``clip_grad_norm_`` is right too, on parameters of one mesh (`common_mesh`), but gathers all gradients.
LAMB is not usable on global tensors that are split: its update is made on a re-boxed copy and lost, in silence.

**Gradients.**  All parameters of a layer that are summed over the same ranks pass through one autograd node: local tensors
come out, and when all local gradients have come back, those of tied layers included, it sums them in one all-reduce per step of
:func:`autoddl.costmodel.layerwork.all_reduce_steps`.  While gradients accumulate over micro-batches (`ParameterStore.no_sync`)
layers use leaves of their own that share the storage; the node adds what these have collected.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.strategy import Strategy

from .layouts import ParameterLayout
from .load import load_oneflow
from .stepping import Stepper

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["ParameterGroup", "StoredParameter", "common_mesh", "placed_empty"]

Tensor = Any


def common_mesh(strategies: Iterable[Strategy], num_ranks: int) -> tuple[Axis, ...] | None:
    """The mesh, outermost axis first, that all axes of all strategies can be put together from; None where there is none.

    On one mesh parameters can be used together, as ``clip_grad_norm_`` does.
    """
    cuts = {1, num_ranks}
    for strategy in strategies:
        for is_embedding in (False, True):
            axes = [axis for which in range(3) for axis in strategy.axes(which, is_embedding)]
            cuts |= {axis.stride for axis in axes} | {axis.stride * axis.size for axis in axes}
    ordered = sorted(cuts)
    if any(larger % smaller for smaller, larger in zip(ordered, ordered[1:])):
        return None
    return tuple(Axis(end // stride, stride) for stride, end in reversed(list(zip(ordered, ordered[1:]))))


def placed_empty(layout: ParameterLayout, mesh: tuple[Axis, ...] | None, stepper: Stepper, dtype: Any) -> Tensor:
    """An uninitialised global tensor of a layout, on ``mesh`` or, without one, on as few axes as it needs."""
    cutting = {axis: dim for dim, axes in enumerate(layout.axes) for axis in axes}
    if mesh is None:
        cuts = sorted({1, stepper.num_ranks} | {cut for a in cutting for cut in (a.stride, a.stride * a.size)})
        mesh = tuple(Axis(end // stride, stride) for stride, end in reversed(list(zip(cuts, cuts[1:]))))
    states = []
    for part in mesh:
        dims = [dim for a, dim in cutting.items() if a.stride <= part.stride < a.stride * a.size]
        states.append(flow.sbp.split(dims[0]) if dims else flow.sbp.broadcast)
    ranks = np.arange(stepper.first_rank, stepper.first_rank + stepper.num_ranks)
    if mesh:
        ranks = ranks.reshape([axis.size for axis in mesh])
    shape = [length * prod(axis.size for axis in axes) for length, axes in zip(layout.local_shape(), layout.axes)]
    placement = flow.placement("cpu", ranks.tolist())
    return flow.empty(*shape, dtype=dtype, placement=placement, sbp=states or [flow.sbp.broadcast])


class StoredParameter:
    """One parameter: its layout, the global tensor, and a local leaf for accumulation.

    Attributes:
        layout: how it lies.
        tensor: the ``nn.Parameter``, a global tensor.
        leaf: this rank's part, sharing its storage; collects the gradients of micro-batches that are not summed.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        value: np.ndarray,
        mesh: tuple[Axis, ...] | None,
        stepper: Stepper,
        requires_grad: bool = True,
    ):
        self.layout = layout
        self._mesh = mesh
        self._stepper = stepper
        tensor = placed_empty(layout, mesh, stepper, flow.tensor(value[:0]).dtype)
        self.tensor = flow.nn.Parameter(tensor, requires_grad)
        self.assign(value)
        self.leaf = self.local().requires_grad_(requires_grad)

    def local(self) -> Tensor:
        """This rank's part, without history, sharing the storage."""
        return self.tensor.to_local().detach()

    def assign(self, value: np.ndarray) -> None:
        """Take this rank's part of the logical ``value``."""
        _copy_into(self.tensor, flow.tensor(self.layout.take(value, self._stepper.rank)))

    def logical(self, tensor: Tensor | None = None) -> np.ndarray:
        """The logical value, on every rank; all ranks call.  Of another tensor of the same layout (its gradient), if given."""
        tensor = self.tensor if tensor is None else tensor
        local = tensor.to_local().detach()
        for dim, axes in enumerate(self.layout.axes):
            local = self._stepper.gather(local, axes, dim)
        gathered = local.numpy()
        value = np.empty(self.layout.shape, gathered.dtype)
        self.layout.gathered().put(value, gathered, self._stepper.rank)
        return value

    def parts(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """The module's parameters that ``value`` holds, one below the other."""
        start = 0
        for name, rows in self.layout.sources:
            yield name, value[start : start + rows]
            start += rows

    @property
    def num_copies(self) -> int:
        """How many ranks hold each element."""
        return self._stepper.num_ranks // prod(axis.size for axes in self.layout.axes for axis in axes)

    def with_gradient(self, local: Tensor) -> Tensor:
        """A global tensor like this one that holds ``local``."""
        gradient = placed_empty(self.layout, self._mesh, self._stepper, local.dtype)
        _copy_into(gradient, local)
        return gradient


def _copy_into(tensor: Tensor, local: Tensor) -> None:
    flow._C.assign_local_tensor(tensor.to_local(), local.contiguous())  # to_local() shares the storage


class ParameterGroup:
    """Parameters of one layer whose gradients are summed together, over the axes ``reduced``."""

    def __init__(self, parameters: Sequence[StoredParameter], reduced: tuple[Axis, ...], stepper: Stepper):
        self.parameters = tuple(parameters)
        self.reduced = reduced
        self._stepper = stepper

    def summed(self) -> tuple[Tensor, ...]:
        """Local tensors whose gradients arrive, summed over the ranks, in the global parameters."""
        trained = [p for p in self.parameters if p.tensor.requires_grad]
        if not trained or not flow.is_grad_enabled():
            return tuple(parameter.local() for parameter in self.parameters)

        def backward(ctx: Any, *gradients: Tensor) -> Any:
            result = tuple(
                parameter.with_gradient(local)
                for parameter, local in zip(
                    trained, self._sum(trained, [self._with_leaf(p, g) for p, g in zip(trained, gradients)])
                )
            )
            return result if len(result) > 1 else result[0]

        def forward(ctx: Any, *tensors: Tensor) -> Any:
            result = tuple(tensor.to_local() for tensor in tensors)
            return result if len(result) > 1 else result[0]

        outputs = _Function.apply("sum_gradients", forward, backward, *(p.tensor for p in trained))
        found = dict(zip(map(id, trained), outputs if len(trained) > 1 else [outputs]))
        return tuple(found[id(p)] if id(p) in found else p.local() for p in self.parameters)

    def unsummed(self) -> tuple[Tensor, ...]:
        """Local leaves that collect this rank's gradients."""
        return tuple(parameter.leaf for parameter in self.parameters)

    def sum_leaves(self) -> None:
        """Sum what the leaves have collected into the gradients of the global parameters."""
        trained = [p for p in self.parameters if p.tensor.requires_grad and p.leaf.grad is not None]
        if not trained:
            return
        with flow.no_grad():
            gradients = self._sum(trained, [p.leaf.grad for p in trained])
            for parameter, local in zip(trained, gradients):
                parameter.leaf.grad = None
                found = parameter.with_gradient(local)
                before = parameter.tensor.grad
                parameter.tensor.grad = found if before is None else before + found

    def _with_leaf(self, parameter: StoredParameter, gradient: Tensor) -> Tensor:
        waiting = parameter.leaf.grad
        if waiting is None:
            return gradient
        parameter.leaf.grad = None
        return gradient + waiting

    def _sum(self, parameters: Sequence[StoredParameter], gradients: Sequence[Tensor]) -> list[Tensor]:
        """All-reduced over the group's axes, as one vector."""
        if not self.reduced:
            return list(gradients)
        flat = (
            flow.cat([gradient.reshape(-1) for gradient in gradients])
            if len(gradients) > 1
            else gradients[0].reshape(-1)
        )
        flat = self._stepper.reduce(flat, self.reduced)
        result, start = [], 0
        for gradient in gradients:
            result.append(flat[start : start + gradient.numel()].reshape(*gradient.shape))
            start += gradient.numel()
        return result
