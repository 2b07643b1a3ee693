"""Waiting until tensors are computed."""

from __future__ import annotations

import time
from typing import Any

from ..detaching import detached

__all__ = ["wait_for"]

Tensor = Any


def wait_for(tensor: Tensor) -> float:
    """Wait until a tensor is computed, and return the time [s] on the machine's monotonic clock, which all processes share."""
    detached(tensor).reshape(-1)[:1].numpy()
    return time.monotonic()
