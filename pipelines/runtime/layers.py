"""Layers at their layouts: what each kind does on one rank.

Activations are local tensors (samples, rows, features) of the canonical layout; images are (samples, 1, all elements).  The
steps are those of :mod:`autoddl.costmodel.layerwork`, which tabulates them; which elements of a weight a rank holds is
:mod:`layouts`' matter.  A builder checks the user's module once and returns the function that runs the layer:

    body(inputs, weights, batch) -> output        weights in the order of ``parameter_layouts``
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError

from .attending import attend, rotary_angles
from .detaching import detached
from .dropouts import dropout_of_attention
from .epilogues import LOSSES, epilogue
from .layouts import ProductOrder, are_apart, attention_sections, product_order, weight_indices
from .load import load_oneflow
from .losses import IGNORED, cross_entropy, mean_of_differences
from .rows import along_rows, row_sums
from .setting import Batch, LayerSetting, checkpoint, find_module

flow = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

__all__ = ["Body", "build_body"]

Tensor = Any
Weights = Sequence[Tensor]
Body = Callable[[Sequence[Tensor], Weights, Batch], Tensor]


def build_body(setting: LayerSetting) -> Body:
    """The function that runs a layer.

    Raises:
        UserError: the layer, or the module that it stands for, cannot be run at its strategy; the layer is named.
    """
    return _BUILDERS[setting.layer.kind](setting)


# ---- Products --------------------------------------------------------------------------------------------------------------


def _linear(setting: LayerSetting) -> Body:
    layer, strategy, stepper = setting.layer, setting.strategy, setting.stepper
    p1, p2 = strategy.axes(1), strategy.axes(2)
    order = product_order(setting.graph, layer)
    apart = are_apart(order, strategy)
    num_weights = len(order.widths) if apart else 1
    behind = epilogue(setting)
    # The first layer reads what it needs; Summa gathers its operands panel by panel there too.
    own_input = weight_indices(layer, strategy).columns[stepper.rank] if not strategy.summa else None
    is_gathered = not setting.is_first or strategy.summa

    def product(x: Tensor, *weights: Tensor) -> Tensor:
        if strategy.summa:
            return _summa_product(x, _side_by_side(weights, order), setting)
        x = stepper.gather(x, p1, 2) if is_gathered else x
        return flow.matmul(x, _side_by_side(weights, order), transpose_b=True)

    def rest(y: Tensor, biases: Weights, step: int | None) -> Tensor:
        y = y if strategy.summa else stepper.scatter(y, p2, 2)
        if biases:
            y = y + _side_by_side(biases, order)
        return behind(y, step)

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        x = inputs[0] if inputs else _data(setting, batch, layer.attributes["in_features"], own_input)
        matrices, biases = weights[:num_weights], weights[num_weights:]
        if not setting.recompute:
            y = rest(product(x, *matrices), biases, batch.step)
        elif layer.kept_elements:
            # Something behind the product keeps its argument: all is repeated.
            y = checkpoint(
                lambda x, *w: rest(product(x, *w[:num_weights]), w[num_weights:], batch.step), x, *matrices, *biases
            )
        elif strategy.summa:
            y = rest(product(x, *matrices), biases, batch.step)  # keeps no more than its operands' shards anyway
        else:
            y = rest(checkpoint(product, x, *matrices), biases, batch.step)
        return _elementwise_loss(y, setting, batch) if LOSSES & set(layer.epilogue) else y

    return body


def _side_by_side(parts: Weights, order: ProductOrder) -> Tensor:
    """The weights (or biases) of several modules as one, in product order."""
    if len(parts) == 1:
        return parts[0]
    others = parts[0].shape[1:]
    widths = [width // order.num_groups for width in order.section_widths]
    grouped = [part.reshape(part.shape[0] // width, width, *others) for part, width in zip(parts, widths)]
    return flow.cat(grouped, dim=1).reshape(-1, *others)


def _summa_product(x: Tensor, weight: Tensor, setting: LayerSetting) -> Tensor:
    """O = I W' with both operands gathered, and nothing but their shards kept."""
    stepper, first = setting.stepper, setting.is_first
    rows, columns = setting.strategy.axes(0), setting.strategy.axes(1)

    def forward(ctx: Any, *_: Tensor) -> Tensor:
        whole = stepper.gather(detached(x), columns, 2)
        return flow.matmul(whole, stepper.gather(detached(weight), rows, 1), transpose_b=True)

    def backward(ctx: Any, dy: Tensor) -> Any:
        result = []
        if not first:
            whole_weight = stepper.gather(detached(weight), rows, 1)
            result.append(stepper.scatter(flow.matmul(dy, whole_weight), columns, 2))
        whole = stepper.gather(detached(x), columns, 2)
        features = dy.shape[-1]
        outer = flow.matmul(dy.reshape(-1, features), whole.reshape(-1, whole.shape[-1]), transpose_a=True)
        result.append(stepper.scatter(outer, rows, 1))
        return tuple(result) if len(result) > 1 else result[0]

    return _Function.apply("summa", forward, backward, *([] if first else [x]), weight)


