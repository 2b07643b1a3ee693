"""Weights that several stages of a pipeline have, as text of a file."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.runtime.layouts import layout_of, product_order
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan

from .scene import layout_text
from .source import literal

__all__ = ["SharedWeights"]


class SharedWeights:
    """The weights that several of a model's stages have.

    Attributes:
        groups: of each weight its name in the plain model, and then the names that other stages' layers have for it.
    """

    def __init__(self, graph: LayerGraph, stages: Sequence[StagePlan]):
        self._graph, self._stages = graph, stages
        stage_of = {name: number for number, stage in enumerate(stages) for name in stage.strategies}
        found: dict[str, list[str]] = {}
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to is not None and stage_of[layer.name] != stage_of[parameter.tied_to]:
                    (owner,) = (p for p in graph[parameter.tied_to].parameters if p.shape == parameter.shape)
                    found.setdefault(owner.name, []).append(parameter.name)
        self.groups = [(owner, *others) for owner, others in found.items()]

    @property
    def owners(self) -> dict[str, str]:
        """For every name of such a weight the one in the plain model."""
        return {name: owner for owner, *others in self.groups for name in (owner, *others)}

    @property
    def tied(self) -> set[tuple[int, ...]]:
        """The stages that share weights, group by group."""
        return {
            tuple(number for number in range(len(self._stages)) if self._having(number, names)) for names in self.groups
        }

    def text(self) -> str:
        """A function that says how stages hold them; empty where there are none.

        Raises:
            UserError: they are shared in a way that cannot be written.
        """
        lines = []
        for owner, *others in self.groups:
            lines.append(f"        SharedWeight({literal(owner)}, {{")
            for number, stage in enumerate(self._stages):
                layers = self._having(number, (owner, *others))
                if len(layers) > 1:
                    raise UserError(
                        f"{layers[1].describe()}: it shares {owner} with {layers[0].name!r} of its stage and with other "
                        "stages, which form='oneflow' cannot write"
                    )
                lines += [
                    f"            {number}: {self._held(owner, one, stage.strategies[one.name])}," for one in layers
                ]
            lines.append("        }),")
        if not lines:
            return ""
        what = "Weights that several stages have, each in its own layout; their gradients are summed over all of these."
        head = ["def shared_weights() -> list[SharedWeight]:", f'    """{what}"""', "    return ["]
        return "\n".join([*head, *lines, "    ]"])

    def _held(self, name: str, layer: Layer, strategy: Strategy) -> str:
        attributes, layout = layer.attributes, layout_text(layout_of(layer, strategy))
        if layer.kind == "embedding":
            return f"table_layouts({literal(name)}, {attributes['vocabulary']}, {attributes['features']}, {layout})[0]"
        if layer.kind != "linear" or strategy.summa or product_order(self._graph, layer).num_groups > 1:
            raise UserError(
                f"{layer.describe()}: it shares a weight with another stage in a way that form='oneflow' cannot write"
            )
        weights = f"{{{literal(name)}: {attributes['out_features']}}}"
        return f"linear_layouts({weights}, {{}}, {attributes['in_features']}, {layout})[0]"

    def _having(self, number: int, names: Sequence[str]) -> list[Layer]:
        """The layers of a stage that have one of these weights."""
        layers = self._stages[number].layers(self._graph)
        return [layer for layer in layers if any(p.name in names for p in layer.parameters)]
