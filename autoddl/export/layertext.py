"""Writes a layer as Python statements: parameters in ``__init__``, computation and communication in ``forward``.

The statements are those of the layer's program (:mod:`autoddl.pipelines.runtime.statements`), which the runtime executes too. Each
is written with its predicted price as a comment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.graph import Layer, Parameter
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import is_in_recomputed_block, is_recomputed_alone
from autoddl.costmodel.pricing import edge_steps, row_features
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.units import format_seconds
from autoddl.pipelines.runtime.comm.layouts import Layout, layout_of
from autoddl.pipelines.runtime.comm.moves import move_calls
from autoddl.pipelines.runtime.comm.parameter_layouts import ParameterLayout
from autoddl.pipelines.runtime.kinds.registry import layer_program, layouts_call, parameter_layouts
from autoddl.pipelines.runtime.model_constants import LAYER_NORM_EPS, RMS_NORM_EPS, ROTARY_BASE
from autoddl.pipelines.runtime.replay.statements import feed_calls
from autoddl.pipelines.runtime.stage.plan import check_input_shape, local_shape, moved_tensor, stored_rows
from autoddl.pipelines.runtime.statements import ALL_STEPS, Call, Fact, Name, Repeated, Size

from .scene import Scene, layout_text, layouts_text
from .source import value_text
from .writing import StatementChain, folded

__all__ = ["LayerText", "TextPlace", "layer_text"]

#: Functions of statements that are written as operators.
_OPERATORS = {"add": "+", "multiply": "*"}
#: Variable of a call's arguments that stands for the layouts before and after an exchange.
_LAYOUTS = "the layouts"


@dataclass(frozen=True)
class LayerText:
    """The statements of a layer.

    Attributes:
        init: lines of ``__init__``; empty if the layer has no parameters and no constants.
        forward: lines of ``forward``, in order.
    """

    init: tuple[str, ...]
    forward: tuple[str, ...]


@dataclass(frozen=True)
class TextPlace:
    """The place of a layer in a class of the file.

    Attributes:
        label: name of the layer in the class.
        path: function that turns a name in the plain model into an expression of the file.
        inputs: variables with the outputs of the layer's producers.
        result: variable for the output of the layer.
        data: expression of the model's input, for a layer that reads it.
    """

    label: str
    path: Callable[[str], str]
    inputs: tuple[str, ...]
    result: str
    data: str


def layer_text(scene: Scene, layer: Layer, place: TextPlace) -> LayerText:
    """Return the statements of a layer.

    Raises:
        UserError: the layer cannot be exported.
    """
    writer = _LayerWriter(scene, layer, place)
    forward = tuple(writer.forward_lines())  # first: the statements say which constants ``__init__`` makes
    init = [part for line in writer.init_statements() for part in folded(line)]
    return LayerText(tuple(init), forward)


class _LayerWriter:
    """Writes one layer with its strategy.

    Attributes:
        attribute: expression of the module that holds the layer's parameters.
        own_names: names of the parameters that the layer does not share with an earlier one.
        stored: layouts of all its parameters.
        recomputed_function: name of the function that is run again in the backward pass, if the layer is recomputed.
        names: variables of the file for variables of the layer's program.
        constants: attributes of the class with properties of the plain model, and the expression that each is made with.
        steps: the layer's priced communication steps that are not written yet.
    """

    def __init__(self, scene: Scene, layer: Layer, place: TextPlace):
        self.scene, self.layer, self.place = scene, layer, place
        self.strategy = scene.strategies[layer.name]
        if any(parameter.frozen for parameter in layer.parameters):
            self.strategy = replace(self.strategy, zero=0, hybrid=False)  # frozen weights are not divided
        self.layout: Layout = layout_of(layer, self.strategy)
        self.assessed = scene.assessed[layer.name]
        self.work = self.assessed.work
        self.attribute = f"self.{scene.names.of(place.label)}"
        self.recomputed_function = scene.names.of(f"compute {place.label}")
        self.own_names = {p.name for p in layer.parameters if p.tied_to is None}
        self.stored = parameter_layouts(scene.graph, layer, self.strategy)
        recompute = scene.workload.recompute
        is_recomputed = is_recomputed_alone(kind_of(layer.kind), scene.graph.place(layer.name, recompute), recompute)
        is_in_block = is_in_recomputed_block(scene.graph.place(layer.name, recompute), recompute)
        options = is_recomputed, scene.workload.attention, is_in_block, scene.is_mirrored
        self.program = layer_program(scene.graph, layer, self.strategy, *options)
        self.names = self._weight_names()
        self.constants: dict[str, str] = {}
        self.steps: Iterator[Step] = iter(self.work.forward)

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def init_statements(self) -> list[str]:
        """Return the statements of ``__init__``; `forward_lines` has to be called before."""
        lines = [f"{self.attribute} = {self._parameter_module()}"] if self.own_names else []
        if self.scene.built_in is None:
            path = self.place.path
            lines += [f"{check.function}(plain, {path(check.path)})" for check in self.program.checks]
        return [*lines, *(f"{attribute} = {value}" for attribute, value in self.constants.items())]

    def _parameter_module(self) -> str:
        """Return the expression that makes the module with the layer's parameters."""
        layer, scene = self.layer, self.scene
        own_layouts = [stored for stored in self.stored if self._is_own(stored)]
        if sum(len(stored.sources) for stored in own_layouts) < len(self.own_names):
            raise UserError(
                f"{layer.describe()}: it shares one of its weights with another layer, which form='oneflow' cannot write"
            )
        annotation = scene.annotation([stored.stored_axes for stored in own_layouts])
        return f"{scene.form.parameters}({self._parameter_layouts()}, RANKS, {annotation})"

    def _is_own(self, stored: ParameterLayout) -> bool:
        """Return whether a stored tensor holds only parameters that the layer does not share with an earlier one."""
        return {name for name, _ in stored.sources} <= self.own_names

    def _parameter_layouts(self) -> str:
        """Return the expression of the layouts of the layer's own parameters."""
        own = [p for p in self.layer.parameters if p.name in self.own_names]
        return layouts_text(layouts_call(self.scene.graph, self.layer, self.strategy, own), self._path_of)

    def _path_of(self, parameter: str) -> str:
        """Return the expression of a parameter's name in the plain model."""
        return self.place.path(self.scene.copies.get(parameter, parameter))

    def _weight_names(self) -> dict[str, str]:
        """Return variables of the file for the shared weights of the program: one variable for all layers that share a weight."""
        names = {}
        tied = {p.name: (p, p.tied_to) for p in self.layer.parameters if p.tied_to is not None}
        for name, stored in zip(self.program.weights, self.stored):
            sources = [source for source, _ in stored.sources]
            if len(sources) == 1 and self._shares_with_program(sources[0], tied):
                names[name] = self.scene.names.of(f"shared {sources[0]}")
                continue
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

    def _shares_with_program(self, source: str, tied: Mapping[str, tuple[Parameter, str | None]]) -> bool:
        """Return whether layers share a parameter, under one name, with this one, and one of them or this one has a program."""
        graph = self.scene.graph
        owner = tied[source][1] if source in tied else self.layer.name
        if owner is None or owner not in graph:
            return False
        sharing = [o for o in graph.layers for p in o.parameters if p.tied_to == owner and p.name == source]
        return bool(sharing) and any(layer.program is not None for layer in (graph[owner], *sharing))

    # ---- Statements --------------------------------------------------------------------------------------------------

    def forward_lines(self) -> list[str]:
        """Return the lines of ``forward``."""
        # Redistribute the inputs to the layout of this layer.
        lines: list[str] = []
        inputs = []
        for producer, variable in zip(self.scene.graph.inputs(self.layer.name), self.place.inputs):
            needs_variable = len(self.place.inputs) > 1 and variable != "x"
            target = self.scene.names.of(f"{variable} redistributed") if needs_variable else "x"
            chain = self._redistribution(producer, variable, target)
            lines += chain.lines_ending_in(chain.current)
            inputs.append(chain.current)
        self.names.update({f"input_{i}": variable for i, variable in enumerate(inputs) if i})
        chain = StatementChain(inputs[0] if inputs else "")
        # Compute the data that the layer reads.
        if self.layer.program is not None and not kind_of(self.layer.kind).is_opaque:
            for call in feed_calls(self.layer.program):
                # The library has a function called data.
                self._add_call(
                    chain, replace(call, result=("layer_data",)) if "data" in call.result else call, self.names
                )
            self.names["data"] = "layer_data"
        # Get the parameters.
        self._add_weights(chain)
        # Run the program of the layer.
        for statement in self.program.statements:
            if isinstance(statement, Call):
                self._add_call(chain, statement, self.names)
            else:
                self._add_recomputation(chain, statement)
        return lines + chain.lines_ending_in(self.place.result)

    def _redistribution(self, producer: str, variable: str, target: str) -> StatementChain:
        """Return the statements that bring an input to this layer's layout and shape.

        Args:
            producer: name of the layer that computes the input.
            variable: variable of the input.
            target: variable for the redistributed input.
        """
        scene, chain = self.scene, StatementChain(variable, target)
        producing_layer = scene.graph[producer]
        source, samples = scene.strategies[producer], scene.workload.micro_batch
        if source.rows_and_features != self.strategy.rows_and_features:
            ends = source.rows_and_features, self.strategy.rows_and_features
            shape, has_rows, has_tiles, dims = moved_tensor(producing_layer, ends, samples)
            route = redistribute(source.activations, self.strategy.activations, shape)
            rows = stored_rows(producing_layer.output_shape)
            is_image = len(producing_layer.output_shape) == 3
            own_samples, own_rows = local_shape(rows, source, samples)
            features = producing_layer.output_elements // rows // (source.p1 * source.p2)
            local = (own_samples, own_rows, features)
            if has_rows:
                features = row_features(producing_layer) // (source.p1 * source.p2)
                if has_tiles:
                    across = source.tiles[1]
                    local = (shape[0] * across // source.p0, features, shape[2] // across)
                    chain.assign(f"tile_rows({{x}}, {features}, {local[2]})")
                else:
                    local = (shape[0] // source.p0, 1, features)
                    chain.assign(f"pixel_rows({{x}}, {features})" if is_image else "{x}.reshape(-1, 1, {x}.shape[2])")
            steps = list(edge_steps(producing_layer, source, self.strategy, scene.workload, samples))
            cuts = "tile_cuts" if has_tiles else "cuts"
            layouts = f"{layout_text(layout_of(producing_layer, source))}.{cuts}, {layout_text(self.layout)}.{cuts}"
            layouts += f", {dims}" if has_tiles else ""
            for call in move_calls(route, local, dims):
                priced = [steps.pop(0) for _ in range(call.num_steps)]
                chain.assign(self._call_text(call, {_LAYOUTS: layouts}), scene.cost(priced) if priced else "")
            if has_rows:
                own_samples, own_rows = local_shape(rows, self.strategy, samples)
                view = f"{{x}}.reshape(-1, {own_rows}, {{x}}.shape[2])"
                if is_image:
                    view = f"{'images_of_tiles' if has_tiles else 'images_of'}({{x}}, {own_samples})"
                chain.assign(view)
        if len(self.place.inputs) == 1:
            check_input_shape(scene.graph, self.layer, self.strategy)
            own, read = (
                local_shape(stored_rows(shape), self.strategy, samples)
                for shape in (producing_layer.output_shape, self.layer.input_shape)
            )
            if own != read:
                chain.assign(f"{{x}}.reshape({{x}}.shape[0], {read[1]}, -1)")
        return chain

    def _add_weights(self, chain: StatementChain) -> None:
        """Append the statement that assigns the layer's own parameters to variables."""
        variables = [
            self.names.get(name, name)
            for name, stored in zip(self.program.weights, self.stored)
            if self._is_own(stored)
        ]
        if not variables:
            return
        targets = ", ".join(variables) if len(variables) > 1 else f"({variables[0]},)"
        steps = self.work.gradient
        remark = f"gradient sums: {self.scene.cost(steps)}, once per step" if steps else ""
        chain.add(f"{targets} = {self.attribute}.{self.scene.form.weights}", remark)

    def _add_recomputation(self, chain: StatementChain, statement: Repeated) -> None:
        """Append a function with the statement's body, and its call with recomputation in the backward pass."""
        body = StatementChain("x" if "x" in statement.tensors else "")
        names_inside = {name: text for name, text in self.names.items() if name not in statement.tensors}
        for call in statement.body:
            self._add_call(body, call, names_inside)
        chain.define(self.recomputed_function, ", ".join(statement.tensors), body)
        arguments = ["{x}" if name == "x" else self.names.get(name, name) for name in statement.tensors]
        draws = self.layer.dropouts or any(Name("step") in call.options.values() for call in statement.body)
        function = f"PASSES.bound({self.recomputed_function})" if draws else self.recomputed_function
        chain.assign(f"checkpoint({', '.join([function, *arguments])})")

    def _call_text(self, call: Call, names: dict[str, str]) -> str:
        """Return the expression of a call.

        Args:
            names: expressions of the file for variables of the program.
        """
        arguments = [self._text(value, names) for value in call.arguments]
        if call.function in _OPERATORS:
            return f" {_OPERATORS[call.function]} ".join(arguments)
        if call.function == "reshape":
            return f"{arguments[0]}.reshape{arguments[1]}"
        options = {name: self._text(value, names) for name, value in call.options.items() if value != []}
        if "stream" in options:
            options["stream"] = self._stream(call.options["stream"])
        arguments += [f"{name}={value}" for name, value in options.items() if value != "None"]
        return f"{call.function.replace('ranks.', 'RANKS.')}({', '.join(arguments)})"

    def _add_call(self, chain: StatementChain, call: Call, names: dict[str, str]) -> None:
        """Append the statement of a call, with its price."""
        text = self._call_text(call, names)
        if call.result == ("x",):
            chain.assign(text, self._price_of(call))
        else:
            chain.add(f"{', '.join(call.result)} = {text}", self._price_of(call))
            chain.current = "x" if "x" in call.result else chain.current

    def _price_of(self, call: Call) -> str:
        """Return the price of a call as text; the communication steps of the call are taken from `steps`."""
        steps = list(self.steps) if call.num_steps == ALL_STEPS else [next(self.steps) for _ in range(call.num_steps)]
        parts = [self.scene.cost(steps)] if steps else []
        if call.computes:
            forward, backward = self.assessed.forward_compute_s, self.assessed.backward_compute_s
            parts.append(f"compute: forward {format_seconds(forward)}, backward {format_seconds(backward)}")
        if call.function == "mean_error":
            parts.append("gathers 4 B of each rank")
        return "; ".join(parts)

    def _text(self, value: Any, names: dict[str, str]) -> str:
        """Return the expression of an argument of a call."""
        if isinstance(value, Name):
            known = {
                "x": "{x}",
                "data": self.place.data,
                "num_samples": f"len({self.place.data})" if self.place.data else str(self.scene.workload.micro_batch),
                "own_samples_count": str(self.scene.workload.micro_batch // self.strategy.p0),
                "step": "PASSES.step",
                **({"targets": "arguments[-1]"} if self.scene.is_traced else {}),
                "training": "self.training",
                "ranks": "RANKS",
                **names,
            }
            number = value.text.removeprefix("argument_")
            return f"arguments[{number}]" if number != value.text else known.get(value.text, value.text)
        if isinstance(value, Size):
            parts = self.strategy.p0 if value.samples.text == "own_samples_count" else 1
            return value_text(value.number.of(self.scene.workload.micro_batch // parts))
        if isinstance(value, Exchange):
            return names[_LAYOUTS]
        if isinstance(value, Fact):
            return self._built_in_fact(value) if self.scene.built_in is not None else self._user_fact(value)
        if isinstance(value, Axis):
            return self.scene.axis(value)
        if isinstance(value, Layout):
            return layout_text(value)
        if isinstance(value, (list, tuple)) and any(isinstance(part, (Name, Axis, Size, list)) for part in value):
            return f"[{', '.join(self._text(part, names) for part in value)}]"
        return value_text(value)

    def _stream(self, name: str) -> str:
        """Return the expression of the name of random numbers. In a block, ``__init__`` makes it, since only it knows the path."""
        text = self.place.path(name)
        if not text.startswith('f"{path}'):
            return text
        attribute = f"self.{self.scene.names.of(f'{self.place.label} {text[8:-1]}')}"
        self.constants[attribute] = text
        return attribute

    # ---- Properties of the plain model -------------------------------------------------------------------------------

    def _user_fact(self, fact: Fact) -> str:
        """Return the expression of a property of a user's model: an attribute that is looked up in the plain model."""
        texts = [value_text(argument) for argument in fact.arguments]
        if fact.function == "dropout_of":
            if not self.layer.dropouts:
                raise UserError(
                    f"{self.layer.describe()}: it has dropout, which form='oneflow' writes for traced models"
                )
            # The name of its random numbers contains the path of its module.
            texts = ['""', *texts[1:-1], self.place.path(fact.arguments[-1])]
        arguments = ", ".join(["plain", self.place.path(fact.path), *texts])
        return self._constant(fact, f"{fact.function}({arguments})")

    def _built_in_fact(self, fact: Fact) -> str:
        """Return the expression of a property of a built-in model: a literal if possible."""
        assert self.scene.built_in is not None
        layer, attributes = self.layer, self.layer.attributes
        if fact.function == "eps_of":
            return repr(LAYER_NORM_EPS if attributes["statistics"] == 2 else RMS_NORM_EPS)
        if fact.function == "rotary_base_of":
            return repr(ROTARY_BASE) if self.scene.built_in.family in ("llama", "moe") else "None"
        if fact.function == "convolution_options":
            return value_text({name: attributes[name] for name in ("stride", "padding")})
        assert fact.function == "running_statistics", (layer.name, fact)
        channels = attributes["features"]
        return self._constant(
            fact, f"RunningStatistics({channels}, (np.zeros({channels}, np.float32), np.ones({channels}, np.float32)))"
        )

    def _constant(self, fact: Fact, value: str) -> str:
        """Let ``__init__`` assign a value to an attribute, and return the expression of the attribute."""
        attribute = f"self.{self.scene.names.of(f'{self.place.label} {fact.name}')}"
        self.constants[attribute] = value
        return attribute
