"""Tensors without their autograd graph."""

from __future__ import annotations

from typing import Any

__all__ = ["detached"]

Tensor = Any


def detached(x: Tensor) -> Tensor:
    """Return ``x.detach()``, with correct values for views too.

    In OneFlow 0.9.0 ``detach`` loses the offset of a view in its storage: ``x.narrow(0, 2, 2).detach().reshape(-1)`` returns the
    first two rows of x. Views with an offset are therefore copied.
    """
    return x.detach() if x.storage_offset() == 0 else x.clone().detach()
