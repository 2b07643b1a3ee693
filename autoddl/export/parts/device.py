"""The choice of device in an exported file."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import oneflow as flow

from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE, GPU
from autoddl.pipelines.runtime.backend import Backend, check_device
from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, Handshake
from autoddl.pipelines.runtime.ranks.devices import take_gpu


def chosen_backend(
    device: str,
    types: tuple[Any, ...],
    cpu_types: tuple[Any, ...] = (),
    scales_losses: bool = False,
    handshake: Handshake = NO_HANDSHAKE,
) -> Backend:
    """Return where and in which types this file computes.

    Args:
        device: type of device, unless the option ``--device`` or the variable AUTODDL_DEVICE names another.
        types: compute, master and communication type.
        cpu_types: the same on CPU ranks, if they differ.
        scales_losses: whether losses are scaled.
        handshake: before which exchanges of two CPU ranks there is a handshake.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default=os.environ.get(DEVICE_VARIABLE, device))
    chosen = parser.parse_known_args()[0].device
    compute, master, communication = cpu_types if chosen == CPU and cpu_types else types
    used = handshake if chosen == CPU else NO_HANDSHAKE
    return Backend(chosen, compute, master, communication, scales_losses, used)


def take_device(backend: Backend) -> None:
    """Check that there is a device for this rank; on GPUs take the rank's own, and say which one. Call it before the first tensor.

    Raises:
        UserError: there is none.
    """
    check_device(backend.device)
    if backend.device == GPU:
        sys.stdout.write(f"{take_gpu(flow)}\n")
