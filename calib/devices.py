"""What a calibration measures on: the type of device, the precisions of products, and the sizes that suit them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE, GPU, check_device_type
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.precision import precision_of

__all__ = ["device_type", "elementwise_on", "precisions_on", "shapes_on", "sizes_on"]

#: (m, k, n) of matrix products: square, thin and flat; on CPU ranks from 0.1 ms to some 10 ms on one core.
_SHAPES = (
    (16, 256, 256),
    (16, 1024, 1024),
    (16, 4096, 1024),
    (64, 64, 512),
    (64, 256, 1024),
    (64, 1024, 4096),
    (128, 512, 64),
    (256, 256, 256),
    (256, 1024, 256),
    (256, 1024, 1024),
    (512, 512, 2048),
)
#: On GPUs from 0.1 GFLOP to 1.1 TFLOP.
_SHAPES_ON_GPUS = (
    (256, 512, 512),
    (128, 4096, 4096),
    (256, 8192, 1024),
    (1024, 1024, 1024),
    (1024, 1024, 4096),
    (2048, 512, 8192),
    (2048, 2048, 2048),
    (4096, 1024, 4096),
    (4096, 4096, 4096),
    (16384, 2048, 512),
    (8192, 8192, 8192),
)
_ELEMENTWISE_BYTES = (1 << 14, 1 << 18, 1 << 21, 1 << 24)
_ELEMENTWISE_BYTES_ON_GPUS = (1 << 16, 1 << 20, 1 << 24, 1 << 28)
_SIZES = tuple(4**k for k in range(6, 13))
_SIZES_ON_GPUS = tuple(4**k for k in range(6, 15))


def device_type(asked: str | None, base: Cluster, gpus_are_there: Callable[[], bool]) -> str:
    """The type of device to run on: the one asked for or in AUTODDL_DEVICE; else GPUs if the base has them and they are there.

    Args:
        asked: the type that the user gave; None if he gave none.
        base: the base cluster.
        gpus_are_there: whether ranks have GPUs; called only if it matters.

    Raises:
        UserError: the type is unknown, or GPUs are asked for and the base cluster, which supplies what is not measured, has none.
    """
    asked = asked or os.environ.get(DEVICE_VARIABLE)
    if not asked:
        return GPU if base.has_gpus and gpus_are_there() else CPU
    check_device_type(asked)
    if asked == GPU and not base.has_gpus:
        raise UserError(f"device={GPU!r} needs a base cluster of GPUs, {base.name} has {base.device.name}")
    return asked


def precisions_on(device: str, base: Cluster, asked: Sequence[str] | None) -> tuple[str, ...]:
    """The precisions whose products are measured on a type of device, one for each compute type.

    Args:
        device: the type of device.
        base: the base cluster.
        asked: names of precisions; None: all that the device of the base cluster has a speed for.

    Raises:
        UserError: a precision is unknown, or the device of the base cluster has no speed for it.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> precisions_on(GPU, load_cluster("dgx-a100"), None), precisions_on(CPU, load_cluster("dgx-a100"), ["float32", "mixed"])
    (('mixed', 'float32'), ('float32',))
    """
    found: dict[str, str] = {}
    for name in base.device.peak_flops if asked is None else asked:
        base.device.peak(name)
        own = precision_of(name).on_cpu() if device == CPU else precision_of(name)
        found.setdefault(own.compute, own.name)
    return tuple(found.values())


def shapes_on(device: str) -> tuple[tuple[int, int, int], ...]:
    """The (m, k, n) of the matrix products that are measured by default."""
    return _SHAPES_ON_GPUS if device == GPU else _SHAPES


def elementwise_on(device: str) -> tuple[int, ...]:
    """The sizes [bytes] of the element-wise operations that are measured by default."""
    return _ELEMENTWISE_BYTES_ON_GPUS if device == GPU else _ELEMENTWISE_BYTES


def sizes_on(device: str) -> tuple[int, ...]:
    """The message sizes [bytes] that are measured by default."""
    return _SIZES_ON_GPUS if device == GPU else _SIZES
