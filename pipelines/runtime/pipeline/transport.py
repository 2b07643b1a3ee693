"""Communication between ranks, which overlaps with their computations.

All communication of a process is issued in one OneFlow thread, where it runs sequentially in the order of issue while the main
thread continues. Only the ranks that take part call. A received tensor can be used at once: OneFlow delays computations that read
it until it has arrived.

Messages can be compressed (`compression`). The sender compresses a message when it sends it, the receiver decompresses it when it
needs it, both in the main thread. Bytes are counted as they are sent.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ..backend import HOST, Backend
from ..comm.collectives import receive, send, sum_over
from ..detaching import detached
from ..load import load_oneflow
from .actions import Message
from .compression import decode, encode, has_rest, num_words, num_words_of_rest

flow: Any = load_oneflow()

__all__ = ["CompressingTransport", "Transport", "make_transport"]

Tensor = Any


@functools.cache
def _communication_thread() -> Any:
    """Return the communication thread of this process; it is never garbage collected.

    OneFlow numbers its threads, and gives the number of a garbage-collected thread to the next one. If a thread has been collected
    on one rank but not yet on another, threads that are created next have different numbers on them, and a collective in these
    threads waits forever.
    """
    return flow.asyncs.Thread()


class Transport:
    """The communication of one rank in one run of a schedule, without compression.

    Args:
        backend: Device and types of the tensors.

    Attributes:
        bytes_sent: Bytes of the messages that this rank sent.
        bytes_saved: Bytes that compression saved in these messages.
        num_uncompressed: Number of messages that compression had to leave in full precision.
        bytes_reduced: Bytes of the gradient vectors that this rank summed with others (not the bytes sent for these sums).
    """

    def __init__(self, backend: Backend = HOST) -> None:
        self._backend = backend
        # Created on all ranks, even on those that never communicate, so that OneFlow's thread numbers agree.
        self._thread = _communication_thread()
        self.bytes_sent = 0
        self.bytes_saved = 0
        self.num_uncompressed = 0
        self.bytes_reduced = 0

    def send(self, message: Message, x: Tensor) -> None:
        """Send the tensor of a message: all of it, or the first part if messages are compressed."""
        self._send(detached(x).contiguous(), message.destination)

    def receive(self, message: Message, shape: tuple[int, ...], dtype: Any) -> Tensor | None:
        """Receive the tensor of a message; None if only its first part is received now, and `rest` returns the tensor."""
        return self._receive(shape, dtype, message.source)

    def rest(self, message: Message) -> Tensor | None:
        """Send or receive the second part of a compressed message, if it has one; return the tensor on the receiving rank."""
        return None

    def _send(self, x: Tensor, rank: int) -> None:
        self.bytes_sent += x.numel() * x.element_size()
        with self.thread():
            send(x, rank)

    def _receive(self, shape: tuple[int, ...], dtype: Any, rank: int) -> Tensor:
        with self.thread():
            return receive(shape, dtype, rank, self._backend.device)

    def send_sum(self, x: Tensor, rank: int) -> None:
        """Send a part of a gradient sum to a rank that holds the same weights in another layout."""
        self.bytes_reduced += x.numel() * x.element_size()
        with self.thread():
            send(x, rank)

    def receive_sum(self, shape: tuple[int, ...], dtype: Any, rank: int) -> Tensor:
        """Receive a tensor that ``rank`` sends with `send_sum`."""
        return self._receive(shape, dtype, rank)

    def thread(self) -> Any:
        """Return a context in which OneFlow operations are issued in the communication thread."""
        return flow.asyncs.thread(self._thread)

    def all_reduce(self, flat: Tensor, ranks: tuple[int, ...]) -> Tensor:
        """Return the sum of a vector over ``ranks``, which are in ascending order and include this one."""
        if len(ranks) > 1:
            self.bytes_reduced += flat.numel() * flat.element_size()
        with self.thread():
            return sum_over(flat, ranks, self._backend.handshake)


class CompressingTransport(Transport):
    """Communication with messages in single precision compressed if their values allow it.

    After `send` and `receive` of a message, the sender and the receiver both have to call `rest` for it.
    """

    def __init__(self, backend: Backend = HOST) -> None:
        super().__init__(backend)
        self._unsent_rests: dict[Message, np.ndarray] = {}
        #: The first part of each message that is being received, and the shape of the whole tensor.
        self._first_parts: dict[Message, tuple[Tensor, tuple[int, ...]]] = {}

    def send(self, message: Message, x: Tensor) -> None:
        if x.dtype != flow.float32:
            super().send(message, x)
            return
        first, rest = encode(detached(x).numpy())
        if rest is not None:
            self._unsent_rests[message] = rest
            self.num_uncompressed += 1
        self.bytes_saved += 4 * x.numel() - first.nbytes - (0 if rest is None else rest.nbytes)
        self._send(self._backend.tensor(first), message.destination)

    def receive(self, message: Message, shape: tuple[int, ...], dtype: Any) -> Tensor | None:
        if dtype != flow.float32:
            return super().receive(message, shape, dtype)
        first = self._receive((num_words(math.prod(shape)),), flow.int32, message.source)
        self._first_parts[message] = first, shape
        return None

    def rest(self, message: Message) -> Tensor | None:
        if message in self._unsent_rests:
            self._send(self._backend.tensor(self._unsent_rests.pop(message)), message.destination)
        if message not in self._first_parts:
            return None
        received, shape = self._first_parts.pop(message)
        first, size, rest = received.numpy(), math.prod(shape), None
        if has_rest(first):
            rest = self._receive((num_words_of_rest(size),), flow.int32, message.source).numpy()
        return self._backend.tensor(decode(first, rest, size).reshape(shape))


def make_transport(compresses: bool, backend: Backend = HOST) -> Transport:
    """Return the communication of this rank for one run of a schedule."""
    return CompressingTransport(backend) if compresses else Transport(backend)
