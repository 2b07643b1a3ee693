"""The stages of a chain of layers on one rank. The ranks of a worker share the rows of every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ..backend import HOST, Backend
from ..load import load_oneflow
from .actions import BoundaryTensor, Reduce, Run
from .chain import StageModule, tied_stages
from .checkpoint import Entry
from .data import BatchSource, LossPart, SlotData
from .lowering import Lowered
from .transport import Transport
from .weights import ReplicaWeights, WeightVersions

flow: Any = load_oneflow()

__all__ = ["ChainStages"]

Tensor = Any


class ChainStages:
    """The stages of a chain of layers on one rank. Implements `work.TrainableStages`.

    Args:
        lowered: The schedule, lowered without layouts.
        rank: This rank.
        stages: All stages of the model.
        boundaries: The tensors at the boundaries between them.
        batch: Source of the micro-batches.
        backend: Device and types.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        stages: Sequence[StageModule],
        boundaries: Sequence[BoundaryTensor],
        batch: BatchSource,
        backend: Backend = HOST,
    ) -> None:
        self._backend = backend
        self.boundaries = boundaries
        self._stages = stages
        self._data = SlotData(lowered.schedule, lowered.slots_per_micro_batch, lowered.slot_rows, batch)
        self._rows = lowered.ranks.rows_of(rank, lowered.slot_rows)
        # Names of the parameters that belong to exactly some stages, by these stages.
        self._names: dict[tuple[int, ...], list[str]] = {}
        tied = tied_stages(stages)
        for name, sharing_stages in tied.items():
            self._names.setdefault(sharing_stages, []).append(name)
        for stage in stages:
            self._names[(stage.number,)] = [name for name in stage.places if name not in tied]

    @property
    def first_micro_batch(self) -> int:
        return self._data.first_micro_batch

    @first_micro_batch.setter
    def first_micro_batch(self, number: int) -> None:
        self._data.first_micro_batch = number

    def initial_values(self, stage: int) -> dict[str, Tensor]:
        return self._stages[stage].initial_values()

    def run(
        self, run: Run, x: Tensor | None, weights: Sequence[Tensor], first_slot: int, num_slots: int
    ) -> tuple[Tensor, list[LossPart]]:
        stage = self._stages[run.task.stage]
        slots = range(first_slot, first_slot + num_slots)
        y = stage.run(self._tensor(slots, 0) if x is None else x, weights)
        if stage.loss is None:
            return y, []
        # The loss of each micro-batch, weighted by its share of the update's rows.
        targets = self._tensor(slots, 1)
        if self._backend.has_masters:  # losses are computed in the master type
            y = y.to(self._backend.master)
            targets = targets.to(y.dtype) if targets.is_floating_point() else targets
        total, parts, first_row = 0.0, [], 0
        for micro_batch, slots_of_one in groupby(slots, key=self._data.micro_batch):
            num_rows = len(list(slots_of_one)) * len(self._rows)
            loss = stage.loss(flow.narrow(y, 0, first_row, num_rows), flow.narrow(targets, 0, first_row, num_rows))
            first_row += num_rows
            share = self._data.share_of_micro_batch(num_rows)
            parts.append(LossPart(micro_batch, float(loss.detach().numpy()) * share, share))
            total = loss * self._data.share_of_update(num_rows, run.update) + total
        return total, parts

    def _tensor(self, slots: range, which: int) -> Tensor:
        """Return this rank's rows of the inputs (``which`` = 0) or targets (1) of some slots."""
        return self._backend.activation(np.concatenate([self._data.rows(slot, which, self._rows) for slot in slots]))

    def total(self, action: Reduce, replicas: Mapping[int, WeightVersions], transport: Transport) -> Tensor | None:
        names = self._names[action.stages]
        if not names:
            return None  # the same on all ranks
        gradients: list[Any] = [replica.gradient(action.update, names) for replica in replicas.values()]
        return transport.all_reduce(sum(gradients[1:], gradients[0]), action.ranks)

    def set_gradient(self, stage: int, action: Reduce, replica: WeightVersions, total: Tensor) -> None:
        replica.set_gradient(action.update, self._names[action.stages], total)

    def shapes(self, stage: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._stages[stage].initial_values().items()}

    def whole(self, stage: int, kept: Mapping[str, Entry]) -> dict[str, Entry]:
        return dict(kept)

    def restore(self, stage: int, replica: ReplicaWeights, entries: Mapping[str, Entry]) -> None:
        replica.restore(entries)
