"""Sums of the weight gradients of stages with SBP plans, over all ranks that hold the weights.

The gradient of a weight is summed in up to three steps:

1. Inside a stage: over the mesh axes that split the samples, by the steps that the cost model prices.
2. Between the replicas of the stage, if several pipelines contain it. The gradient is reduce-scattered inside each replica, the
   shards are all-reduced between the replicas, and the result is gathered inside each replica.
3. Between stages that share the weight (tied weights). The stages of each pipeline send each other their sums; a rank receives the
   elements that it updates itself (`shared_weights`).

If the ranks of a stage divide a weight's states (ZeRO), step 1 is a reduce-scatter, and the later steps sum shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import permutations
from math import prod
from typing import Any, NamedTuple

import numpy as np

from autoddl.costmodel.distribution import Axis

from ..comm.parameter_layouts import ParameterLayout
from ..load import load_oneflow
from ..shards import update_shards
from ..stepping import Ranks, num_bytes
from .actions import Reduce
from .shared_weights import WeightPiece, weight_pieces
from .transport import Transport
from .weights import WeightVersions

flow: Any = load_oneflow()

__all__ = ["GradientSums", "SharedLayouts", "StageWeight", "shared_layouts"]

Tensor = Any
#: Identifies a weight in all stages: (name, rows) of each parameter of the model that the weight contains.
Sources = tuple[tuple[str, int], ...]
#: For each of several stages the layouts of the weights that they share, by their sources.
SharedLayouts = Mapping[int, Mapping[Sources, ParameterLayout]]


class StageWeight(NamedTuple):
    """A weight as the ranks of a stage hold it.

    Attributes:
        layout: Layout over the ranks of the stage.
        stages: Stages that have the weight, ascending.
    """

    layout: ParameterLayout
    stages: tuple[int, ...]

    @property
    def sources(self) -> Sources:
        """(Name, rows) of each parameter of the model that the weight contains."""
        return self.layout.sources

    @property
    def size(self) -> int:
        """Number of elements of the sum that each rank holds."""
        return prod(self.layout.stored_shape())


class _SumMessage(NamedTuple):
    """A piece of a shared weight's gradient that a rank of one stage sends to a rank of another stage of the same pipeline.

    Attributes:
        source_stage: Stage that sends its sum.
        destination_stage: Stage that receives.
        sources: Sources of the weight.
        source: Rank of the job that sends.
        destination: Rank of the job that receives.
        piece: Elements that are sent.
    """

    source_stage: int
    destination_stage: int
    sources: Sources
    source: int
    destination: int
    piece: WeightPiece


def _sum_messages(pipelines: Sequence[Sequence[range]], layouts: SharedLayouts) -> list[_SumMessage]:
    """Return the messages by which stages sum the gradients of the weights that they share, in the order of sending.

    Args:
        pipelines: For each pipeline the ranks of every stage.
        layouts: Layouts of the shared weights.
    """
    messages = []
    for ranks in pipelines:
        for source_stage, destination_stage in permutations(layouts, 2):
            for sources in sorted(layouts[source_stage]):
                for piece in weight_pieces(layouts[source_stage][sources], layouts[destination_stage][sources]):
                    source = ranks[source_stage][piece.source]
                    destination = ranks[destination_stage][piece.destination]
                    messages.append(_SumMessage(source_stage, destination_stage, sources, source, destination, piece))
    return messages


def shared_layouts(weights: Iterable[Mapping[int, ParameterLayout]]) -> dict[tuple[int, ...], SharedLayouts]:
    """Return the layouts of weights that several stages share, grouped by these stages.

    Args:
        weights: For each weight its layout in every stage that has it, by ascending number of the stage.
    """
    groups: dict[tuple[int, ...], dict[int, dict[Sources, ParameterLayout]]] = {}
    for layouts in weights:
        group = groups.setdefault(tuple(layouts), {stage: {} for stage in layouts})
        for stage, layout in layouts.items():
            group[stage][layout.sources] = layout
    return dict(groups)


class GradientSums:
    """The gradient sums that this rank takes part in.

    Args:
        ranks: Ranks of this rank's worker.
        pipelines: For each pipeline the ranks of every stage.
        weights: Weights of each stage on this worker.
        shared: Layouts of shared weights, by the stages that share them.
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
        self._weights = {stage: sorted(own, key=lambda weight: weight.sources) for stage, own in weights.items()}
        # For each stage, the ranks of all pipelines that hold the same shards as this rank.
        self._peers = {stage: tuple(sorted(each[stage][ranks.rank] for each in pipelines)) for stage in weights}
        self._messages = {stages: _sum_messages(pipelines, layouts) for stages, layouts in shared.items()}

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        """Issue the sum of the gradients of the weights that belong to exactly the stages of an action.

        Args:
            action: The reduction.
            replicas: Weights of the action's stages on this rank, by stage.
            transport: Sends and receives.

        Returns:
            One vector with the summed gradients of these weights for all stages on this rank; None if there are none.
        """
        sums = []
        for stage in sorted(replicas):
            for group in self._groups(action, stage).values():
                names, first = [weight.layout.name for weight in group], group[0].layout
                if first.zero:
                    gradients = replicas[stage].gradients(action.update, names)
                    sums.append(self._shards_over_ranks(gradients, group, self._peers[stage], transport))
                else:
                    vector = replicas[stage].gradient(action.update, names)
                    sums.append(self._sum_over_ranks(vector, first.reduced, self._peers[stage], transport))
        if not sums:
            return None
        if len(sums) == 1:  # a concatenation would copy all gradients once more
            vector = sums[0]
        else:
            with transport.thread():
                vector = flow.cat(sums, dim=0)
        return vector if len(action.stages) == 1 else self._sum_over_stages(action, vector, transport)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        """Set the gradients of a stage's weights to their parts of a sum.

        Args:
            stage: The stage.
            action: The reduction.
            replica: Weights of the stage.
            total: Result of `GradientSums.total` for the reduction.
        """
        own = [(weight, start) for held_stage, weight, start in self._positions(action) if held_stage == stage]
        if own:
            first = own[0][1]
            part = flow.narrow(total, 0, first, sum(weight.size for weight, _ in own))
            replica.set_gradient(action.update, [weight.layout.name for weight, _ in own], part)

    def _positions(self, action: Reduce) -> Iterator[tuple[int, StageWeight, int]]:
        """Yield (stage, weight, first element) for each weight in the vector of a sum, in order."""
        start = 0
        for stage in sorted(set(action.stages) & set(self._weights)):
            for group in self._groups(action, stage).values():
                for weight in group:
                    yield stage, weight, start
                    start += weight.size

    def _groups(self, action: Reduce, stage: int) -> dict[tuple[Any, ...], list[StageWeight]]:
        """Return a stage's weights that belong to exactly the stages of an action, by how their gradients are summed."""
        groups: dict[tuple[Any, ...], list[StageWeight]] = {}
        for weight in self._weights[stage]:
            if weight.stages == action.stages:
                layout = weight.layout
                groups.setdefault((layout.reduced, layout.zero, layout.hybrid), []).append(weight)
        return groups

    def _shards_over_ranks(
        self, gradients: Sequence[Tensor], group: Sequence[StageWeight], peers: tuple[int, ...], transport: Transport
    ) -> Tensor:
        """Sum the gradients of divided weights, and return this rank's shards of the sums, one after the other."""
        layouts = [weight.layout for weight in group]
        transport.bytes_reduced += sum(num_bytes(gradient) for gradient in gradients)
        with transport.thread():
            vector = flow.cat(update_shards(gradients, layouts, self._ranks), dim=0)
            vector = vector.to(self._ranks.backend.communication)
            return vector if len(peers) == 1 else transport.all_reduce(vector, peers)

    def _sum_over_ranks(
        self, vector: Tensor, axes: tuple[Axis, ...], peers: tuple[int, ...], transport: Transport
    ) -> Tensor:
        """Sum a vector over mesh axes of the stage, and over the ranks of its replicas (steps 1 and 2 of the module)."""
        if axes:
            transport.bytes_reduced += num_bytes(vector)
        with transport.thread():
            if len(peers) == 1:
                return self._ranks.reduce(vector, axes)
            return self._ranks.reduce_between(vector, axes, lambda shard: transport.all_reduce(shard, peers))

    def _sum_over_stages(self, action: Reduce, vector: Tensor, transport: Transport) -> Tensor:
        """Sum the gradients of shared weights over the stages that share them (step 3 of the module).

        Args:
            action: The reduction.
            vector: Sums over the ranks of each stage on this rank, one stage after the other.
            transport: Sends and receives.

        Returns:
            The sums over all stages, in the form of ``vector``.
        """
        values, backend = vector.numpy(), self._ranks.backend
        shards = {
            (stage, weight.sources): values[start : start + weight.size]
            for stage, weight, start in self._positions(action)
        }
        # Sums of other stages, for the elements of this rank's shards: by (source stage, destination stage, sources).
        received: dict[tuple[int, int, Sources], np.ndarray] = {}
        for source_stage, destination_stage, sources, source, destination, piece in self._messages[action.stages]:
            if self._rank == source:
                elements = piece.source_places.take(shards[source_stage, sources])
                if source != destination:
                    transport.send_sum(backend.tensor(np.ascontiguousarray(elements), vector.dtype), destination)
            if self._rank == destination:
                if source != destination:
                    elements = transport.receive_sum(piece.shape, vector.dtype, source).numpy()
                shard = shards[destination_stage, sources]
                part = received.setdefault((source_stage, destination_stage, sources), np.zeros_like(shard))
                piece.destination_places.put(part, elements)
        sums = []
        for (stage, sources), shard in shards.items():
            # All ranks add in the order of the stages, so that all of them get bitwise the same sum.
            terms = [shard if other == stage else received[other, stage, sources] for other in action.stages]
            sums.append(sum(terms[1:], terms[0]))
        return backend.tensor(np.concatenate(sums), vector.dtype)
