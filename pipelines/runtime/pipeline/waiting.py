"""Waiting for the values of tensors."""

from __future__ import annotations

import time
from typing import Any

from ..detaching import detached

__all__ = ["wait_for"]

Tensor = Any


def wait_for(tensor: Tensor) -> float:
    """Wait until a tensor's values are computed; returns the time then, of a clock that all processes of the machine share."""
    detached(tensor).reshape(-1)[:1].numpy()
    return time.monotonic()
