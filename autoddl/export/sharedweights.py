"""Writes the weights that several stages of a pipeline share."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter, tied_parameter
from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.runtime.kinds.registry import layouts_call
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan

from .scene import layouts_text
from .source import literal

__all__ = ["SharedWeights"]


class SharedWeights:
    """The weights that several stages of a pipeline hold.

    Args:
        graph: layer graph of the whole model.
        stages: the plan of each stage.

    Attributes:
        groups: for each shared weight, the name under which the plain model stores it, followed by the names that layers of other
            stages have for it.
    """

    def __init__(self, graph: LayerGraph, stages: Sequence[StagePlan]):
        self._graph, self._stages = graph, stages
        stage_of = {name: number for number, stage in enumerate(stages) for name in stage.strategies}
        other_names: dict[str, list[str]] = {}
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to is not None and stage_of[layer.name] != stage_of[parameter.tied_to]:
                    owner = tied_parameter(graph, parameter)
                    other_names.setdefault(owner.name, []).append(parameter.name)
        self.groups = [(owner, *others) for owner, others in other_names.items()]

    @property
    def stored_names(self) -> dict[str, str]:
        """For every name of a shared weight, the name under which the plain model stores it."""
        return {name: owner for owner, *others in self.groups for name in (owner, *others)}

    @property
    def sharing_stages(self) -> set[tuple[int, ...]]:
        """The groups of stages that share a weight, as ascending numbers."""
        stages = range(len(self._stages))
        return {tuple(number for number in stages if self._layers_with(number, names)) for names in self.groups}

    def text(self) -> str:
        """Return the function ``shared_weights`` of the file; empty if stages share no weights.

        Raises:
            UserError: weights are shared in a way that cannot be written.
        """
        lines = []
        for owner, *others in self.groups:
            lines.append(f"        SharedWeight({literal(owner)}, {{")
            for number, stage in enumerate(self._stages):
                layers = self._layers_with(number, (owner, *others))
                if len(layers) > 1:
                    raise UserError(
                        f"{layers[1].describe()}: it shares {owner} with {layers[0].name!r} of its stage and with other "
                        "stages, which form='oneflow' cannot write"
                    )
                for layer in layers:
                    shared = next(p for p in layer.parameters if p.name in (owner, *others))
                    layout = self._layout_text(owner, layer, shared, stage.strategies[layer.name])
                    lines.append(f"            {number}: {layout},")
            lines.append("        }),")
        if not lines:
            return ""
        docstring = "Return the weights that several stages hold, with their layouts. Their gradients are summed over these stages."
        head = ["def shared_weights() -> list[SharedWeight]:", f'    """{docstring}"""', "    return ["]
        return "\n".join([*head, *lines, "    ]"])

    def _layout_text(self, name: str, layer: Layer, parameter: Parameter, strategy: Strategy) -> str:
        """Return the expression of the layout of a weight in one of the layers that use it, where it is ``parameter``."""
        error = UserError(
            f"{layer.describe()}: it shares a weight with another stage in a way that form='oneflow' cannot write"
        )
        weights = [other for other in layer.parameters if len(other.shape) > 1]
        if kind_of(layer.kind).splitting is Splitting.PRODUCT and (len(weights) != 1 or len(parameter.shape) == 1):
            raise error  # it is stored together with others
        if strategy.summa:
            raise error
        call = layouts_call(self._graph, layer, strategy, [parameter])
        if call.options:  # its features are in the groups of the layer that reads them
            raise error
        return f"{layouts_text(call, lambda _: literal(name))}[0]"

    def _layers_with(self, number: int, names: Sequence[str]) -> list[Layer]:
        """Return the layers of a stage that store a weight of one of these names; further ones of the stage share it."""
        stage = self._stages[number]
        return [
            layer
            for layer in stage.layers(self._graph)
            if any(p.name in names and p.tied_to not in stage.strategies for p in layer.parameters)
        ]
