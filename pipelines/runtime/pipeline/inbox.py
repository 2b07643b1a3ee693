"""What has reached a rank for its computations, by rows and columns."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from ..load import load_oneflow

flow: Any = load_oneflow()

__all__ = ["Inbox", "part_of_each_slot"]

Tensor = Any


class _Block(NamedTuple):
    """A block of one slot: rows of ``tensor`` from ``position * num_rows`` on."""

    first_row: int
    first_column: int
    num_rows: int
    tensor: Tensor
    position: int

    def block(self) -> Tensor:
        return flow.narrow(self.tensor, 0, self.position * self.num_rows, self.num_rows)


class Inbox:
    """Outputs of neighbouring stages by (is forward, pipeline, consuming stage) and slot."""

    def __init__(self) -> None:
        self._parts: dict[tuple[tuple[bool, int, int], int], list[_Block]] = {}

    def put(
        self,
        key: tuple[bool, int, int],
        first_slot: int,
        num_slots: int,
        first_row: int,
        first_column: int,
        tensor: Tensor,
    ) -> None:
        """``tensor`` holds, slot after slot, a block: from this row of each slot and this column on (in any common counting)."""
        num_rows = tensor.shape[0] // num_slots
        for position in range(num_slots):
            part = _Block(first_row, first_column, num_rows, tensor, position)
            self._parts.setdefault((key, first_slot + position), []).append(part)

    def take(self, key: tuple[bool, int, int], first_slot: int, num_slots: int) -> Tensor:
        """All of some slots, in order; it leaves the inbox. The blocks of a slot are a grid."""
        slots = [self._parts.pop((key, slot)) for slot in range(first_slot, first_slot + num_slots)]
        first = slots[0][0]
        is_one_tensor = all(len(parts) == 1 and parts[0].tensor is first.tensor for parts in slots)
        if is_one_tensor and len(slots) * first.num_rows == first.tensor.shape[0]:
            return first.tensor
        pieces = []
        for parts in slots:
            parts.sort(key=lambda part: (part.first_row, part.first_column))
            for _, side_by_side in groupby(parts, key=lambda part: part.first_row):
                pieces.append(_concatenated([part.block() for part in side_by_side], -1))
        return _concatenated(pieces, 0).contiguous()


def _concatenated(pieces: list[Tensor], dim: int) -> Tensor:
    return pieces[0] if len(pieces) == 1 else flow.cat(pieces, dim=dim)


def part_of_each_slot(tensor: Tensor, num_slots: int, rows: range, columns: range | None) -> Tensor:
    """Some rows and columns (None for all) of every slot of a tensor that holds its slots one after the other."""
    per_slot = tensor.shape[0] // num_slots
    if len(rows) < per_slot:
        apart = tensor.reshape(num_slots, per_slot, *tensor.shape[1:])
        apart = flow.narrow(apart, 1, rows.start, len(rows)).contiguous()
        tensor = apart.reshape(num_slots * len(rows), *tensor.shape[1:])
    if columns is not None and len(columns) < tensor.shape[-1]:
        tensor = flow.narrow(tensor, len(tensor.shape) - 1, columns.start, len(columns)).contiguous()
    return tensor
