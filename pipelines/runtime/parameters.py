"""Parameters as OneFlow global tensors in the layouts of a plan, and the sums of their gradients over ranks.

A parameter is one global tensor with the SBP of the plan: a linear layer's weight, (out, in) in OneFlow, is (B, S(0), S(1)) on
its axes (p0, p1, p2).  Its logical value is the module's value with permuted rows and columns (:mod:`.comm.layouts`).  Element-wise
optimizers are not affected by the permutation, and ``state_dict`` reverts it.  Layers compute with ``to_local()``, which shares the
storage.

In mixed precision the global tensor is the master, of the master type, and layers compute with a copy in the compute type, which
is renewed when the optimizer has changed the master.  Gradients have the compute type until the optimizer's step (:mod:`updates`).

Measured on OneFlow 0.9.0, CPU ranks: SGD, momentum, Adam and AdamW on such tensors agree bitwise with one device and send
nothing.  OneFlow's ``clip_grad_norm_`` is correct on parameters of one mesh (`common_mesh`), but gathers all gradients.  LAMB
cannot be used on split global tensors: OneFlow updates a re-boxed copy, which is lost without an error.

**Gradients.** The parameters of a layer, or of several ones (`bucketed_groups`), whose gradients are summed over the same ranks
pass through one autograd node, whose outputs are the local tensors.  When the gradients of all of them have been computed,
including those from tied layers, the node concatenates and sums them in one run of the steps of
:func:`autoddl.costmodel.collectives.all_reduce_steps`.  While gradients accumulate over micro-batches (`AppliedModule.no_sync`),
layers use separate leaves that share the storage.  The node adds the gradients that these leaves have accumulated.

**Divided parameters** (ZeRO, :mod:`shards`).  The global tensor is a vector that consists of the shards of all ranks.  What layers
read is gathered in the first forward pass after a backward pass that has summed gradients, because an optimizer step may follow
it.  A value that is changed in another way, other than by ``load_state_dict``, is not seen until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis

from .comm.parameter_layouts import ParameterLayout
from .detaching import detached
from .load import load_oneflow
from .shards import HeldWeight, attach_weights, gather_shards, readable_weights, scatter_sum, update_shards
from .stepping import Ranks

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = [
    "ParameterGroup",
    "StoredParameter",
    "bucketed_groups",
    "parameter_groups",
    "sum_gradients",
    "whole_value",
]

Tensor = Any


def whole_value(layout: ParameterLayout, shard: Tensor, ranks: Ranks) -> np.ndarray:
    """Gather what all ranks store of a tensor to its logical value, on every rank; all ranks call."""
    if layout.zero:
        (shard,) = gather_shards([shard], layout.reduced, [layout.local_shape()], ranks)
    for dim, axes in enumerate(layout.axes):
        shard = ranks.gather(shard, axes, dim)
    gathered = shard.numpy()
    value = np.empty(layout.shape, gathered.dtype)
    layout.gathered().put(value, gathered, ranks.rank)
    return value


class StoredParameter:
    """A parameter stored as a global tensor, with a local leaf that accumulates gradients.

    Args:
        layout: Distribution of the parameter over the ranks.
        ranks: The ranks.
        placement: Placement of all ranks on a mesh.
        sbp: SBP of the tensor on the axes of this mesh; has to agree with ``layout``.
        requires_grad: Whether the parameter is trained.

    Attributes:
        layout: Distribution of the parameter over the ranks.
        tensor: The ``nn.Parameter``, a global tensor of the master type, uninitialized until `assign` is called.
        leaf: This rank's part in the compute type, which layers compute with; accumulates gradients that are not yet summed over
            the ranks. Shares the storage of ``tensor`` if the types are the same. None for a divided parameter, whose leaves belong
            to its `DividedGroup`.
    """

    def __init__(
        self,
        layout: ParameterLayout,
        ranks: Ranks,
        placement: Any,
        sbp: Sequence[Any],
        requires_grad: bool = True,
    ):
        self.layout = layout
        self._ranks = ranks
        self._placement = placement
        self._sbp = list(sbp)
        self.tensor = flow.nn.Parameter(self._empty(ranks.backend.master), requires_grad)
        self.leaf: Any = None if layout.zero else self.new_leaf()

    def _empty(self, dtype: Any) -> Tensor:
        """Return an uninitialized global tensor with the parameter's shape and layout."""
        lengths = zip(self.layout.stored_shape(), self.layout.stored_axes)
        shape = [length * prod(axis.size for axis in axes) for length, axes in lengths]
        return flow.empty(*shape, dtype=dtype, placement=self._placement, sbp=self._sbp)

    def local(self) -> Tensor:
        """Return this rank's part without autograd history; it shares the parameter's storage."""
        return self.tensor.to_local().detach()

    def new_leaf(self) -> Tensor:
        """Return an autograd leaf with the present value of this rank's part in the compute type."""
        backend = self._ranks.backend
        value = self.local().to(backend.compute) if backend.has_masters else self.local()
        return value.requires_grad_(self.tensor.requires_grad)

    def renew_leaf(self) -> None:
        """Give ``leaf`` the present value, after the tensor was changed."""
        if self._ranks.backend.has_masters and not self.layout.zero:
            self.leaf = self.new_leaf()

    def assign(self, value: np.ndarray) -> None:
        """Set the parameter to the logical ``value``, of which each rank copies its part."""
        local = self._ranks.backend.tensor(self.layout.stored(value, self._ranks.rank), self.tensor.dtype)
        flow._C.assign_local_tensor(self.tensor.to_local(), local)  # to_local() shares the storage
        self.renew_leaf()

    def logical(self, tensor: Tensor | None = None) -> np.ndarray:
        """Return the logical value of the parameter, or of another tensor of its layout, on every rank; all ranks call."""
        tensor = self.tensor if tensor is None else tensor
        return whole_value(self.layout, tensor.to_local().detach(), self._ranks)

    def parts(self, value: np.ndarray) -> dict[str, np.ndarray]:
        """Divide a logical ``value`` into the module's parameters, by name."""
        return self.layout.parts(value)

    @property
    def num_copies(self) -> int:
        """Number of ranks that hold each element."""
        return self._ranks.num_ranks // prod(axis.size for axes in self.layout.stored_axes for axis in axes)

    def with_gradient(self, local: Tensor) -> Tensor:
        """Return a global tensor of the parameter's layout whose part on this rank is ``local``."""
        gradient = self._empty(local.dtype)
        flow._C.assign_local_tensor(gradient.to_local(), local.contiguous())
        return gradient

    def copy_storage(self) -> None:
        """Copy the value to new storage; the old storage stays with tensors that share it."""
        self.tensor.data = self.with_gradient(self.local() + 0)

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient that the optimizer reads, given as this rank's part; None: no gradient."""
        self.tensor.grad = None if gradient is None else self.with_gradient(gradient)

    def add_gradient(self, gradient: Tensor) -> None:
        """Add to the gradient that the optimizer reads; the sum over the ranks is given as this rank's part."""
        total, before = self.with_gradient(gradient), self.tensor.grad
        self.tensor.grad = total if before is None else before + total


