"""Modules that hold the parameters of a layer in an exported model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from oneflow import nn

from autoddl.pipelines.runtime.comm.parameter_layouts import ParameterLayout
from autoddl.pipelines.runtime.operations import checkpoint
from autoddl.pipelines.runtime.parameters import ParameterGroup, StoredParameter, bucketed_groups, parameter_groups
from autoddl.pipelines.runtime.shards import attach_weights
from autoddl.pipelines.runtime.stepping import Ranks

from .passes import PASSES

Tensor = Any


class StageParameters(nn.Module):
    """The parameters of a layer of a pipeline stage, as global tensors.

    Args:
        layouts: the layout of each parameter.
        ranks: the ranks that hold the parameters.
        placement: these ranks, arranged as a mesh.
        sbp: the SBP signature of each parameter, one state per axis of the mesh.
    """

    def __init__(self, layouts: Sequence[ParameterLayout], ranks: Ranks, placement: Any, sbp: Sequence[Sequence[Any]]):
        super().__init__()
        self.ranks = ranks
        self.stored = [StoredParameter(layout, ranks, placement, states) for layout, states in zip(layouts, sbp)]
        self.given: tuple[Tensor, ...] | None = None  # what a recomputed block computes with instead
        for stored in self.stored:
            self.register_parameter(stored.layout.name.replace(".", "_"), stored.tensor)

    def local(self) -> tuple[Tensor, ...]:
        """Return this rank's blocks of the parameters, in the weight version of the current task.

        The blocks collect gradients on this rank. The instructions of the schedule say when these are summed over the ranks.
        """
        if self.given is not None:
            return self.given
        inner = next((stored.layout.inner for stored in self.stored if stored.layout.zero), ())
        return tuple(attach_weights([stored.leaf for stored in self.stored], inner, self.ranks))


class SharedGroup:
    """A group of parameters, whose tensors every layer that has some of them asks for once in a forward pass."""

    def __init__(self, group: ParameterGroup):
        self.group = group
        self._tensors: tuple[Tensor, ...] = ()
        self._askers: set[int] = set()

    def summed(self, layer: LayerParameters) -> tuple[Tensor, ...]:
        """Return local tensors of this forward pass, whose gradients are summed over the ranks."""
        if not self._askers or id(layer) in self._askers:  # a new pass
            self._tensors, self._askers = self.group.summed(), set()
        self._askers.add(id(layer))
        return self._tensors


class LayerParameters(StageParameters):
    """The parameters of a layer of a model without a pipeline. The arguments are those of `StageParameters`."""

    @cached_property
    def groups(self) -> tuple[SharedGroup, ...]:
        """The parameters, grouped by the mesh axes over which their gradients are summed; see also `sum_together`."""
        return tuple(map(SharedGroup, parameter_groups(self.stored, self.ranks)))

    def renew(self) -> None:
        """Take note that the values of the parameters were changed."""
        for shared in self.groups:
            shared.group.renew()

    def local(self, sync: bool = True) -> tuple[Tensor, ...]:
        """Return this rank's blocks of the parameters, as local tensors to compute with.

        Args:
            sync: whether the backward pass sums the gradients over the ranks, those of a group together. If False, gradients
                collect on this rank until a backward pass with ``sync=True``.
        """
        if self.given is not None:
            return self.given
        blocks: dict[int, Tensor] = {}
        for shared in self.groups:
            tensors = shared.summed(self) if sync else shared.group.unsummed()
            blocks.update(zip(map(id, shared.group.parameters), tensors))
        return tuple(blocks[id(stored)] for stored in self.stored)


def checkpoint_block(block: Any, x: Tensor, *arguments: Any) -> Tensor:
    """Return ``block(x, *arguments)``, and keep only ``x`` and the parameters. The backward pass runs the block again.

    Both runs compute with the same blocks of the parameters, which are arguments of the checkpoint: a pipeline may have loaded
    another weight version in between, and a backward pass may ask for the gradient of ``x`` alone.
    """
    layers = [module for module in block.modules() if isinstance(module, StageParameters)]
    weights = [layer.local(*arguments) for layer in layers]

    def run(x: Tensor, *tensors: Tensor) -> Tensor:
        remaining = iter(tensors)
        try:
            for layer in layers:
                layer.given = tuple(itertools.islice(remaining, len(layer.stored)))
            return block(x, *arguments)
        finally:
            for layer in layers:
                layer.given = None

    return checkpoint(PASSES.bound(run), x, *itertools.chain.from_iterable(weights))


def sum_together(model: Any, bucket_bytes: int) -> None:
    """Have layers with fewer than ``bucket_bytes`` of gradients share sums over the ranks of at least so many bytes."""
    layers = [module for module in model.modules() if isinstance(module, LayerParameters)]
    groups = bucketed_groups([layer.stored for layer in layers], bucket_bytes, layers[0].ranks)
    shared = [(SharedGroup(group), set(map(id, group.parameters))) for group in groups]
    for layer in layers:
        own = set(map(id, layer.stored))
        layer.groups = tuple(group for group, members in shared if members & own)


def renew_parameters(model: Any) -> None:
    """Take note that the values of a model's parameters were changed."""
    for module in model.modules():
        if isinstance(module, LayerParameters):
            module.renew()


def all_parameters(model: Any) -> list[StoredParameter]:
    """Return the parameters of all layers of a model, each once."""
    layers = [module for module in model.modules() if isinstance(module, StageParameters)]
    return [stored for layer in layers for stored in layer.stored]