def _elementwise_loss(y: Tensor, setting: LayerSetting, batch: Batch) -> Tensor:
    layer, strategy = setting.layer, setting.strategy
    if batch.targets is None:
        raise UserError(f"{layer.describe()}: its loss has no targets; the last argument should be the targets")
    elements = layer.output_elements
    data = setting.samples(batch.targets, batch).reshape(-1, layer.rows, layer.features)
    local = flow.tensor(np.ascontiguousarray(data[..., setting.held(layer.features)]))
    everyone = Axis(strategy.num_devices, 1)
    is_squared = "mse_loss" in layer.epilogue
    return mean_of_differences(y, local, batch.num_samples * elements, [everyone], setting.stepper, is_squared)


def _embedding(setting: LayerSetting) -> Body:
    layer, strategy, stepper = setting.layer, setting.strategy, setting.stepper
    module = setting.own_module()
    for name, plain in (("padding_idx", None), ("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, name, plain) not in (plain, False):
            raise UserError(f"{layer.describe()}: {name} = {getattr(module, name)} cannot be run, should be {plain}")
    p2, behind = strategy.axes(2, embedding=True), epilogue(setting)
    vocabulary = layer.attributes["vocabulary"]
    held = weight_indices(layer, strategy).rows[stepper.rank]
    #: The row of each token in this rank's part of the table; -1 where another rank has it.
    places = np.full(vocabulary, -1, dtype=np.int64)
    places[held] = np.arange(len(held))

    def lookup(table: Tensor, tokens: np.ndarray) -> Tensor:
        local = places[tokens]
        x = flow.nn.functional.embedding(flow.tensor(np.maximum(local, 0)), table)
        if len(held) < vocabulary:
            x = x * flow.tensor((local >= 0).astype(np.float32)).unsqueeze(-1)
        return stepper.scatter(x, p2, 2)

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        tokens = setting.samples(batch.inputs[layer.name], batch).reshape(-1, layer.rows)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocabulary:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise UserError(f"{layer.describe()}: token {wrong} should be from 0 to {vocabulary - 1}")
        x = (
            checkpoint(lambda table: lookup(table, tokens), *weights)
            if setting.recompute
            else lookup(weights[0], tokens)
        )
        return behind(x, batch.step)

    return body


# ---- On the canonical layout -------------------------------------------------------------------------------------------


def _position(setting: LayerSetting) -> Body:
    rows = setting.layer.rows

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        table = weights[0].reshape(-1, weights[0].shape[-1])[:rows].unsqueeze(0)
        return table.expand(batch.num_samples // setting.strategy.p0, rows, table.shape[2])

    return body


def _attention(setting: LayerSetting) -> Body:
    layer = setting.layer
    attributes = layer.attributes
    producers = setting.graph.inputs(layer.name)
    groups, sections = attention_sections(layer)
    num_groups = groups // setting.num_parts
    group_heads, head_dim = attributes["heads"] // groups, attributes["head_dim"]
    angles = _rotary(setting)
    is_grouped = len(producers) == 1 and setting.graph[producers[0]].kind == "linear"
    if len(producers) not in (1, 3):  # 0: it reads the data
        raise UserError(
            f"{layer.describe()}: reads {len(producers)} tensors, should read q, k and v or all of them in one"
        )
    if not is_grouped and len(producers) == 1 and setting.num_parts > 1:
        raise UserError(
            f"{layer.describe()}: it reads {producers[0]!r}, whose features cannot be split into heads; "
            "only a linear layer's can"
        )

    dropout = dropout_of_attention(setting)

    def core(x: Tensor, step: int | None) -> Tensor:
        drop = None if dropout is None else lambda probabilities: dropout(probabilities, step)
        return attend(x, num_groups, group_heads, head_dim, bool(attributes["causal"]), angles, drop)

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        x = inputs[0]
        if not is_grouped:
            parts = inputs if len(inputs) == 3 else flow.split(x, list(sections), dim=2)
            x = flow.cat([part.reshape(*part.shape[:2], num_groups, -1) for part in parts], dim=3)
            x = x.reshape(*x.shape[:2], -1)
        return checkpoint(lambda x: core(x, batch.step), x) if setting.recompute else core(x, batch.step)

    return body


def _rotary(setting: LayerSetting) -> tuple[Tensor, Tensor] | None:
    """Angles of rotary positions, where the attention's module or one around it has their base: ``theta``, ``rope_theta``."""
    layer = setting.layer
    path = (layer.modules[0] if layer.modules else layer.name).split(".")
    for end in range(len(path), -1, -1):
        module = find_module(setting.module, ".".join(path[:end]))
        for name in ("rope_theta", "rotary_theta", "theta"):
            theta = getattr(module, name, None)
            if isinstance(theta, (int, float)):
                return rotary_angles(layer.rows, layer.attributes["head_dim"], float(theta))
    return None


def _norm(setting: LayerSetting) -> Body:
    layer, stepper = setting.layer, setting.stepper
    axes, features = setting.strategy.axes(1), layer.attributes["features"]
    is_centred, behind = layer.attributes["statistics"] == 2, epilogue(setting)
    module = setting.own_module()
    epsilon = next(
        (getattr(module, name) for name in ("eps", "variance_epsilon", "epsilon") if hasattr(module, name)), None
    )
    if not isinstance(epsilon, (int, float)):
        raise UserError(f"{layer.describe()}: {type(module).__name__} has no eps, which its norm should have")

    def normalised(x: Tensor) -> Tensor:
        width = x.shape[-1]
        if is_centred and not axes:
            if x.is_cuda:
                return flow.nn.functional.layer_norm(x, (features,), None, None, epsilon)
            x = x - along_rows(row_sums(x) / features, width)
            variance = row_sums(x * x) / features
        elif is_centred:
            # Both sums in one message.
            means = stepper.sum(flow.cat([row_sums(x), row_sums(x * x)], dim=-1), axes) / features
            mean, square = means[..., :1], means[..., 1:]
            x, variance = x - along_rows(mean, width), square - mean * mean
        else:
            variance = stepper.sum(row_sums(x * x), axes) / features
        return x * along_rows(flow.rsqrt(variance + epsilon), width)

    def core(x: Tensor, *weights: Tensor) -> Tensor:
        x = normalised(x)
        x = x * weights[0] if weights else x
        return x + weights[1] if len(weights) > 1 else x

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        x = inputs[0] if inputs else _data(setting, batch, features)
        y = checkpoint(core, x, *weights) if setting.recompute else core(x, *weights)
        return behind(y, batch.step)

    return body


def _add(setting: LayerSetting) -> Body:
    behind = epilogue(setting)
    if len(setting.graph.inputs(setting.layer.name)) < 2:
        raise UserError(f"{setting.layer.describe()}: it adds an input of the model, which cannot be run")

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        total = inputs[0]
        for other in inputs[1:]:
            total = total + other
        return behind(total, batch.step)

    return body


def _loss(setting: LayerSetting) -> Body:
    layer, strategy = setting.layer, setting.strategy
    columns = setting.held(layer.attributes["vocabulary"])

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        if batch.targets is None:
            raise UserError(f"{layer.describe()}: it has no targets; the last argument should be the targets")
        targets = setting.samples(batch.targets, batch).reshape(-1)
        return cross_entropy(
            inputs[0].reshape(len(targets), -1),
            flow.tensor(np.ascontiguousarray(targets)),
            max(int((batch.targets != IGNORED).sum()), 1),
            columns,
            layer.attributes["vocabulary"],
            strategy.axes(1),
            strategy.axes(0),
            setting.stepper,
        )

    return body


# ---- On whole samples ------------------------------------------------------------------------------------------------------


def _conv2d(setting: LayerSetting) -> Body:
    layer, module, behind = setting.layer, setting.own_module(), epilogue(setting)
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise UserError(f"{layer.describe()}: padding_mode {module.padding_mode!r} cannot be run, should be 'zeros'")

    def core(x: Tensor, *weights: Tensor) -> Tensor:
        x = x.reshape(-1, *layer.input_shape)
        bias = weights[1] if len(weights) > 1 else None
        y = flow.nn.functional.conv2d(
            x, weights[0], bias, module.stride, module.padding, module.dilation, module.groups
        )
        return y.reshape(y.shape[0], 1, -1)

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        x = _first_input(inputs, setting, batch)
        if setting.recompute:
            return checkpoint(lambda x, *w: behind(core(x, *w), batch.step), x, *weights)
        return behind(core(x, *weights), batch.step)

    return body


def _opaque(setting: LayerSetting) -> Body:
    """The user's own module, on whole samples."""
    layer, graph = setting.layer, setting.graph
    if len(layer.modules) > 1 or (layer.modules and find_module(setting.module, layer.modules[0]) is None):
        raise UserError(
            f"{layer.describe()}: it stands for {', '.join(layer.modules)}, should stand for one module of the model to be run"
        )
    module = copy.deepcopy(setting.own_module())
    norms = [name for name, part in module.named_modules() if "BatchNorm" in type(part).__name__]
    if norms and setting.strategy.p0 > 1:
        raise UserError(
            f"{layer.describe()}: the BatchNorm {norms[0] or 'that it is'} needs statistics of all samples, which are on "
            f"{setting.strategy.p0} ranks; another norm would do"
        )
    own = layer.modules[0] if layer.modules else layer.name
    places = []
    for parameter in layer.parameters:
        if not parameter.name.startswith(f"{own}."):
            raise UserError(f"{layer.describe()}: its parameter {parameter.name} does not belong to module {own!r}")
        path, _, name = parameter.name[len(own) + 1 :].rpartition(".")
        places.append((find_module(module, path), name))
    shapes = [graph[producer].output_shape for producer in graph.inputs(layer.name)]
    if len(shapes) <= 1:
        shapes = [layer.input_shape]
    # Outside of sequences the one row of a sample is the sample itself.
    shapes = [shape[1:] if len(shape) == 2 and shape[0] == 1 else shape for shape in shapes]
    behind = epilogue(setting)

    def core(*tensors: Tensor) -> Tensor:
        inputs, weights = tensors[: len(shapes)], tensors[len(shapes) :]
        for (owner, name), weight in zip(places, weights):
            # Plain tensors in place of parameters: gradients flow to where the weights come from.
            owner._parameters.pop(name, None)
            object.__setattr__(owner, name, weight)
        y = module(*(x.reshape(x.shape[0], *shape) for x, shape in zip(inputs, shapes)))
        if not isinstance(y, flow.Tensor):
            raise UserError(f"{layer.describe()}: it returns {type(y).__name__}, should return one tensor")
        return y.reshape(y.shape[0], *_stored_shape(layer.output_shape))

    def body(inputs: Sequence[Tensor], weights: Weights, batch: Batch) -> Tensor:
        module.train(batch.step is not None)
        given = inputs if inputs else [_first_input(inputs, setting, batch)]
        if setting.recompute:
            return checkpoint(lambda *tensors: behind(core(*tensors), batch.step), *given, *weights)
        return behind(core(*given, *weights), batch.step)

    return body


def _data(setting: LayerSetting, batch: Batch, features: int, held: np.ndarray | None = None) -> Tensor:
    """What a layer that reads the data itself is given: its samples, of the features its block or those ``held``."""
    rows = prod(setting.layer.input_shape[:-1])
    data = setting.samples(batch.inputs[setting.layer.name], batch).reshape(-1, rows, features)
    return flow.tensor(np.ascontiguousarray(data[..., setting.held(features) if held is None else held]))


def _first_input(inputs: Sequence[Tensor], setting: LayerSetting, batch: Batch) -> Tensor:
    if inputs:
        return inputs[0]
    return flow.tensor(np.ascontiguousarray(setting.samples(batch.inputs[setting.layer.name], batch)))


def _stored_shape(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, features) of an activation: images are one row."""
    return (prod(shape[:-1]), shape[-1]) if len(shape) <= 2 else (1, prod(shape))


_BUILDERS: Mapping[str, Callable[[LayerSetting], Body]] = {
    "linear": _linear,
    "embedding": _embedding,
    "position": _position,
    "attention": _attention,
    "norm": _norm,
    "add": _add,
    "conv2d": _conv2d,
    "loss": _loss,
    "opaque": _opaque,
}
