"""Tensors without their autograd graph."""

from __future__ import annotations

from typing import Any

__all__ = ["detached"]

Tensor = Any


def detached(x: Tensor) -> Tensor:
    """``x.detach()``, right for views too.

    OneFlow 0.9.0 forgets on the way where a view begins in its storage: ``x.narrow(0, 2, 2).detach().reshape(-1)`` has the first
    two rows of x.  A view that begins elsewhere is copied.
    """
    return x.detach() if x.storage_offset() == 0 else x.clone().detach()
