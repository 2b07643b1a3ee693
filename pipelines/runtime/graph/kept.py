"""`KeptGraph`: an ``nn.Graph`` that lives as long as its process."""

from __future__ import annotations

from typing import Any, ClassVar

from ..load import load_oneflow

flow: Any = load_oneflow()

__all__ = ["KeptGraph"]


class KeptGraph(flow.nn.Graph):
    """Base class of graphs that are never destroyed.

    When a graph ends, OneFlow destroys what receives its messages, which may not have finished with the last one yet: now and then
    the process aborts ("Check failed: actor_read_ctx->waiting_list.empty()").  And nothing is gained by it: OneFlow frees the
    memory of a graph when its process ends.
    """

    _kept: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        KeptGraph._kept.append(self)
