"""The types of devices that ranks run on. Needs no OneFlow; :mod:`autoddl.pipelines.runtime.backend` makes tensors on them."""

from __future__ import annotations

import os
from collections.abc import Mapping

from .errors import UserError

__all__ = ["CPU", "DEVICE_TYPES", "DEVICE_VARIABLE", "GPU", "check_device_type", "chosen_device", "on_gpu"]

#: The types of devices, as OneFlow calls them.
CPU, GPU = "cpu", "cuda"
DEVICE_TYPES = (GPU, CPU)
#: Environment variable that names the type of device of ranks, in place of that of the plan's cluster.
DEVICE_VARIABLE = "AUTODDL_DEVICE"


def check_device_type(device: str) -> None:
    """Check that a name is that of a type of device.

    Raises:
        UserError: It is not.
    """
    if device not in DEVICE_TYPES:
        raise UserError(f"device {device!r} is not one of {', '.join(DEVICE_TYPES)}")


def on_gpu(environ: Mapping[str, str]) -> bool:
    """Return whether the environment says that this process is a rank on a GPU.

    >>> on_gpu({"AUTODDL_DEVICE": "cuda"}), on_gpu({"AUTODDL_DEVICE": "cpu"}), on_gpu({})
    (True, False, False)
    """
    return environ.get(DEVICE_VARIABLE) == GPU


def chosen_device(has_gpus: bool, given: str | None = None) -> str:
    """Return the type of device that ranks use: the given one, that of `DEVICE_VARIABLE`, or that of the plan's cluster.

    Args:
        has_gpus: whether the cluster has GPUs.
        given: what the user has given; None or "" if nothing.

    >>> chosen_device(has_gpus=True, given="cpu")
    'cpu'
    """
    return given or os.environ.get(DEVICE_VARIABLE) or (GPU if has_gpus else CPU)
