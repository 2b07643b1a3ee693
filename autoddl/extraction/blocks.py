"""Marks repeated blocks: consecutive equal children of a module list or sequence.

Two children are equal if their layers have the same roles, kinds, shapes, parameters and costs, and the same edges between
them.  A block has at least two layers; a repeated single layer is not a block.  Of nested blocks, the outer ones are marked.
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
    """Set the block, the block index and the role of all layers that are part of repeated blocks.

    A block has the name of its container.  If a container holds several runs of equal children, the range of the run is
    appended to its name: ``stages[1:4]``.

    Args:
        layers: All layers.
        edges: Pairs (source, target) of layer names.
        containers: Paths of module lists and sequences, with the paths of their children in order.

    Returns:
        The layers in their order; those outside of blocks are unchanged.
    """
    inputs: dict[str, list[str]] = {layer.name: [] for layer in layers}
    for source, target in edges:
        inputs[target].append(source)
    marked = {layer.name: layer for layer in layers}
    # Outer containers come first; a container whose layers are already marked is skipped.
    for container in sorted(containers, key=lambda path: path.count(".") if path else -1):
        members = [_members(layers, child) for child in containers[container]]
        if any(marked[layer.name].block for child in members for layer in child):
            continue
        signatures = [_signature(child, path, inputs) for child, path in zip(members, containers[container])]
        runs = _runs(signatures, members)
        for first, stop in runs:
            name = container if len(runs) == 1 else f"{container}[{first}:{stop}]"
            for index in range(first, stop):
                prefix = f"{containers[container][index]}."
                for layer in members[index]:
                    role = layer.name[len(prefix) :]
                    marked[layer.name] = replace(layer, block=name or "blocks", block_index=index - first, role=role)
    return [marked[layer.name] for layer in layers]


def _members(layers: Sequence[Layer], path: str) -> list[Layer]:
    return [layer for layer in layers if layer.name.startswith(f"{path}.")]


def _signature(members: Sequence[Layer], path: str, inputs: Mapping[str, Sequence[str]]) -> tuple[Any, ...]:
    """Return a value that is the same for equal children.

    It leaves out the child's path, and the layers outside of the child that it reads, since the first child reads other layers than
    the following ones.
    """
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
    """Return the ranges (first, stop) of consecutive equal children with at least two layers each.

    A range has at least two children, unless the container has a single child.
    """
    runs, first = [], 0
    for index in range(1, len(signatures) + 1):
        if index == len(signatures) or signatures[index] != signatures[first]:
            if (index - first > 1 or len(signatures) == 1) and len(members[first]) > 1:
                runs.append((first, index))
            first = index
    return runs
