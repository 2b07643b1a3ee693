"""The parameters of a layer in an exported model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oneflow import nn

from autoddl.pipelines.runtime.layouts import ParameterLayout
from autoddl.pipelines.runtime.parameters import StoredParameter, parameter_groups
from autoddl.pipelines.runtime.stepping import Ranks

Tensor = Any


class StageParameters(nn.Module):
    """The parameters of a layer, as global tensors.

    Args:
        layouts: how each of them lies.
        placement: all ranks on a mesh.
        sbp: of each parameter what every axis of the mesh does to it.
    """

    def __init__(self, layouts: Sequence[ParameterLayout], ranks: Ranks, placement: Any, sbp: Sequence[Sequence[Any]]):
        super().__init__()
        self.stored = [StoredParameter(layout, ranks, placement, one) for layout, one in zip(layouts, sbp)]
        for stored in self.stored:
            self.register_parameter(stored.layout.name.replace(".", "_"), stored.tensor)

    def leaves(self) -> tuple[Tensor, ...]:
        """This rank's blocks, of the version that is in use; gradients are summed when a schedule says so."""
        return tuple(stored.leaf for stored in self.stored)


class LayerParameters(StageParameters):
    """The parameters of a layer, whose gradients are summed when they have come back; arguments as of `StageParameters`."""

    def __init__(self, layouts: Sequence[ParameterLayout], ranks: Ranks, placement: Any, sbp: Sequence[Sequence[Any]]):
        super().__init__(layouts, ranks, placement, sbp)
        self.groups = parameter_groups(self.stored, ranks)

    def local(self, sync: bool = True) -> tuple[Tensor, ...]:
        """This rank's blocks, to compute with.

        When their gradients have come back they are summed over the ranks, as one vector for each group. Without ``sync`` they
        only collect on this rank, until a pass with it.
        """
        found: dict[int, Tensor] = {}
        for group in self.groups:
            tensors = group.summed() if sync else group.unsummed()
            found.update(zip(map(id, group.parameters), tensors))
        return tuple(found[id(stored)] for stored in self.stored)


def all_parameters(model: Any) -> list[StoredParameter]:
    """Of a model and its parts, each once."""
    return [stored for part in model.modules() if isinstance(part, StageParameters) for stored in part.stored]
