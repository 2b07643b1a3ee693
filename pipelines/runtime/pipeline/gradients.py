"""Sums of the gradients of stages' weights over all ranks that hold them.

They are summed over the axes that split samples, by the priced steps; where a stage has replicas in other pipelines, those are
scattered inside, summed between the replicas shard by shard, and gathered inside. Of weights that several stages share, the stages
of a pipeline then tell each other their sums, every rank what it holds (`shared_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autoddl.costmodel.distribution import Axis

from ..layouts import ParameterLayout
from ..load import load_oneflow
from ..stepping import Ranks, num_bytes
from .actions import Reduce
from .shared_weights import WeightPiece, weight_pieces
from .transport import Transport
from .weights import WeightVersions

flow: Any = load_oneflow()

__all__ = ["GradientSums", "SharedLayouts", "StageWeight"]

Tensor = Any
#: What stages know a weight that they share by: (name, rows) of the model's parameters that it holds.
Sources = tuple[tuple[str, int], ...]
#: Of stages that share weights how each of them holds them.
SharedLayouts = Mapping[int, Mapping[Sources, ParameterLayout]]


class StageWeight(NamedTuple):
    """A weight as the ranks of a stage hold it."""

    layout: ParameterLayout
    sources: Sources
    stages: tuple[int, ...]
    """That have it."""

    @property
    def size(self) -> int:
        """Elements that a rank holds."""
        return prod(self.layout.local_shape())


class _Exchange(NamedTuple):
    """A part of a weight's gradient that a rank of one stage tells a rank of another stage of the same pipeline."""

    source_stage: int
    destination_stage: int
    sources: Sources
    source: int
    destination: int
    """Ranks of the job."""
    piece: WeightPiece


def _exchanges_of(pipelines: Sequence[Sequence[range]], held: SharedLayouts) -> list[_Exchange]:
    """Everything that is told about the weights that some stages share, in the order in which it is sent.

    Args:
        pipelines: of each pipeline the ranks of every stage.
    """
    return [
        _Exchange(there, here, sources, ranks[there][piece.source], ranks[here][piece.destination], piece)
        for ranks in pipelines
        for there, here in permutations(held, 2)
        for sources in sorted(held[there])
        for piece in weight_pieces(held[there][sources], held[here][sources])
    ]


class GradientSums:
    """The sums that this rank has a part in.

    Args:
        ranks: those of its worker.
        pipelines: of each pipeline the ranks of every stage.
        weights: of every stage here.
        shared: how stages hold the weights that exactly they share.
    """

    def __init__(
        self,
        ranks: Ranks,
        pipelines: Sequence[Sequence[range]],
        weights: Mapping[int, Sequence[StageWeight]],
        shared: Mapping[tuple[int, ...], SharedLayouts],
    ) -> None:
        self._rank = ranks.first_rank + ranks.rank
        self._ranks = ranks
        self._weights = {stage: sorted(own, key=lambda one: one.sources) for stage, own in weights.items()}
        #: The ranks that hold what this one holds, in all pipelines.
        self._peers = {stage: tuple(sorted(each[stage][ranks.rank] for each in pipelines)) for stage in weights}
        self._exchanges = {stages: _exchanges_of(pipelines, held) for stages, held in shared.items()}

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        """Begin a sum, of the weights that exactly an action's stages have: one vector for all of these that are here."""
        sums = []
        for stage in sorted(replicas):
            for axes, group in self._groups(action, stage).items():
                vector = replicas[stage].gradient(action.update, [weight.layout.name for weight in group])
                sums.append(self._summed(vector, axes, self._peers[stage], transport))
        if not sums:
            return None
        with transport.thread():
            vector = flow.cat(sums, dim=0)
        return vector if len(action.stages) == 1 else self._exchanged(action, vector, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        """Give a stage its part of what `total` has come to."""
        own = [(weight, start) for held, weight, start in self._places(action) if held == stage]
        if own:
            part = flow.narrow(total, 0, own[0][1], sum(weight.size for weight, _ in own))
            replica.set_gradient(action.update, [weight.layout.name for weight, _ in own], part)

    def _places(self, action: Reduce) -> Iterator[tuple[int, StageWeight, int]]:
        """What the vector of a sum consists of: stage by stage the weights, each with where it begins."""
        start = 0
        for stage in sorted(set(action.stages) & set(self._weights)):
            for group in self._groups(action, stage).values():
                for weight in group:
                    yield stage, weight, start
                    start += weight.size

    def _groups(self, action: Reduce, stage: int) -> dict[tuple[Axis, ...], list[StageWeight]]:
        """The weights that exactly an action's stages have, as one of them has them, by the axes that gradients are summed over."""
        groups: dict[tuple[Axis, ...], list[StageWeight]] = {}
        for weight in self._weights[stage]:
            if weight.stages == action.stages:
                groups.setdefault(weight.layout.reduced, []).append(weight)
        return groups

    def _summed(self, vector: Tensor, axes: tuple[Axis, ...], peers: tuple[int, ...], transport: Transport) -> Tensor:
        """Over some axes of the stage, and over its replicas: scattered inside, summed between them, gathered inside."""
        if axes:
            transport.bytes_reduced += num_bytes(vector)
        with transport.thread():
            if len(peers) == 1:
                return self._ranks.reduce(vector, axes)
            return self._ranks.reduce_between(vector, axes, lambda own: transport.all_reduce(own, peers))

    def _exchanged(self, action: Reduce, vector: Tensor, transport: Transport) -> Tensor:
        """The sum over stages, of what each has summed over its own ranks; for the stages held here, one behind the other."""
        values = vector.numpy()
        shards = {
            (stage, weight.sources): values[start : start + weight.size].reshape(weight.layout.local_shape())
            for stage, weight, start in self._places(action)
        }
        parts: dict[tuple[int, int, Sources], np.ndarray] = {}
        for there, here, sources, source, destination, piece in self._exchanges[action.stages]:
            if self._rank == source:
                arrived = shards[there, sources][np.ix_(*piece.places_there)]
                if source != destination:
                    transport.send_sum(flow.tensor(np.ascontiguousarray(arrived)), destination)
            if self._rank == destination:
                if source != destination:
                    arrived = transport.receive_sum(piece.shape, flow.float32, source).numpy()
                part = parts.setdefault((there, here, sources), np.zeros_like(shards[here, sources]))
                part[np.ix_(*piece.places_here)] = arrived
        sums = []
        for (stage, sources), shard in shards.items():
            # In the order of stages everywhere, so that all of them come to the same sum.
            terms = [shard if other == stage else parts[other, stage, sources] for other in action.stages]
            sums.append(sum(terms[1:], terms[0]).reshape(-1))
        return flow.tensor(np.concatenate(sums))
