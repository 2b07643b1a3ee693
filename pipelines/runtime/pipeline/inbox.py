"""What has reached a rank for its computations, by rows."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..load import load_oneflow

flow: Any = load_oneflow()

__all__ = ["Inbox", "rows_of_each_slot"]

Tensor = Any


class _Part(NamedTuple):
    """Rows of one slot: those of ``tensor`` from ``position * num_rows`` on."""

    first_row: int
    num_rows: int
    tensor: Tensor
    position: int


class Inbox:
    """Outputs of neighbouring stages by (is forward, pipeline, consuming stage) and slot."""

    def __init__(self) -> None:
        self._parts: dict[tuple[tuple[bool, int, int], int], list[_Part]] = {}

    def put(self, key: tuple[bool, int, int], first_slot: int, num_slots: int, first_row: int, tensor: Tensor) -> None:
        """``tensor`` holds, slot after slot, the rows from ``first_row`` on (of each slot; in any common counting)."""
        num_rows = tensor.shape[0] // num_slots
        for position in range(num_slots):
            part = _Part(first_row, num_rows, tensor, position)
            self._parts.setdefault((key, first_slot + position), []).append(part)

    def take(self, key: tuple[bool, int, int], first_slot: int, num_slots: int) -> Tensor:
        """All rows of some slots, in order; they leave the inbox."""
        parts = [
            part
            for slot in range(first_slot, first_slot + num_slots)
            for part in sorted(self._parts.pop((key, slot)), key=lambda part: part.first_row)
        ]
        tensor = parts[0].tensor
        if all(part.tensor is tensor for part in parts) and len(parts) * parts[0].num_rows == tensor.shape[0]:
            return tensor
        pieces = [flow.narrow(part.tensor, 0, part.position * part.num_rows, part.num_rows) for part in parts]
        return pieces[0].contiguous() if len(pieces) == 1 else flow.cat(pieces, dim=0)


def rows_of_each_slot(tensor: Tensor, num_slots: int, first_row: int, num_rows: int) -> Tensor:
    """Some rows of every slot of a tensor that holds its slots one after the other."""
    per_slot = tensor.shape[0] // num_slots
    if num_rows == per_slot:
        return tensor
    apart = tensor.reshape(num_slots, per_slot, *tensor.shape[1:])
    return flow.narrow(apart, 1, first_row, num_rows).contiguous().reshape(num_slots * num_rows, *tensor.shape[1:])
