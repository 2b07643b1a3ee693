"""Communication between ranks, beside their computations.

All of it is issued in one OneFlow thread of the process, in which it runs one after the other in the order of issue, while the
main thread goes on. Only the ranks concerned call. A tensor that was received can be used at once: computations wait for it.

Messages may be compressed (`compression`). They are so in the main thread, on the sender's side when they are sent and on the
receiver's when it wants them; bytes are counted as they are sent.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..collectives import receive, send, sum_over
from ..detaching import detached
from ..load import load_oneflow
from .actions import Message
from .compression import decode, encode, has_rest, num_words, num_words_of_rest

flow: Any = load_oneflow()

__all__ = ["CompressingTransport", "Transport", "make_transport"]

Tensor = Any


@functools.cache
def _communication_thread() -> Any:
    """One per process, which is never given up.

    OneFlow numbers its threads, and gives the number of one that was garbage collected to the next one. Where a thread has been
    collected on one rank and not yet on another, threads that are made next have different numbers, and a collective in them waits
    for ever.
    """
    return flow.asyncs.Thread()


class Transport:
    """A rank's sending and receiving.

    Attributes:
        bytes_sent: to single ranks.
        bytes_saved: that these would have been more without compression.
        num_uncompressed: messages that were to be compressed but needed full precision.
        bytes_reduced: the size of vectors that were summed.
    """

    def __init__(self) -> None:
        self._thread = _communication_thread()  # made by all ranks, also by those that never send: they count alike
        self.bytes_sent = 0
        self.bytes_saved = 0
        self.num_uncompressed = 0
        self.bytes_reduced = 0

    def send(self, message: Message, x: Tensor) -> None:
        """Send the tensor of a message, all of it or its first part."""
        self._send(detached(x).contiguous(), message.destination)

    def receive(self, message: Message, shape: tuple[int, ...], dtype: Any) -> Tensor | None:
        """The tensor of a message; None where only a first part is on its way, and `rest` gives the tensor."""
        return self._receive(shape, dtype, message.source)

    def rest(self, message: Message) -> Tensor | None:
        """Send or receive the second part of a message, if there is one; what has been received, once it is there."""
        return None

    def _send(self, x: Tensor, rank: int) -> None:
        self.bytes_sent += x.numel() * x.element_size()
        with flow.asyncs.thread(self._thread):
            send(x, rank)

    def _receive(self, shape: tuple[int, ...], dtype: Any, rank: int) -> Tensor:
        with flow.asyncs.thread(self._thread):
            return receive(shape, dtype, rank)

    def send_sum(self, x: Tensor, rank: int) -> None:
        """Send a part of a sum to a rank that holds the same weights otherwise."""
        self.bytes_reduced += x.numel() * x.element_size()
        with self.thread():
            send(x, rank)

    def receive_sum(self, shape: tuple[int, ...], dtype: Any, rank: int) -> Tensor:
        """What `send_sum` sends here."""
        return self._receive(shape, dtype, rank)

    def thread(self) -> Any:
        """A context in which everything is issued where all communication is."""
        return flow.asyncs.thread(self._thread)

    def all_reduce(self, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """The sum of a vector over ``ranks`` (ascending, this one included)."""
        if len(ranks) > 1:
            self.bytes_reduced += flat.numel() * flat.element_size()
        with self.thread():
            return sum_over(flat, ranks)


class CompressingTransport(Transport):
    """Messages in single precision are compressed where their values allow it.

    Both ends of a message call `rest` for it some time after `send` and `receive`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._leaving: dict[Message, np.ndarray] = {}
        self._arriving: dict[Message, tuple[Tensor, tuple[int, ...]]] = {}

    def send(self, message: Message, x: Tensor) -> None:
        if x.dtype != flow.float32:
            super().send(message, x)
            return
        first, rest = encode(detached(x).numpy())
        if rest is not None:
            self._leaving[message] = rest
            self.num_uncompressed += 1
        self.bytes_saved += 4 * x.numel() - first.nbytes - (0 if rest is None else rest.nbytes)
        self._send(flow.tensor(first), message.destination)

    def receive(self, message: Message, shape: tuple[int, ...], dtype: Any) -> Tensor | None:
        if dtype != flow.float32:
            return super().receive(message, shape, dtype)
        first = self._receive((num_words(math.prod(shape)),), flow.int32, message.source)
        self._arriving[message] = first, shape
        return None

    def rest(self, message: Message) -> Tensor | None:
        if message in self._leaving:
            self._send(flow.tensor(self._leaving.pop(message)), message.destination)
        if message not in self._arriving:
            return None
        arriving, shape = self._arriving.pop(message)
        first, size, rest = arriving.numpy(), math.prod(shape), None
        if has_rest(first):
            rest = self._receive((num_words_of_rest(size),), flow.int32, message.source).numpy()
        return flow.tensor(decode(first, rest, size).reshape(shape))


def make_transport(compresses: bool) -> Transport:
    """For a run of a schedule, whose messages are compressed or not."""
    return CompressingTransport() if compresses else Transport()
