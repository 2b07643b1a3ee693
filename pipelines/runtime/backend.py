"""`Backend`: the device that tensors lie on, and the types of their elements. Nothing else in the runtime chooses them.

A plan for GPUs can also run on CPU ranks, to check it: the type of device is an option of whatever starts the ranks. CPU ranks have
no half-precision kernels, so they run mixed precision with wider types (:mod:`autoddl.costmodel.precision`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.devices import CPU, GPU, check_device_type
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.precision import precision_of

from .comm.handshake import NO_HANDSHAKE, Handshake, handshake_of
from .load import load_oneflow

flow: Any = load_oneflow()

__all__ = [
    "HOST",
    "Backend",
    "backend_of",
    "check_device",
    "is_on_gpu",
    "place_buffers",
    "placement_of",
    "type_name",
]

Tensor = Any


@dataclass(frozen=True)
class Backend:
    """Where tensors lie, and the types of their elements.

    Attributes:
        device: Type of device, ``"cuda"`` or ``"cpu"``.
        compute: Type of activations, of the weights in products, and of the gradients of both.
        master: Type of the weights that the optimizer updates and of its states, and of statistics of norms, softmax and losses.
        communication: Type of the gradients of weights while they are summed over ranks.
        scales_losses: Whether losses are scaled, since the compute type has a smaller range than the master type.
        handshake: Before which exchanges of two ranks there is a handshake.
    """

    device: str
    compute: Any = flow.float32
    master: Any = flow.float32
    communication: Any = flow.float32
    scales_losses: bool = False
    handshake: Handshake = NO_HANDSHAKE

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer updates copies of the weights, in another type than layers compute in."""
        return self.compute != self.master

    def tensor(self, values: Any, dtype: Any = None) -> Tensor:
        """Return a local tensor with the values of an array, in the array's type unless another one is given."""
        return flow.tensor(values, dtype=dtype, device=self.device)

    def activation(self, values: np.ndarray) -> Tensor:
        """Return a local tensor with the values of an array: in the compute type, or in the array's type if those are integers."""
        return self.tensor(values, self.compute if np.issubdtype(values.dtype, np.floating) else None)

    def placement(self, ranks: Sequence[Any]) -> Any:
        """Return OneFlow's placement of ranks of the job, in a list or a list of lists (a mesh)."""
        return flow.placement(self.device, ranks)


#: For tensors of the host: the user's own model, and what ranks tell each other outside of training.
HOST = Backend(CPU)


@functools.cache
def placement_of(device: str, ranks: tuple[int, ...]) -> Any:
    """Return OneFlow's placement of ranks of the job on a type of device."""
    return flow.placement(device, list(ranks))


def is_on_gpu(x: Tensor) -> bool:
    """Return whether a local tensor lies on a GPU, which has faster kernels for some operations."""
    return bool(x.device.type == GPU)


def backend_of(precision: str, device: str, cluster: Cluster | None = None) -> Backend:
    """Return the backend of a precision on a type of device; on CPU ranks wider types stand in for half precision.

    Args:
        precision: Name of the precision.
        device: Type of device.
        cluster: What the ranks run on; None if they are on one host.

    Raises:
        UserError: The type of device or the precision is unknown, or there is no such device.
    """
    check_device(device)
    types = precision_of(precision)
    if device == CPU:
        types = types.on_cpu()
    compute, master, communication = (getattr(flow, n) for n in (types.compute, types.master, types.communication))
    handshake = handshake_of(cluster) if cluster is not None and device == CPU else NO_HANDSHAKE
    return Backend(device, compute, master, communication, types.scales_losses, handshake)


def place_buffers(module: Any, device: str, dtype: Any) -> None:
    """Move the buffers of a module to a type of device, those of floating-point numbers also to a type."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else buffer.dtype)


def type_name(dtype: Any) -> str:
    """Return the name of a type, such as ``float32``."""
    return str(dtype).rpartition(".")[2]


def check_device(device: str) -> None:
    """Check that tensors can be made on a type of device; without a GPU, OneFlow would abort the process.

    Raises:
        UserError: The type of device is unknown, or OneFlow finds no such device.
    """
    check_device_type(device)
    if device == GPU and not flow.cuda.is_available():
        raise UserError(f"device {GPU!r}: OneFlow finds no GPU on this machine; device={CPU!r} runs on CPU ranks")
