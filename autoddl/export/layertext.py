"""Layers as lines of Python: for each kind the parameters that it keeps and the statements that run it.

The statements are those of :mod:`autoddl.pipelines.runtime.layers`, the steps those of :mod:`autoddl.costmodel.layerwork`, written
out with the price of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, Parameter
from autoddl.costmodel.pricing import edge_shape, edge_steps
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_seconds
from autoddl.pipelines.runtime.layouts import are_apart, attention_sections, product_order

from .moves import move_lines
from .scene import Scene, stored_rows
from .source import value_text
from .writing import Chain, folded

__all__ = ["LayerText", "layer_text"]

#: Element-wise operations behind a layer.
_EPILOGUES: Mapping[str, str] = {
    "relu": "flow.relu({x})",
    "gelu": "functional.gelu({x})",
    "fast_gelu": "tanh_gelu({x})",
    "gelu_tanh": "tanh_gelu({x})",
    "quick_gelu": "{x} * flow.sigmoid(1.702 * {x})",
    "silu": "functional.silu({x})",
    "sigmoid": "flow.sigmoid({x})",
    "sigmoid_v2": "flow.sigmoid({x})",
    "tanh": "flow.tanh({x})",
    "elu": "functional.elu({x})",
    "selu": "functional.selu({x})",
    "mish": "functional.mish({x})",
    "softplus": "functional.softplus({x})",
    "square": "flow.square({x})",
    "abs": "flow.abs({x})",
    "exp": "flow.exp({x})",
    "identity": "{x}",
}
_LOSSES = ("mse_loss", "l1_loss")


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
class Place:
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


def layer_text(scene: Scene, layer: Layer, place: Place) -> LayerText:
    """The text of one layer.

    Raises:
        UserError: it cannot be exported; it is named.
    """
    writer = _Writer(scene, layer, place)
    made = [part for line in writer.made() for part in folded(line)]
    return LayerText(tuple(made), tuple(writer.run()))


class _Writer:
    """One layer at its strategy."""

    def __init__(self, scene: Scene, layer: Layer, place: Place):
        self.scene, self.layer, self.place = scene, layer, place
        self.strategy: Strategy = scene.strategies[layer.name]
        self.found = scene.assessed[layer.name]
        self.attribute = f"self.{scene.names.of(place.label)}"
        self.local_name = scene.names.of(f"{place.label} again")
        self.recomputes = scene.workload.recompute and layer.kind != "loss"
        self.is_first = not scene.graph.inputs(layer.name)
        self.own = [p for p in layer.parameters if p.tied_to is None]
        for operation in layer.epilogue:
            if operation not in _EPILOGUES and operation not in ("mul", *_LOSSES):
                what = "drops at random" if operation == "dropout" else f"does {operation!r}"
                raise UserError(
                    f"{layer.describe()}: what is behind it {what}, which --to oneflow cannot write; known are "
                    f"{', '.join(_EPILOGUES)} and mul"
                )
        if layer.kind == "attention" and layer.kept_elements > layer.attributes["heads"] * layer.rows**2:
            raise UserError(f"{layer.describe()}: it drops probabilities at random, which --to oneflow cannot write")

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def made(self) -> list[str]:
        """Statements of ``__init__``."""
        lines = [f"{self.attribute} = {self._holder()}"] if self.own or self.layer.kind == "conv2d" else []
        plain = self.scene.built_in is None
        if plain and self.layer.kind == "norm":
            lines.append(f"{self._beside('eps')} = eps_of(plain, {self._path()})")
        if plain and self.layer.kind == "attention":
            lines.append(f"{self._beside('base')} = angles_base_of(plain, {self._path()})")
        if plain and self.layer.kind == "conv2d":
            lines.append(f"{self._beside('options')} = convolution_options(plain, {self._path()})")
        if plain and self.layer.kind == "opaque":
            names = value_text([self._own_name(p) for p in self.layer.parameters])
            lines.append(
                f"{self._beside('module')} = OwnModule(plain, {self._path()}, {names}, "
                f"samples_are_split={self.strategy.p0 > 1})"
            )
        return lines

    def _beside(self, what: str) -> str:
        """An attribute for something else that the layer keeps."""
        return f"self.{self.scene.names.of(f'{self.place.label} {what}')}"

    def _path(self) -> str:
        """The expression of the module that the layer stands for."""
        return self.place.path(self.layer.modules[0] if self.layer.modules else self.layer.name)

    def _own_name(self, parameter: Parameter) -> str:
        own = self.layer.modules[0] if self.layer.modules else self.layer.name
        if not parameter.name.startswith(f"{own}."):
            raise UserError(
                f"{self.layer.describe()}: its parameter {parameter.name} does not belong to module {own!r}"
            )
        return parameter.name[len(own) + 1 :]

    def _holder(self) -> str:
        kind = self.layer.kind
        if kind == "linear":
            return self._linear_holder()
        layout = self.scene.layout(self.layer)
        if kind == "embedding":
            axes = (self.strategy.axes(2, embedding=True), self.strategy.axes(1, embedding=True))
            path = self._path() if self.scene.built_in else f"table_of(plain, {self._path()})"
            sizes = f"{self.layer.attributes['vocabulary']}, {self.layer.attributes['features']}"
            return f"Embedding({path}, {sizes}, {layout}, {self.scene.annotation(axes)})"
        shapes = ", ".join(f"{self.place.path(p.name)}: {value_text(p.shape)}" for p in self.own)
        if kind in ("conv2d", "opaque"):
            return f"Whole({{{shapes}}}, {self.scene.annotation(())})"
        if len({len(p.shape) for p in self.own}) > 1:
            raise UserError(f"{self.layer.describe()}: its parameters should have one number of dimensions")
        cut = (*(() for _ in self.own[0].shape[:-1]), self.strategy.axes(1))
        return f"PerFeature({{{shapes}}}, {layout}, {self.scene.annotation(cut)})"

    def _linear_holder(self) -> str:
        layer, strategy, attributes = self.layer, self.strategy, self.layer.attributes
        order = product_order(self.scene.graph, layer)
        weights = [p for p in layer.parameters if len(p.shape) == 2]
        biases = [p for p in layer.parameters if len(p.shape) == 1]
        if biases and len(biases) != len(weights):
            raise UserError(f"{layer.describe()}: some of its modules have a bias and some do not; all or none should")
        modules = {p.name.rpartition(".")[0]: p.shape[0] for p in weights}
        if any(not p.name.endswith(".weight") for p in weights) or any(not p.name.endswith(".bias") for p in biases):
            raise UserError(f"{layer.describe()}: its parameters should be called weight and bias to be exported")
        shown = ", ".join(f"{self.place.path(name)}: {width}" for name, width in modules.items())
        options = [self.scene.annotation((strategy.axes(1), strategy.axes(0 if strategy.summa else 2)))]
        if biases:
            both = strategy.axes(1) if strategy.summa else strategy.axes(1) + strategy.axes(2)
            if self.scene.common_mesh is None:
                raise UserError(
                    f"{layer.describe()}: the strategies of this plan have no mesh in common, which --to oneflow cannot write"
                )
            options.append(f"bias_sbp={self.scene.sbp((both,))}")
        if order.num_groups > 1:
            options += [f"sections={value_text(order.section_widths)}", f"groups={order.num_groups}"]
        if are_apart(order, strategy):
            options.append("apart=True")
        if strategy.summa:
            options.append("summa=True")
        if len(self.own) < len(layer.parameters):
            options.append("tied=True")
        if layer.name in self.scene.copies:
            if len(modules) > 1:
                raise UserError(
                    f"{layer.describe()}: it shares one of its weights with another stage, should share all"
                )
            options.append(f"copy_of={self.place.path(self.scene.copies[layer.name])}")
        layout = self.scene.layout(layer)
        return f"Linear({{{shown}}}, {attributes['in_features']}, {layout}, {', '.join(options)})"

    # ---- Statements ------------------------------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Statements of ``forward``: the inputs brought here, then what the layer does."""
        lines: list[str] = []
        inputs = []
        for producer, variable in zip(self.scene.graph.inputs(self.layer.name), self.place.inputs):
            several = len(self.place.inputs) > 1 and variable != "x"
            chain = self._arriving(producer, variable, self.scene.names.of(f"{variable} here") if several else "x")
            lines += chain.ending_in(chain.current)
            inputs.append(chain.current)
        write = getattr(self, f"_{self.layer.kind}")
        chain = Chain(inputs[0] if inputs else "")
        write(chain, inputs)
        return lines + chain.ending_in(self.place.result)

    def _arriving(self, producer: str, variable: str, moved: str) -> Chain:
        """An input as this layer wants it, in the variable ``moved`` where it has to be moved."""
        scene, chain = self.scene, Chain(variable, moved)
        given = scene.graph[producer]
        source, samples = scene.strategies[producer], scene.workload.micro_batch
        if source.rows_and_features != self.strategy.rows_and_features:
            shape = edge_shape(given, samples)
            route = redistribute(source.activations, self.strategy.activations, shape)
            rows = stored_rows(given.output_shape)
            local = (samples // source.p0, rows, shape[1] // (source.p1 * source.p2))
            steps = list(edge_steps(given, source, self.strategy, scene.workload, samples))
            for line in move_lines(route, local, scene.axis, (scene.layout(given), scene.layout(self.layer))):
                priced = [steps.pop(0) for _ in line.collectives]
                chain.put(line.expression, scene.cost(priced) if priced else "")
        if len(self.place.inputs) == 1:
            self._check_shape(given)
            rows = stored_rows(self.layer.input_shape)
            if rows != stored_rows(given.output_shape):
                chain.put(f"rows_of({{x}}, {rows})")
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

    def _weights(self, chain: Chain, names: Sequence[str], which: str, sum_over: Sequence[Axis]) -> None:
        """Parameters of the layer's own as local variables."""
        if not names:
            return
        steps = self.found.work.gradient if which != "biases" or not self.strategy.summa else ()
        remark = f"gradients: {self.scene.cost(steps)}, once a step" if sum_over and steps else ""
        call = {
            "all": f"{self.attribute}.blocks(",
            "weights": f"blocks_of({self.attribute}.weights, ",
            "biases": f"blocks_of({self.attribute}.biases, ",
        }[which]
        target = f"({names[0]},)" if len(names) == 1 and names[0] != "parts" else ", ".join(names)
        when = "" if self.scene.is_stage else ", sync=sync"
        chain.say(f"{target} = {call}sum_over={self.scene.axis_list(sum_over)}{when})", remark)

    def _steps(self, chain: Chain, call: str, axes: Sequence[Axis], steps: Sequence[Step], options: str = "") -> None:
        """One collective for each axis, with its price."""
        for axis, step in zip(axes, steps):
            chain.put(f"{call}({{x}}, axis={self.scene.axis(axis)}{options})", self.scene.cost([step]))

    def _compute(self) -> str:
        work = self.found.work
        return f"computes {format_seconds(work.forward_s)}, backward {format_seconds(work.backward_s)}"

    def _epilogue(self, chain: Chain) -> None:
        operations = [operation for operation in self.layer.epilogue if operation not in _LOSSES]
        if "mul" in operations:
            chain.say("x, factor = gate_and_factor({x})")
            chain.current = "x"
        for operation in operations:
            chain.put("{x} * factor" if operation == "mul" else _EPILOGUES[operation])

    # ---- Products --------------------------------------------------------------------------------------------------------

    def _linear(self, chain: Chain, inputs: Sequence[str]) -> None:
        strategy, work, layer = self.strategy, self.found.work, self.layer
        weight, bias = self._linear_weights(chain)
        if self.is_first:
            rows = layer.input_shape[0] if len(layer.input_shape) > 1 else 1
            chain.put(
                f"data({self.place.data}, {self.scene.layout(layer)}, rows={rows}, columns={self.attribute}.columns)"
            )
        p1, p2 = strategy.axes(1), strategy.axes(2)
        forward = list(work.forward)

        def product(chain: Chain) -> None:
            if strategy.summa:
                rows, columns = self.scene.axis_list(strategy.axes(0)), self.scene.axis_list(p1)
                chain.put(
                    f"summa({{x}}, {weight}, rows={rows}, columns={columns}, is_first={self.is_first})",
                    f"{self.scene.cost(forward)}; {self._compute()}",
                )
                return
            if not self.is_first:
                self._steps(chain, "all_gather", p1, forward[: len(p1)], ", dim=2")
            chain.put(f"matmul({{x}}, {weight})", self._compute())

        def rest(chain: Chain) -> None:
            if not strategy.summa:
                self._steps(chain, "reduce_scatter", p2[::-1], forward[len(forward) - len(p2) :], ", dim=2")
            if bias:
                chain.put(f"{{x}} + {bias}")
            self._epilogue(chain)

        def whole(chain: Chain) -> None:
            product(chain)
            rest(chain)

        names = [weight, *([bias] if bias else [])]
        if not self.recomputes or (strategy.summa and not layer.kept_elements):
            whole(chain)
        elif layer.kept_elements:
            self._checkpointed(chain, names, whole)
        else:
            self._checkpointed(chain, [weight], product)
            rest(chain)
        if set(_LOSSES) & set(layer.epilogue):
            layout = self.scene.layout(layer)
            squared = "mse_loss" in layer.epilogue
            chain.put(
                f"mean_difference({{x}}, data(targets, {layout}, rows={layer.rows}), squared={squared})",
                "4 B for each rank's part, all-reduced",
            )

    def _checkpointed(self, chain: Chain, names: Sequence[str], write: Callable[[Chain], object]) -> None:
        inner = Chain("x")
        write(inner)
        chain.inner(self.local_name, ", ".join(["x", *names]), inner)
        chain.put(f"checkpoint({self.local_name}, {', '.join(['{x}', *names])})")

    def _linear_weights(self, chain: Chain) -> tuple[str, str]:
        """The variables of the whole weight and bias; the latter empty where there is none."""
        strategy, p0 = self.strategy, self.strategy.axes(0)
        if len(self.own) < len(self.layer.parameters):
            return self._tied_weights(chain)
        order = product_order(self.scene.graph, self.layer)
        has_bias = any(len(p.shape) == 1 for p in self.layer.parameters)
        is_shared = self._is_shared(self.layer)
        weight = self.shared("weight") if is_shared else "weight"
        bias = "" if not has_bias else self.shared("bias") if is_shared else "bias"
        names = [weight, *([bias] if bias else [])]
        if are_apart(order, strategy):
            count, widths = len(order.widths), [width // order.num_groups for width in order.section_widths]
            self._weights(chain, ["parts"], "all", p0)
            for name, part in zip(names, (f"parts[:{count}]", f"parts[{count}:]")):
                chain.say(f"{name} = side_by_side({part}, widths={value_text(widths)})")
        elif strategy.summa:
            self._weights(chain, [weight], "weights", ())
            if bias:
                self._weights(chain, [bias], "biases", p0)
        else:
            self._weights(chain, names, "all", p0)
        return weight, bias

    def _tied_weights(self, chain: Chain) -> tuple[str, str]:
        """The same for a layer whose weight (and perhaps bias) is another one's."""
        layer = self.layer
        order = product_order(self.scene.graph, layer)
        owner = next(p.tied_to for p in layer.parameters if p.tied_to is not None)
        if (
            len(order.widths) > 1
            or order.num_groups > 1
            or self.strategy.summa
            or any(len(p.shape) > 1 for p in self.own)
        ):
            raise UserError(
                f"{layer.describe()}: it shares parameters of {owner} in a way that --to oneflow cannot write"
            )
        weight = self.scene.names.of(f"{owner} weight")
        if self.own:
            self._weights(chain, ["bias"], "biases", self.strategy.axes(0))
            return weight, "bias"
        return weight, self.scene.names.of(f"{owner} bias") if len(layer.parameters) > 1 else ""

    def shared(self, what: str) -> str:
        """The variable of a parameter that other layers use too."""
        return self.scene.names.of(f"{self.layer.name} {what}")

    def _is_shared(self, layer: Layer) -> bool:
        return any(p.tied_to == layer.name for other in self.scene.graph.layers for p in other.parameters)

    def _embedding(self, chain: Chain, inputs: Sequence[str]) -> None:
        strategy, work = self.strategy, self.found.work
        if not self.own:
            raise UserError(
                f"{self.layer.describe()}: it shares another layer's weight, which --to oneflow cannot write"
            )
        table = self.shared("weight") if self._is_shared(self.layer) else "weight"
        self._weights(chain, [table], "all", strategy.axes(0, embedding=True))
        tokens = self.place.data
        p2 = strategy.axes(2, embedding=True)
        call = f"lookup({tokens}, {table}, {self.attribute}, {self.scene.layout(self.layer)}, rows={self.layer.rows})"

        def look(chain: Chain) -> None:
            chain.put(call, self._compute())
            self._steps(chain, "reduce_scatter", p2[::-1], work.forward, ", dim=2")

        if self.recomputes:
            inner = Chain("")
            look(inner)
            chain.inner(self.local_name, table, inner)
            chain.put(f"checkpoint({self.local_name}, {table})")
        else:
            look(chain)
        self._epilogue(chain)

    # ---- On the layout between layers ------------------------------------------------------------------------------------

    def _position(self, chain: Chain, inputs: Sequence[str]) -> None:
        self._weights(chain, ["weight"], "all", self.strategy.axes(0))
        samples = f"len({self.place.data})" + (f" // {self.strategy.p0}" if self.strategy.p0 > 1 else "")
        chain.put(f"positions(weight, samples={samples}, rows={self.layer.rows})")

    def _attention(self, chain: Chain, inputs: Sequence[str]) -> None:
        layer, attributes, graph = self.layer, self.layer.attributes, self.scene.graph
        producers = graph.inputs(layer.name)
        groups, sections = attention_sections(layer)
        parts = self.strategy.p1 * self.strategy.p2
        if len(inputs) not in (1, 3):
            raise UserError(
                f"{layer.describe()}: reads {len(inputs)} tensors, should read q, k and v or all of them in one"
            )
        is_grouped = len(inputs) == 1 and graph[producers[0]].kind == "linear"
        if not is_grouped:
            if len(inputs) == 1 and parts > 1:
                raise UserError(
                    f"{layer.describe()}: it reads {producers[0]!r}, whose features cannot be split into heads"
                )
            whole = f"[{', '.join(inputs)}]" if len(inputs) == 3 else f"flow.split({{x}}, {list(sections)}, dim=2)"
            chain.put(f"heads_together({whole}, groups={groups // parts})")
        angles = ""
        if self.scene.built_in is None:
            base = self._beside("base")
            rotary = f"rotary_angles({layer.rows}, {attributes['head_dim']}, {base})"
            chain.say(f"angles = {rotary} if {base} is not None else None")
            angles = ", angles=angles"
        elif self.scene.built_in.family == "llama":
            chain.say(f"angles = rotary_angles({layer.rows}, {attributes['head_dim']}, theta=10000.0)")
            angles = ", angles=angles"
        call = (
            f"attend({{x}}, groups={groups // parts}, group_heads={attributes['heads'] // groups}, "
            f"head_dim={attributes['head_dim']}, causal={bool(attributes['causal'])}{angles})"
        )
        if self.recomputes:
            self._checkpointed(chain, [], lambda inner: inner.put(call, self._compute()))
        else:
            chain.put(call, self._compute())

    def _norm(self, chain: Chain, inputs: Sequence[str]) -> None:
        layer, axes, features = self.layer, self.strategy.axes(1), self.layer.attributes["features"]
        is_centred = layer.attributes["statistics"] == 2
        names = ["weight", "bias"][: len(layer.parameters)]
        if any(p.tied_to is not None for p in layer.parameters):
            raise UserError(f"{layer.describe()}: it shares its weight, which --to oneflow cannot write")
        self._weights(chain, names, "all", self.strategy.axes(0))
        eps = {True: "1e-05", False: "1e-06"}[is_centred] if self.scene.built_in else self._beside("eps")
        if not inputs:
            chain.put(f"data({self.place.data}, {self.scene.layout(layer)}, rows={stored_rows(layer.input_shape)})")

        def write(chain: Chain) -> None:
            if is_centred and not axes:
                chain.put(f"functional.layer_norm({{x}}, ({features},), None, None, {eps})", self._compute())
            else:
                chain.say(f"sums = sums_of_rows({{x}}, centred={is_centred})")
                for axis, step in zip(reversed(axes), self.found.work.forward):
                    chain.say(f"sums = all_reduce(sums, axis={self.scene.axis(axis)})", self.scene.cost([step]))
                call = f"normalised({{x}}, sums / {features}, centred={is_centred}, eps={eps})"
                chain.put(call, self._compute())
            if names:
                chain.put("{x} * weight" + (" + bias" if len(names) > 1 else ""))

        if self.recomputes:
            self._checkpointed(chain, names, write)
        else:
            write(chain)
        self._epilogue(chain)

    def _add(self, chain: Chain, inputs: Sequence[str]) -> None:
        if len(inputs) < 2:
            raise UserError(f"{self.layer.describe()}: it adds an input of the model, which cannot be run")
        chain.put(" + ".join(inputs))
        self._epilogue(chain)

    def _loss(self, chain: Chain, inputs: Sequence[str]) -> None:
        split, samples = (self.scene.axis_list(self.strategy.axes(which)) for which in (1, 0))
        forward = self.found.work.forward
        remark = f"maxima and sums: {self.scene.cost(forward)}; " if forward else ""
        layout = self.scene.layout(self.layer)
        chain.put(
            f"cross_entropy({{x}}, targets, {layout}, split_over={split}, samples_over={samples})",
            remark + self._compute(),
        )

    # ---- On whole samples --------------------------------------------------------------------------------------------------

    def _conv2d(self, chain: Chain, inputs: Sequence[str]) -> None:
        layer = self.layer
        names = ["weight", "bias"][: len(layer.parameters)]
        self._weights(chain, names, "all", self.strategy.axes(0))
        if not inputs:
            chain.put(f"data({self.place.data}, {self.scene.layout(layer)}, rows=1)")
        options = f"stride={layer.attributes['stride']}, padding={layer.attributes['padding']}"
        if self.scene.built_in is None:
            options = f"**{self._beside('options')}"
        bias = "bias" if len(names) > 1 else "None"

        def write(chain: Chain) -> None:
            chain.put(f"convolve({{x}}, {value_text(layer.input_shape)}, weight, {bias}, {options})", self._compute())
            self._epilogue(chain)

        if self.recomputes:
            self._checkpointed(chain, names, write)
        else:
            write(chain)

    def _opaque(self, chain: Chain, inputs: Sequence[str]) -> None:
        layer, graph = self.layer, self.scene.graph
        if self.scene.built_in is not None:
            call = f"max_pool({{x}}, {value_text(layer.input_shape)})"  # VGG's, the only ones
            if self.recomputes:
                self._checkpointed(chain, [], lambda inner: inner.put(call, self._compute()))
            else:
                chain.put(call, self._compute())
            return
        if len(layer.modules) > 1:
            raise UserError(
                f"{layer.describe()}: it stands for {', '.join(layer.modules)}, should stand for one module"
            )
        names = [f"weight_{i}" for i in range(len(layer.parameters))]
        self._weights(chain, names, "all", self.strategy.axes(0))
        if not inputs:
            chain.put(f"data({self.place.data}, {self.scene.layout(layer)}, rows=1)")
        shapes = [graph[producer].output_shape for producer in graph.inputs(layer.name)]
        shapes = [layer.input_shape] if len(shapes) <= 1 else shapes
        shapes = [shape[1:] if len(shape) == 2 and shape[0] == 1 else shape for shape in shapes]
        variables = list(inputs) if len(inputs) > 1 else ["{x}"]
        chain.say(f"{self._beside('module')}.module.train(self.training)")

        def write(chain: Chain) -> None:
            given = "[" + ", ".join(variables) + "]"
            call = ", ".join([given, value_text(shapes), *names])
            chain.put(f"{self._beside('module')}({call})", self._compute())
            self._epilogue(chain)

        if self.recomputes and len(variables) == 1:
            self._checkpointed(chain, names, write)
        elif self.recomputes:
            inner = Chain("")
            write(inner)
            chain.inner(self.local_name, ", ".join([*variables, *names]), inner)
            chain.put(f"checkpoint({self.local_name}, {', '.join([*variables, *names])})")
        else:
            write(chain)