def parameter_groups(parameters: Sequence[StoredParameter], ranks: Ranks) -> tuple[ParameterGroup, ...]:
    """Group the parameters of one layer by the mesh axes over which their gradients are summed, and by how they are divided."""
    groups: dict[tuple[tuple[Axis, ...], int, bool], list[StoredParameter]] = {}
    for parameter in parameters:
        layout = parameter.layout
        groups.setdefault((layout.reduced, layout.zero, layout.hybrid), []).append(parameter)
    return tuple(
        (DividedGroup if zero else ParameterGroup)(members, axes, ranks) for (axes, zero, _), members in groups.items()
    )


def bucketed_groups(
    layers: Iterable[Sequence[StoredParameter]], bucket_bytes: int, ranks: Ranks
) -> tuple[ParameterGroup, ...]:
    """Group the parameters of several layers, so that their gradients are summed in few large vectors.

    Every sum sends the same bytes, but also messages, whose latency does not depend on the size.  Layers whose gradients have fewer
    than ``bucket_bytes`` are grouped in order, until a group has so many bytes (the price: :mod:`autoddl.costmodel.layerwork`).
    Other layers, and divided parameters, which layers gather, are grouped layer by layer.
    """
    groups: list[ParameterGroup] = []
    buckets: dict[tuple[Axis, ...], list[StoredParameter]] = {}
    for parameters in layers:
        for group in parameter_groups(parameters, ranks):
            is_divided = isinstance(group, DividedGroup)
            if is_divided or not group.reduced or _gradient_bytes(group.parameters, ranks) >= bucket_bytes:
                groups.append(group)
                continue
            bucket = buckets.setdefault(group.reduced, [])
            bucket += group.parameters
            if _gradient_bytes(bucket, ranks) >= bucket_bytes:
                groups.append(ParameterGroup(buckets.pop(group.reduced), group.reduced, ranks))
    return (*groups, *(ParameterGroup(bucket, axes, ranks) for axes, bucket in buckets.items()))


def _gradient_bytes(parameters: Sequence[StoredParameter], ranks: Ranks) -> int:
    """Return the bytes of gradients that this rank sums."""
    num_elements = sum(prod(p.layout.local_shape()) for p in parameters if p.tensor.requires_grad)
    return num_elements * flow.empty(0, dtype=ranks.backend.communication, device=ranks.backend.device).element_size()


