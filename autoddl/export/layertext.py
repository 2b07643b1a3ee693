"""Layers as lines of Python: the statements that the runtime runs (:mod:`autoddl.pipelines.runtime.statements`), with the price of
each, and the parameters that they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.graph import Layer, Parameter
from autoddl.costmodel.pricing import edge_shape, edge_steps
from autoddl.costmodel.redistribution import redistribute
from autoddl.pipelines.runtime.kinds.registry import layer_program
from autoddl.pipelines.runtime.layouts import Layout, layout_of, parameter_layouts, product_order
from autoddl.pipelines.runtime.moves import move_calls
from autoddl.pipelines.runtime.statements import ALL_STEPS, Call, Fact, Name, Repeated

from .scene import Scene, layout_text, stored_rows
from .source import value_text
from .writing import StatementChain, folded

__all__ = ["LayerText", "TextPlace", "layer_text"]

_OPERATORS = {"add": "+", "multiply": "*"}
#: What built-in models' norms add to the variance, with the mean taken off and without.
_EPS = {True: 1e-5, False: 1e-6}
_ROTARY_BASE = 10000.0


@dataclass(frozen=True)
class LayerText:
    """One layer of a file.

    Attributes:
        made: statements of ``__init__``; empty where the layer keeps nothing.
        run: statements of ``forward``, in order.
    """

    made: tuple[str, ...]
    run: tuple[str, ...]


@dataclass(frozen=True)
class TextPlace:
    """Where a layer's text stands.

    Attributes:
        label: what the layer is called there.
        path: turns a name in the plain model into an expression of the file.
        inputs: the variables that the layer's producers left.
        result: the variable for its own result.
        data: the expression of the data, where the layer reads it itself.
    """

    label: str
    path: Callable[[str], str]
    inputs: tuple[str, ...]
    result: str
    data: str


def layer_text(scene: Scene, layer: Layer, place: TextPlace) -> LayerText:
    """The text of one layer.

    Raises:
        UserError: it cannot be exported; it is named.
    """
    writer = _Writer(scene, layer, place)
    run = tuple(writer.run())
    made = [part for line in writer.made() for part in folded(line)]
    return LayerText(tuple(made), run)


class _Writer:
    """One layer at its strategy."""

    def __init__(self, scene: Scene, layer: Layer, place: TextPlace):
        self.scene, self.layer, self.place = scene, layer, place
        self.strategy = scene.strategies[layer.name]
        self.layout: Layout = layout_of(layer, self.strategy)
        self.found = scene.assessed[layer.name]
        self.attribute = f"self.{scene.names.of(place.label)}"
        self.local_name = scene.names.of(f"{place.label} again")
        self.own = {p.name for p in layer.parameters if p.tied_to is None}
        self.stored = parameter_layouts(scene.graph, layer, self.strategy)
        self.program = layer_program(
            scene.graph, layer, self.strategy, scene.workload.recompute and layer.kind != "loss"
        )
        self.names = self._weight_names()
        self.facts: dict[str, str] = {}
        self.steps: Iterator[Step] = iter(self.found.work.forward)

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def made(self) -> list[str]:
        """Statements of ``__init__``."""
        lines = [f"{self.attribute} = {self._holder()}"] if self.own else []
        if self.scene.built_in is None:
            path = self.place.path
            lines += [f"{check.function}(plain, {path(check.path)})" for check in self.program.checks]
        return [*lines, *(f"{attribute} = {made}" for attribute, made in self.facts.items())]

    def _holder(self) -> str:
        layer, scene = self.layer, self.scene
        own = [stored for stored in self.stored if {name for name, _ in stored.sources} <= self.own]
        if sum(len(stored.sources) for stored in own) < len(self.own):
            raise UserError(
                f"{layer.describe()}: it shares one of its weights with another layer, which form='oneflow' cannot write"
            )
        shown = f"{self._layouts()}, RANKS"
        holder = "StageParameters" if scene.is_stage else "LayerParameters"
        return f"{holder}({shown}, {scene.annotation([stored.axes for stored in own])})"

    def _layouts(self) -> str:
        """The expression of how the layer's own parameters lie."""
        layer, attributes, layout = self.layer, self.layer.attributes, layout_text(self.layout)
        own = [p for p in layer.parameters if p.name in self.own]
        if layer.kind == "linear":
            order = product_order(self.scene.graph, layer)
            weights, biases = (self._rows([p for p in own if len(p.shape) == n]) for n in (2, 1))
            options = [weights, biases, str(attributes["in_features"]), layout]
            if order.num_groups > 1:
                options += [f"sections={value_text(order.section_widths)}", f"num_groups={order.num_groups}"]
            return f"linear_layouts({', '.join(options)})"
        if layer.kind == "embedding":
            sizes = f"{attributes['vocabulary']}, {attributes['features']}"
            return f"table_layouts({self._path_of(own[0])}, {sizes}, {layout})"
        shapes = ", ".join(f"{self._path_of(p)}: {value_text(p.shape)}" for p in own)
        function = "whole_layouts" if layer.kind in ("conv2d", "opaque") else "feature_layouts"
        return f"{function}({{{shapes}}}, {layout})"

    def _rows(self, parameters: Sequence[Parameter]) -> str:
        return "{" + ", ".join(f"{self._path_of(p)}: {p.shape[0]}" for p in parameters) + "}"

    def _path_of(self, parameter: Parameter) -> str:
        return self.place.path(self.scene.copies.get(parameter.name, parameter.name))

    def _weight_names(self) -> dict[str, str]:
        """For the program's weights the variables of the file: of those that layers share the same in all of them."""
        names = {}
        tied = {p.name: (p, p.tied_to) for p in self.layer.parameters if p.tied_to is not None}
        for name, stored in zip(self.program.weights, self.stored):
            sources = [source for source, _ in stored.sources]
            owners = {tied[source][1] for source in sources if source in tied}
            if owners and (len(sources) > 1 or len(self.program.weights) > 2):
                raise UserError(
                    f"{self.layer.describe()}: it shares parameters of {', '.join(sorted(map(str, owners)))} in a way that "
                    "form='oneflow' cannot write"
                )
            if owners:
                names[name] = self.scene.names.of(f"{owners.pop()} {name}")
            elif any(p.tied_to == self.layer.name for other in self.scene.graph.layers for p in other.parameters):
                names[name] = self.scene.names.of(f"{self.layer.name} {name}")
        return names

    # ---- Statements --------------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Statements of ``forward``: the inputs brought here, the parameters, then what the layer does."""
        lines: list[str] = []
        inputs = []
        for producer, variable in zip(self.scene.graph.inputs(self.layer.name), self.place.inputs):
            several = len(self.place.inputs) > 1 and variable != "x"
            chain = self._arriving(producer, variable, self.scene.names.of(f"{variable} here") if several else "x")
            lines += chain.ending_in(chain.current)
            inputs.append(chain.current)
        self.names.update({f"input_{i}": variable for i, variable in enumerate(inputs) if i})
        chain = StatementChain(inputs[0] if inputs else "")
        self._weights(chain)
        for statement in self.program.statements:
            if isinstance(statement, Call):
                self._call(chain, statement, self.names)
            else:
                self._repeated(chain, statement)
        return lines + chain.ending_in(self.place.result)

    def _arriving(self, producer: str, variable: str, moved: str) -> StatementChain:
        """An input as this layer wants it, in the variable ``moved`` where it has to be moved."""
        scene, chain = self.scene, StatementChain(variable, moved)
        given = scene.graph[producer]
        source, samples = scene.strategies[producer], scene.workload.micro_batch
        if source.rows_and_features != self.strategy.rows_and_features:
            shape = edge_shape(given, samples)
            route = redistribute(source.activations, self.strategy.activations, shape)
            rows = stored_rows(given.output_shape)
            local = (samples // source.p0, rows, shape[1] // (source.p1 * source.p2))
            steps = list(edge_steps(given, source, self.strategy, scene.workload, samples))
            ends = f"{layout_text(layout_of(given, source))}.cuts, {layout_text(self.layout)}.cuts"
            for call in move_calls(route, local):
                priced = [steps.pop(0) for _ in range(call.num_steps)]
                chain.put(self._call_text(call, {"the ends": ends}), scene.cost(priced) if priced else "")
        if len(self.place.inputs) == 1:
            self._check_shape(given)
            rows = stored_rows(self.layer.input_shape)
            if rows != stored_rows(given.output_shape):
                chain.put(f"{{x}}.reshape({{x}}.shape[0], {rows}, -1)")
        return chain

    def _check_shape(self, given: Layer) -> None:
        shape, layer = given.output_shape, self.layer
        if self.strategy.p1 * self.strategy.p2 == 1 or len(shape) > 2 or len(layer.input_shape) > 2:
            return
        if shape[-1:] != layer.input_shape[-1:]:
            raise UserError(
                f"{layer.describe()}: it reads {given.name!r} in another shape, {layer.input_shape} in place of {shape}; "
                "that works where features are not split only"
            )

    def _weights(self, chain: StatementChain) -> None:
        """The layer's own parameters as local variables."""
        own = [
            self.names.get(name, name)
            for name, stored in zip(self.program.weights, self.stored)
            if {source for source, _ in stored.sources} <= self.own
        ]
        if not own:
            return
        steps = self.found.work.gradient
        remark = f"gradients: {self.scene.cost(steps)}, once a step" if steps else ""
        call = "leaves()" if self.scene.is_stage else "local(sync)"
        chain.say(f"{', '.join(own) if len(own) > 1 else f'({own[0]},)'} = {self.attribute}.{call}", remark)

    def _repeated(self, chain: StatementChain, statement: Repeated) -> None:
        inner = StatementChain("x" if "x" in statement.tensors else "")
        inside = {name: text for name, text in self.names.items() if name not in statement.tensors}
        for call in statement.body:
            self._call(inner, call, inside)
        chain.inner(self.local_name, ", ".join(statement.tensors), inner)
        given = ["{x}" if name == "x" else self.names.get(name, name) for name in statement.tensors]
        chain.put(f"checkpoint({', '.join([self.local_name, *given])})")

    def _call_text(self, call: Call, names: dict[str, str]) -> str:
        """What is on a statement's right side."""
        arguments = [self._text(value, names) for value in call.arguments]
        if call.function in _OPERATORS:
            return f" {_OPERATORS[call.function]} ".join(arguments)
        if call.function == "reshape":
            return f"{arguments[0]}.reshape{arguments[1]}"
        options = {name: self._text(value, names) for name, value in call.options.items() if value != []}
        arguments += [f"{name}={value}" for name, value in options.items() if value != "None"]
        return f"{call.function.replace('ranks.', 'RANKS.')}({', '.join(arguments)})"

    def _call(self, chain: StatementChain, call: Call, names: dict[str, str]) -> None:
        """One statement, with what it is priced."""
        text = self._call_text(call, names)
        if call.result == ("x",):
            chain.put(text, self._remark(call))
        else:
            chain.say(f"{', '.join(call.result)} = {text}", self._remark(call))
            chain.current = "x" if "x" in call.result else chain.current

    def _remark(self, call: Call) -> str:
        steps = list(self.steps) if call.num_steps == ALL_STEPS else [next(self.steps) for _ in range(call.num_steps)]
        parts = [self.scene.cost(steps)] if steps else []
        work = self.found.work
        if call.computes:
            seconds = self.scene.seconds
            parts.append(f"computes {seconds(work.forward_s)}, backward {seconds(work.backward_s)}")
        if call.function == "mean_error":
            parts.append("4 B for each rank's part, all-reduced")
        return "; ".join(parts)

    def _text(self, value: Any, names: dict[str, str]) -> str:
        """An argument as an expression."""
        if isinstance(value, Name):
            known = {
                "x": "{x}",
                "data": self.place.data,
                "num_samples": f"len({self.place.data})",
                "training": "self.training",
                "ranks": "RANKS",
                **names,
            }
            return known.get(value.text, value.text)
        if isinstance(value, Exchange):
            return names["the ends"]
        if isinstance(value, Fact):
            return self._built_in(value) if self.scene.built_in is not None else self._looked_up(value)
        if isinstance(value, Axis):
            return self.scene.axis(value)
        if isinstance(value, Layout):
            return layout_text(value)
        if isinstance(value, (list, tuple)) and any(isinstance(part, (Name, Axis)) for part in value):
            return f"[{', '.join(self._text(part, names) for part in value)}]"
        return value_text(value)

    # ---- Facts of the plain model ------------------------------------------------------------------------------------

    def _looked_up(self, fact: Fact) -> str:
        """A fact of a user's model: an attribute of its own."""
        if fact.function == "dropout_of":
            what = "what is behind it" if self.layer.kind != "attention" else "it"
            raise UserError(f"{self.layer.describe()}: {what} drops at random, which form='oneflow' cannot write")
        arguments = ", ".join(["plain", self.place.path(fact.path), *map(value_text, fact.arguments)])
        return self._kept(fact, f"{fact.function}({arguments})")

    def _built_in(self, fact: Fact) -> str:
        """A fact of a built-in model: a literal where it is one."""
        assert self.scene.built_in is not None
        layer, attributes = self.layer, self.layer.attributes
        if fact.function == "eps_of":
            return repr(_EPS[attributes["statistics"] == 2])
        if fact.function == "angles_of":
            sizes = ", ".join(map(value_text, fact.arguments))
            return f"rotary_angles({sizes}, {_ROTARY_BASE})" if self.scene.built_in.family == "llama" else "None"
        if fact.function == "convolution_options":
            return value_text({name: attributes[name] for name in ("stride", "padding")})
        assert fact.function == "own_module", (layer.name, fact)
        return self._kept(fact, "OwnModule(flow.nn.MaxPool2d(kernel_size=2, stride=2))")  # VGG's, the only ones

    def _kept(self, fact: Fact, made: str) -> str:
        attribute = f"self.{self.scene.names.of(f'{self.place.label} {fact.name}')}"
        self.facts[attribute] = made
        return attribute
