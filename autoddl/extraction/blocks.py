"""Repeated blocks: children of a module list or sequence that are made alike, one after the other.

Children are alike where their layers have the same roles, kinds, shapes, parameters and costs, and read each other in the
same way.  A block has two layers or more: a single layer repeated is no block.  Where blocks lie inside blocks the outer
ones count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoddl.costmodel.graph import Layer

__all__ = ["mark_blocks"]


def mark_blocks(
    layers: Sequence[Layer], edges: Sequence[tuple[str, str]], containers: Mapping[str, Sequence[str]]
) -> list[Layer]:
    """The layers, those in repeated blocks marked with block, index and role.

    A block bears the name of its container; where a container has several different runs, with their range appended:
    ``stages[1:4]``.
    """
    inputs: dict[str, list[str]] = {layer.name: [] for layer in layers}
    for source, target in edges:
        inputs[target].append(source)
    marked = {layer.name: layer for layer in layers}
    # Outer containers first.
    for container in sorted(containers, key=lambda path: path.count(".") if path else -1):
        members = [_members(layers, child) for child in containers[container]]
        if any(marked[layer.name].block for child in members for layer in child):
            continue
        signatures = [_signature(child, path, inputs) for child, path in zip(members, containers[container])]
        runs = _runs(signatures, members)
        for first, last in runs:
            name = container if len(runs) == 1 else f"{container}[{first}:{last}]"
            for index in range(first, last):
                prefix = f"{containers[container][index]}."
                for layer in members[index]:
                    role = layer.name[len(prefix) :]
                    marked[layer.name] = replace(layer, block=name or "blocks", block_index=index - first, role=role)
    return [marked[layer.name] for layer in layers]


def _members(layers: Sequence[Layer], path: str) -> list[Layer]:
    return [layer for layer in layers if layer.name.startswith(f"{path}.")]


def _signature(members: Sequence[Layer], path: str, inputs: Mapping[str, Sequence[str]]) -> tuple[Any, ...]:
    """What a child is made of, its own names left out, and what comes from outside too: the first child reads raw data."""
    start = len(path) + 1
    names = {layer.name for layer in members}
    return tuple(
        (
            layer.name[start:],
            layer.signature(),
            tuple(source[start:] for source in inputs[layer.name] if source in names),
        )
        for layer in members
    )


def _runs(signatures: Sequence[tuple[Any, ...]], members: Sequence[Sequence[Layer]]) -> list[tuple[int, int]]:
    """Ranges of equal children, of two or more layers each; two or more in number, or the only child that there is."""
    runs, first = [], 0
    for index in range(1, len(signatures) + 1):
        if index == len(signatures) or signatures[index] != signatures[first]:
            if (index - first > 1 or len(signatures) == 1) and len(members[first]) > 1:
                runs.append((first, index))
            first = index
    return runs
