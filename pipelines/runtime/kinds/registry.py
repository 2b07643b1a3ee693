"""What ranks do for each kind of layer, by the name of the kind: programs, and the layouts of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph, Parameter
from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of, source_of
from autoddl.costmodel.strategy import Strategy

from ..comm.parameter_layouts import (
    ParameterLayout,
    expert_layouts,
    feature_layouts,
    linear_layouts,
    table_layouts,
    whole_layouts,
)
from ..statements import Call, LayerContext, LayerProgram
from . import (
    add,
    attention,
    batchnorm,
    conv2d,
    embedding,
    experts,
    latent,
    linear,
    loss,
    norm,
    opaque,
    pool,
    position,
    tokengate,
)

__all__ = ["layer_program", "layouts_call", "parameter_layouts", "plain_module", "register", "registered_functions"]

Program = Callable[[LayerContext], LayerProgram]
Layouts = Callable[[LayerContext, Sequence[Parameter]], Call]


def common_layouts(context: LayerContext, parameters: Sequence[Parameter]) -> Call:
    """Return the call that describes the layouts of a layer's parameters, unless its kind has a function for them.

    Every rank holds the parameters completely if only the samples of the layer can be split. Otherwise the last dimension of each
    parameter is split like the features of activations.
    """
    is_whole = kind_of(context.layer.kind).splitting is Splitting.SAMPLES
    shapes = {parameter.name: parameter.shape for parameter in parameters}
    return Call("whole_layouts" if is_whole else "feature_layouts", (shapes, context.layout))


@dataclass(frozen=True)
class RankKind:
    """What ranks do for a kind of layer.

    Attributes:
        program: Returns the statements of a layer.
        layouts: Returns a call that returns a `ParameterLayout` for each tensor that ranks store for some parameters of a layer.
            The strings among its arguments, and the keys of mappings, are names of parameters.
        plain_module: Makes a module with the properties that the program looks up in the user's module; None if there are none.
    """

    program: Program
    layouts: Layouts = common_layouts
    plain_module: Callable[[Layer], Any] | None = None


_RANK_KINDS: dict[str, RankKind] = {
    "linear": RankKind(linear.program, linear.layouts),
    "embedding": RankKind(embedding.program, embedding.layouts),
    "position": RankKind(position.program),
    "attention": RankKind(attention.program),
    "norm": RankKind(norm.program, plain_module=norm.plain_module),
    "add": RankKind(add.program),
    "conv2d": RankKind(conv2d.program, conv2d.layouts, conv2d.plain_module),
    "batch_norm": RankKind(batchnorm.program, plain_module=batchnorm.plain_module),
    "pool": RankKind(pool.program),
    "experts": RankKind(experts.program, experts.layouts),
    "token_gate": RankKind(tokengate.program),
    "latent_attention": RankKind(latent.program),
    "loss": RankKind(loss.program),
    "opaque": RankKind(opaque.program),
}
#: The functions of the calls of `RankKind.layouts`, in addition to registered ones.
_LAYOUT_FUNCTIONS: Mapping[str, Callable[..., tuple[ParameterLayout, ...]]] = {
    function.__name__: function
    for function in (expert_layouts, feature_layouts, linear_layouts, table_layouts, whole_layouts)
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def register(
    kind: str,
    program: Program,
    functions: Sequence[Callable[..., Any]] = (),
    layouts: Layouts = common_layouts,
    plain_module: Callable[[Layer], Any] | None = None,
) -> None:
    """Register what ranks do for a kind of layer.

    Args:
        kind: Name of a kind that is registered in :mod:`autoddl.costmodel.kinds`.
        program: Returns the statements of a layer.
        functions: Functions that statements and layouts call by name, in addition to those of the runtime. Exported files contain
            their source.
        layouts: Describes how ranks store parameters; see `RankKind`. By default every rank holds all of them if only samples can
            be split; otherwise their last dimension is split like features.
        plain_module: Makes a module with the properties that the program looks up in the user's module; see `RankKind`.

    Raises:
        UserError: The kind is unknown, or another function has the name of one of ``functions``.
    """
    kind_of(kind)
    for function in functions:
        if source_of(_FUNCTIONS.get(function.__name__, function)) != source_of(function):
            raise UserError(f"kind {kind!r}: another function is called {function.__name__!r}")
    _FUNCTIONS.update({function.__name__: function for function in functions})
    _RANK_KINDS[kind] = RankKind(program, layouts, plain_module)


def registered_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions of kinds that were registered with `register`, by name."""
    return _FUNCTIONS


def layer_program(
    graph: LayerGraph,
    layer: Layer,
    strategy: Strategy,
    recompute: bool,
    attention: str = "fused",
    is_in_block: bool = False,
    is_mirrored: bool = False,
) -> LayerProgram:
    """Return the program of a layer under its strategy.

    Args:
        graph: The layer's graph.
        layer: A layer of the graph.
        strategy: Strategy of the layer.
        recompute: Whether only evenly split inputs are kept for the backward pass.
        attention: How attention is computed, one of :data:`autoddl.costmodel.workload.ATTENTIONS`.
        is_in_block: Whether the backward pass runs the whole block of the layer again.
        is_mirrored: Whether the positions of all samples of the model are in mirrored order.

    Raises:
        UserError: The layer cannot be run; it is named.
    """
    shapes: tuple[tuple[int, ...], ...] = ()
    if strategy.zero == 3:
        shapes = tuple(layout.local_shape() for layout in parameter_layouts(graph, layer, strategy))
    is_rerun = recompute or is_in_block
    options = recompute, attention, is_rerun, shapes, is_mirrored
    return _rank_kind(layer).program(LayerContext(graph, layer, strategy, *options))


def layouts_call(
    graph: LayerGraph, layer: Layer, strategy: Strategy, parameters: Sequence[Parameter] | None = None
) -> Call:
    """Return the call that describes how ranks store parameters of a layer. `parameter_layouts` runs it, exported files print it.

    Args:
        graph: The layer's graph.
        layer: A layer of the graph.
        strategy: Strategy of the layer.
        parameters: Parameters of the layer, at least one. Default: all.

    Raises:
        UserError: Ranks cannot store the layer's parameters; the layer is named.
    """
    context = LayerContext(
        graph, layer, strategy, recompute=False, attention="dense", is_rerun=False, shapes=(), is_mirrored=False
    )
    return _rank_kind(layer).layouts(context, layer.parameters if parameters is None else parameters)


def parameter_layouts(graph: LayerGraph, layer: Layer, strategy: Strategy) -> tuple[ParameterLayout, ...]:
    """Return the layouts of a layer's parameters, in the order of the layer; tied parameters as if they were its own.

    Raises:
        UserError: Ranks cannot store the layer's parameters; the layer is named.
    """
    if not layer.parameters:
        return ()
    call = layouts_call(graph, layer, strategy)
    function = _LAYOUT_FUNCTIONS.get(call.function) or _FUNCTIONS[call.function]
    return function(*call.arguments, **call.options)  # type: ignore[no-any-return]


def plain_module(layer: Layer) -> Any:
    """Return a module with the properties that the layer's program looks up in the user's module; None if there are none."""
    make = _rank_kind(layer).plain_module
    return None if make is None else make(layer)


def _rank_kind(layer: Layer) -> RankKind:
    if layer.kind not in _RANK_KINDS:
        raise UserError(f"{layer.describe()}: no program is registered that runs layers of this kind on ranks")
    return _RANK_KINDS[layer.kind]