class ParameterGroup:
    """Parameters of one or several layers whose gradients are summed together.

    Args:
        parameters: The parameters.
        reduced: Mesh axes over which the gradients are summed.
        ranks: The ranks.
    """

    def __init__(self, parameters: Sequence[StoredParameter], reduced: tuple[Axis, ...], ranks: Ranks):
        self.parameters = tuple(parameters)
        self.reduced = reduced
        self._ranks = ranks

    def summed(self) -> tuple[Tensor, ...]:
        """Return local tensors whose gradients, summed over the ranks, become those of the global parameters."""
        trained = [p for p in self.parameters if p.tensor.requires_grad]
        if not trained or not flow.is_grad_enabled():
            return tuple(parameter.leaf.detach() for parameter in self.parameters)

        def backward(ctx: Any, *gradients: Tensor) -> Any:
            own_sums = [_add_leaf_gradient(parameter, own) for parameter, own in zip(trained, gradients)]
            totals = sum_gradients(own_sums, self.reduced, self._ranks)
            result = tuple(parameter.with_gradient(total) for parameter, total in zip(trained, totals))
            return result if len(result) > 1 else result[0]

        def forward(ctx: Any, *tensors: Tensor) -> Any:
            result = tuple(parameter.leaf.detach() for parameter in trained)
            return result if len(result) > 1 else result[0]

        outputs = _Function.apply("sum_gradients", forward, backward, *(p.tensor for p in trained))
        output_of = dict(zip(map(id, trained), outputs if len(trained) > 1 else [outputs]))
        return tuple(output_of[id(p)] if id(p) in output_of else p.leaf.detach() for p in self.parameters)

    def unsummed(self) -> tuple[Tensor, ...]:
        """Return the local leaves, which accumulate this rank's gradients."""
        return tuple(parameter.leaf for parameter in self.parameters)

    def readable(self) -> list[Any]:
        """Return what layers read: the local leaves, or `HeldWeight` objects."""
        return [parameter.leaf for parameter in self.parameters]

    def renew(self) -> None:
        """Take note that the values of the parameters were changed."""


class DividedGroup(ParameterGroup):
    """Parameters of one layer that are divided in the same way (ZeRO). The arguments are those of `ParameterGroup`."""

    def __init__(self, parameters: Sequence[StoredParameter], reduced: tuple[Axis, ...], ranks: Ranks):
        super().__init__(parameters, reduced, ranks)
        self._layouts = [parameter.layout for parameter in parameters]
        self._present: list[Any] | None = None  # what layers read, as `readable_weights` returns it

    def renew(self) -> None:
        self._present = None

    def readable(self) -> list[Any]:
        """Return what layers read; all ranks call, since it may have to be gathered."""
        if self._present is None:
            leaves = [parameter.new_leaf() for parameter in self.parameters]
            self._present = readable_weights(leaves, self._layouts, self._ranks)
        return self._present

    def unsummed(self) -> tuple[Tensor, ...]:
        return tuple(attach_weights(self.readable(), self._layouts[0].inner, self._ranks))

    def summed(self) -> tuple[Tensor, ...]:
        present, trained = self.readable(), [p for p in self.parameters if p.tensor.requires_grad]
        values = [detached(weight.value if isinstance(weight, HeldWeight) else weight) for weight in present]
        if len(trained) < len(self.parameters) or not flow.is_grad_enabled():
            return tuple(values)
        layouts, ranks, is_held = self._layouts, self._ranks, self._layouts[0].zero == 2

        def backward(ctx: Any, *gradients: Tensor) -> Any:
            own = scatter_sum(gradients, layouts[0].inner, ranks) if is_held else list(gradients)
            sums = []
            for weight, gradient in zip(present, own):
                leaf = weight.shard if isinstance(weight, HeldWeight) else weight
                sums.append(gradient if leaf.grad is None else gradient + leaf.grad.reshape(*gradient.shape))
                leaf.grad = None
            self.renew()
            shards = update_shards(sums, layouts, ranks)
            result = tuple(p.with_gradient(shard) for p, shard in zip(self.parameters, shards))
            return result if len(result) > 1 else result[0]

        def forward(ctx: Any, *tensors: Tensor) -> Any:
            return tuple(values) if len(values) > 1 else values[0]

        outputs = _Function.apply("sum_gradients", forward, backward, *(p.tensor for p in self.parameters))
        return tuple(outputs) if len(values) > 1 else (outputs,)


def sum_gradients(gradients: Sequence[Tensor], axes: Sequence[Axis], ranks: Ranks) -> list[Tensor]:
    """Sum this rank's gradients over mesh axes, concatenated to one vector; return the sums in the same order."""
    if not axes:
        return list(gradients)
    flat = (
        flow.cat([gradient.reshape(-1) for gradient in gradients]) if len(gradients) > 1 else gradients[0].reshape(-1)
    )
    flat = ranks.reduce(flat.to(ranks.backend.communication), axes).to(flat.dtype)
    result, start = [], 0
    for gradient in gradients:
        result.append(flat[start : start + gradient.numel()].reshape(*gradient.shape))
        start += gradient.numel()
    return result


def _add_leaf_gradient(parameter: StoredParameter, gradient: Tensor) -> Tensor:
    """Add to a gradient the one that the parameter's leaf has accumulated, and clear the latter."""
    accumulated = parameter.leaf.grad
    if accumulated is None:
        return gradient
    parameter.leaf.grad = None
    return gradient + accumulated
