"""The inbox of a rank: tensors from neighbouring stages that its computations have not read yet."""

from __future__ import annotations

from itertools import groupby
from typing import Any, NamedTuple

from ..load import load_oneflow

flow: Any = load_oneflow()

__all__ = ["Inbox", "part_of_each_slot"]

Tensor = Any


class _SlotBlock(NamedTuple):
    """A block of one slot: rows ``position * num_rows`` to ``(position + 1) * num_rows`` of ``tensor``.

    Attributes:
        first_row: First row of the block in the slot.
        first_column: First column of the block in the slot.
        num_rows: Rows of the block.
        tensor: Blocks of one or several slots, one after the other.
        position: Position of this slot's block in ``tensor``.
    """

    first_row: int
    first_column: int
    num_rows: int
    tensor: Tensor
    position: int

    def values(self) -> Tensor:
        return flow.narrow(self.tensor, 0, self.position * self.num_rows, self.num_rows)


class Inbox:
    """Outputs of neighbouring stages, by key and slot. A key is (is forward, pipeline, consuming stage)."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[tuple[bool, int, int], int], list[_SlotBlock]] = {}

    def put(
        self,
        key: tuple[bool, int, int],
        first_slot: int,
        num_slots: int,
        first_row: int,
        first_column: int,
        tensor: Tensor,
    ) -> None:
        """Store the same block of several slots.

        Args:
            key: Key of the consumer.
            first_slot: First slot.
            num_slots: Number of slots.
            first_row: First row of the block. Rows and columns may be counted from any origin that is common to all blocks.
            first_column: First column of the block.
            tensor: The blocks of the slots, concatenated along dimension 0.
        """
        num_rows = tensor.shape[0] // num_slots
        for position in range(num_slots):
            block = _SlotBlock(first_row, first_column, num_rows, tensor, position)
            self._blocks.setdefault((key, first_slot + position), []).append(block)

    def take(self, key: tuple[bool, int, int], first_slot: int, num_slots: int) -> Tensor:
        """Remove some slots from the inbox and return them, concatenated along dimension 0.

        The blocks of each slot must form a grid: all blocks with the same first row have the same rows.
        """
        slots = [self._blocks.pop((key, slot)) for slot in range(first_slot, first_slot + num_slots)]
        # A tensor that contains exactly these slots needs no copy.
        first = slots[0][0]
        is_one_tensor = all(len(blocks) == 1 and blocks[0].tensor is first.tensor for blocks in slots)
        if is_one_tensor and len(slots) * first.num_rows == first.tensor.shape[0]:
            return first.tensor
        # Concatenate the blocks side by side, then the resulting rows.
        row_blocks = []
        for blocks in slots:
            blocks.sort(key=lambda block: (block.first_row, block.first_column))
            for _, side_by_side in groupby(blocks, key=lambda block: block.first_row):
                row_blocks.append(_concatenated([block.values() for block in side_by_side], -1))
        return _concatenated(row_blocks, 0).contiguous()


def _concatenated(tensors: list[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else flow.cat(tensors, dim=dim)


def part_of_each_slot(tensor: Tensor, num_slots: int, rows: range, columns: range | None) -> Tensor:
    """Return the same rows and columns of every slot of a tensor.

    Args:
        tensor: The slots, concatenated along dimension 0.
        num_slots: Number of slots of the tensor.
        rows: Rows, counted from the first row of the slot in the tensor.
        columns: Indices of the last dimension; None for all of them.
    """
    rows_per_slot = tensor.shape[0] // num_slots
    if len(rows) < rows_per_slot:
        slots = tensor.reshape(num_slots, rows_per_slot, *tensor.shape[1:])
        slots = flow.narrow(slots, 1, rows.start, len(rows)).contiguous()
        tensor = slots.reshape(num_slots * len(rows), *tensor.shape[1:])
    if columns is not None and len(columns) < tensor.shape[-1]:
        tensor = flow.narrow(tensor, len(tensor.shape) - 1, columns.start, len(columns)).contiguous()
    return tensor
