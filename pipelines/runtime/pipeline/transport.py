"""Communication between ranks, beside their computations.

All of it is issued in one OneFlow thread of the process, in which it runs one after the other in the order of issue, while the
main thread goes on. Only the ranks concerned call. A tensor that was received can be used at once: computations wait for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

from ..collectives import receive, send
from ..load import load_oneflow

flow: Any = load_oneflow()

__all__ = ["Transport", "wait_for"]

Tensor = Any


@functools.cache
def _communication_thread() -> Any:
    """One per process: OneFlow numbers its threads, and they never end."""
    return flow.asyncs.Thread()


def wait_for(tensor: Tensor) -> float:
    """Wait until a tensor's values are there; the time then (of a clock that all processes of the machine share)."""
    tensor.detach().reshape(-1)[:1].numpy()
    return time.monotonic()


class Transport:
    """A rank's sending and receiving; counts the bytes of what it sends to single ranks and of what it sums."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.bytes_reduced = 0

    def send(self, x: Tensor, rank: int) -> None:
        x = x.detach().contiguous()
        self.bytes_sent += x.numel() * x.element_size()
        with flow.asyncs.thread(_communication_thread()):
            send(x, rank)

    def receive(self, shape: Sequence[int], dtype: Any, rank: int) -> Tensor:
        with flow.asyncs.thread(_communication_thread()):
            return receive(tuple(shape), dtype, rank)

    def all_reduce(self, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum of a vector over ``ranks`` (ascending, this one included)."""
        if len(ranks) == 1:
            return flat
        self.bytes_reduced += flat.numel() * flat.element_size()
        with flow.asyncs.thread(_communication_thread()):
            placement = _placement(ranks)
            shared = flow.empty(flat.numel(), dtype=flat.dtype, placement=placement, sbp=flow.sbp.partial_sum)
            flow._C.assign_local_tensor(shared.to_local(), flat)  # to_local() shares the storage
            return shared.to_global(sbp=flow.sbp.broadcast).to_local()


@functools.cache
def _placement(ranks: tuple[int, ...]) -> Any:
    return flow.placement("cpu", list(ranks))
