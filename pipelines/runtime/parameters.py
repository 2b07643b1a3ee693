"""Parameters on the ranks: OneFlow global tensors at the plan's layouts, and the sums of their gradients.

A parameter is one global tensor whose SBP is the plan's (a linear layer's weight, (out, in) in OneFlow, is (B, S(0), S(1)) on
its axes (p0, p1, p2)).  Its logical value is the module's with rows and columns permuted (:mod:`layouts`), which element-wise
optimizers do not notice; ``state_dict`` undoes it.  Layers compute with ``to_local()``, which shares the storage.

Measured on OneFlow 0.9.0, CPU ranks: SGD, momentum, Adam and AdamW on such tensors agree bitwise with one device and send
nothing.  OneFlow's ``clip_grad_norm_`` is right too, on parameters of one mesh (`common_mesh`), but gathers all gradients.
LAMB is not usable on global tensors that are split: its update is made on a re-boxed copy and lost, in silence.

**Gradients.**  All parameters of a layer that are summed over the same ranks pass through one autograd node: local tensors
come out, and when all local gradients have come back, those of tied layers included, it sums them in one all-reduce per step of
:func:`autoddl.costmodel.layerwork.all_reduce_steps`.  While gradients accumulate over micro-batches (`AppliedModule.no_sync`)
layers use leaves of their own that share the storage; the node adds what these have collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis

from .layouts import ParameterLayout
from .load import load_oneflow
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["ParameterGroup", "StoredParameter", "parameter_groups", "whole_value"]

Tensor = Any


def whole_value(layout: ParameterLayout, shard: Tensor, ranks: Ranks) -> np.ndarray:
    """The logical value, on every rank, of which each has its shard; all ranks call."""
    for dim, axes in enumerate(layout.axes):
        shard = ranks.gather(shard, axes, dim)
    gathered = shard.numpy()
    value = np.empty(layout.shape, gathered.dtype)
    layout.gathered().put(value, gathered, ranks.rank)
    return value


class StoredParameter:
    """One parameter: its layout, the global tensor, and a local leaf for accumulation.

    Args:
        layout: how it lies.
        ranks: on which it lies.
        placement: all ranks on a mesh.
        sbp: what each axis of the mesh does to it, the same as ``layout`` says.

    Attributes:
        tensor: the ``nn.Parameter``, a global tensor; `assign` gives it a value.
        leaf: this rank's part, sharing its storage; collects the gradients of micro-batches that are not summed.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        ranks: Ranks,
        placement: Any,
        sbp: Sequence[Any],
        dtype: Any = flow.float32,
        requires_grad: bool = True,
    ):
        self.layout = layout
        self._ranks = ranks
        self._placement = placement
        self._sbp = list(sbp)
        self.tensor = flow.nn.Parameter(self._empty(dtype), requires_grad)
        self.leaf = self.local().requires_grad_(requires_grad)

    def _empty(self, dtype: Any) -> Tensor:
        lengths = zip(self.layout.local_shape(), self.layout.axes)
        shape = [length * prod(axis.size for axis in axes) for length, axes in lengths]
        return flow.empty(*shape, dtype=dtype, placement=self._placement, sbp=self._sbp)

    def local(self) -> Tensor:
        """This rank's part, without history, sharing the storage."""
        return self.tensor.to_local().detach()

    def assign(self, value: np.ndarray) -> None:
        """Take this rank's part of the logical ``value``."""
        local = flow.tensor(self.layout.take(value, self._ranks.rank))
        flow._C.assign_local_tensor(self.tensor.to_local(), local)  # to_local() shares the storage

    def logical(self, tensor: Tensor | None = None) -> np.ndarray:
        """The logical value, on every rank; all ranks call.  Of another tensor of the same layout (its gradient), if given."""
        tensor = self.tensor if tensor is None else tensor
        return whole_value(self.layout, tensor.to_local().detach(), self._ranks)

    def parts(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """The module's parameters that the logical ``value`` holds."""
        return self.layout.parts(value)

    @property
    def num_copies(self) -> int:
        """How many ranks hold each element."""
        return self._ranks.num_ranks // prod(axis.size for axes in self.layout.axes for axis in axes)

    def with_gradient(self, local: Tensor) -> Tensor:
        """A global tensor like this one that holds ``local``."""
        gradient = self._empty(local.dtype)
        flow._C.assign_local_tensor(gradient.to_local(), local.contiguous())
        return gradient

    def copy_storage(self) -> None:
        """Copy the value to new storage; the old storage stays with tensors that share it."""
        self.tensor.data = self.with_gradient(self.local() + 0)

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient that the optimizer reads, given as this rank's part; None: no gradient."""
        self.tensor.grad = None if gradient is None else self.with_gradient(gradient)


def parameter_groups(parameters: Sequence[StoredParameter], ranks: Ranks) -> tuple[ParameterGroup, ...]:
    """Parameters of one layer, grouped by the axes that their gradients are summed over."""
    by_axes: dict[tuple[Axis, ...], list[StoredParameter]] = {}
    for parameter in parameters:
        by_axes.setdefault(parameter.layout.reduced, []).append(parameter)
    return tuple(ParameterGroup(members, axes, ranks) for axes, members in by_axes.items())


class ParameterGroup:
    """Parameters of one layer whose gradients are summed together, over the axes ``reduced``."""

    def __init__(self, parameters: Sequence[StoredParameter], reduced: tuple[Axis, ...], ranks: Ranks):
        self.parameters = tuple(parameters)
        self.reduced = reduced
        self._ranks = ranks

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
        flat = self._ranks.reduce(flat, self.reduced)
        result, start = [], 0
        for gradient in gradients:
            result.append(flat[start : start + gradient.numel()].reshape(*gradient.shape))
            start += gradient.numel()
        return result
