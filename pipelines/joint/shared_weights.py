"""Weights that two stages share: what the exchange of their gradients takes.

Both stages hold a copy of the weight (tied embeddings), so that their workers all-reduce its gradient.  The device with more bytes
of the gradient decides how long it takes, so that each stage takes at least as long as its own bytes do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis

if TYPE_CHECKING:
    from .cut_graph import CutGraph

__all__ = ["SharedWeight", "TiesError", "exchange_of", "shared_weights"]


class TiesError(Exception):
    """A weight is shared by other units than the first and the last one, whose stages depend on the cut."""


@dataclass(frozen=True)
class SharedWeight:
    """A weight that the first and the last stage hold, on different workers.

    Attributes:
        early, late: The (stage, index among the shared weights of the stage) of the earlier and of the later stage.
        latency_s, byte_s: The least seconds of the all-reduce that no backward pass hides: in any case, and for each byte.
    """

    early: tuple[int, int]
    late: tuple[int, int]
    latency_s: float
    byte_s: float

    def seconds(self, nbytes: np.ndarray) -> np.ndarray:
        """The least seconds of the all-reduce that no backward pass hides, for each number of bytes."""
        return self.latency_s + self.byte_s * nbytes


def shared_weights(cut_graph: CutGraph) -> tuple[SharedWeight, ...]:
    """The weights that stages of different workers share.

    Raises:
        TiesError: They are not those of the first and the last unit.
    """
    explorer, setting = cut_graph.explorer, cut_graph.setting
    if not explorer.chain.shares_weights:
        return ()
    weights: list[SharedWeight] = []
    last = cut_graph.num_stages - 1
    workers = cut_graph.placement[0][0], cut_graph.placement[0][last]
    for ends in explorer.chain.ends_of_ties():
        if ends != (0, explorer.chain.num_units - 1):
            raise TiesError
        if workers[0] != workers[1]:
            link, number = setting.mesh.link_between(explorer.cluster, workers), len(weights)
            seconds = link.times(Step(Collective.ALL_REDUCE, Axis(2, 1), 1.0))
            latency_s, byte_s = (explorer.workload.exposed_gradient_part * part for part in seconds)
            weights.append(SharedWeight((0, number), (last, number), latency_s, byte_s))
    return tuple(weights)


def exchange_of(cut_graph: CutGraph) -> tuple[float, float]:
    """The least seconds to exchange the gradients of the weights that the first and the last stage share, at each of them.

    Returns:
        The seconds, and further seconds for each byte that a device of the stage exchanges; zeros if no such weights are known.
    """
    try:
        weights = shared_weights(cut_graph)
    except TiesError:
        return 0.0, 0.0
    return sum(weight.latency_s for weight in weights), max((weight.byte_s for weight in weights), default=0.0)
