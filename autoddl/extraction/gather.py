"""From operators to layers.

First the regions that are one layer each are found: norms, dense layers, attention cores, fused projections, gates.  Then
the operators are taken in the order of execution.  One that ends a region makes the region's layer.  An element-wise one
joins the layer whose output it works on; a view only says where its elements are.  What is left over becomes an opaque
layer, which can be split along the batch only, and is named in the graph's notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph

from ..zoo import layers as make
from .assembly import Assembly
from .attention import AttentionRegion, find_attentions
from .dense import Dense, DenseGroup, find_dense, find_loops, fuse_gates, fuse_projections
from .drafts import LayerDraft, View, finish, listed
from .norms import NormRegion, find_norms
from .operators import (
    CROSS_ENTROPIES,
    ELEMENTWISE,
    ELEMENTWISE_LOSSES,
    LOOKUPS,
    PRODUCTS,
    REDUCTIONS,
    SUMS,
    VIEWS,
    Operator,
    OperatorGraph,
    flops,
    lookup_arguments,
)
from .registered import RegisteredRegion, find_registered

__all__ = ["gather"]

#: OneFlow's operators by the name that an epilogue gives them, where it is another.
EPILOGUE_NAMES = {
    "fast_gelu": "gelu",
    "sigmoid_v2": "sigmoid",
    "add_n": "sum",
    "broadcast_add": "sum",
    "bias_add": "sum",
    "broadcast_sub": "sub",
    "broadcast_mul": "product",
    "broadcast_div": "quotient",
}


def gather(graph: OperatorGraph, name: str) -> LayerGraph:
    """The layer graph of traced operators.

    Raises:
        UserError: no operator depends on both inputs and parameters.
    """
    return _Gathering(graph).run(name)


class _Gathering(Assembly):
    """One pass over the operators."""

    def __init__(self, graph: OperatorGraph):
        super().__init__(graph)
        #: Modules whose attention has a mask of unknown values.
        self.masked: list[str] = []
        self.blocks = {child for children in graph.containers.values() for child in children}
        #: What to do at the operator of that name; None: nothing, since it belongs to a layer made elsewhere.
        self.actions: dict[str, Callable[[], None] | None] = {}

    def run(self, name: str) -> LayerGraph:
        """All layers."""
        self._find_regions()
        for op in self.graph.operators:
            if op.name in self.actions:
                action = self.actions[op.name]
                if action is not None:
                    action()
            elif any(self.graph.is_active(tensor) for tensor in op.outputs):
                self._operator(op)
        if not self.drafts:
            raise UserError(
                f"nothing in {name} depends on both its inputs and its parameters: there is nothing to plan"
            )
        notes = list(self.graph.notes)
        if self.masked:
            notes.append(
                f"{listed(self.masked)}: the values of the attention's mask are unknown, it is taken as causal"
            )
        return finish(self.drafts, self.graph, name, notes)

    # ---- Regions ----------------------------------------------------------------------------------------------------

    def _find_regions(self) -> None:
        graph = self.graph
        dense, norms = find_dense(graph), find_norms(graph)
        loops = find_loops(graph, dense)
        registered = find_registered(graph)
        for own in registered:
            self._claim(own.operators, own.output, partial(self._registered, own))
        own_operators = {op.name for own in registered for op in own.operators}
        loops = [loop for loop in loops if own_operators.isdisjoint(op.name for op in loop)]
        taken = own_operators | {op.name for loop in loops for op in loop}
        dense = [part for part in dense if part.product.name not in taken]
        norms = [norm for norm in norms if norm.operators[0].name not in taken]
        # Norms of single heads are part of the attention that they lie in.
        inner = [norm for norm in norms if len(graph.shapes[norm.source]) > 3]
        ends = {part.output for part in dense} | {norm.output for norm in norms if norm not in inner}
        attentions = find_attentions(graph, ends, {op.name for norm in inner for op in norm.operators})
        attentions = [region for region in attentions if own_operators.isdisjoint(op.name for op in region.operators)]
        for loop in loops:
            output = max(self._handed_on(loop), key=graph.elements, default=loop[-1].output)
            self._claim(loop, loop[-1].output, partial(self._opaque, loop, output, "a recurrent module"))
        inside = {op.name for region in attentions for op in region.operators}
        groups = [*fuse_projections(graph, dense, attentions), *fuse_gates(graph, dense)]
        grouped = {part.output for group in groups for part in group.parts}
        groups += [DenseGroup((part,)) for part in dense if part.output not in grouped]
        for norm in norms:
            if inside.isdisjoint(op.name for op in norm.operators):
                self._claim(norm.operators, norm.output, partial(self._norm, norm))
        for region in attentions:
            self._claim(region.operators, region.output, partial(self._attention, region))
        for group in groups:
            first = min((part.product for part in group.parts), key=lambda op: graph.position[op.name])
            members = [op for part in group.parts for op in part.operators]
            self._claim([*members, *group.gate], first.output, partial(self._dense, group))

    def _handed_on(self, operators: Sequence[Operator]) -> list[str]:
        """The tensors that others read, or that are outputs of the model."""
        graph, names = self.graph, {op.name for op in operators}
        return [
            tensor
            for op in operators
            for tensor in op.outputs
            if tensor in graph.outputs or any(r.name not in names for r in graph.consumers.get(tensor, ()))
        ]

    def _claim(self, operators: Sequence[Operator], last: str, action: Callable[[], None]) -> None:
        """Act at the operator that makes the tensor ``last``; the others belong to the same layer."""
        for op in operators:
            self.actions[op.name] = action if last in op.outputs else None

    def _registered(self, region: RegisteredRegion) -> None:
        learned = [tensor for op in region.operators for tensor in self.graph.learned_inputs(op)]
        layer = replace(region.layer, name="", parameters=(), modules=(region.path,))
        variables = self._parameters(learned, region.path)
        self._add(LayerDraft(layer, region.path, region.path, self._owners(region.sources), variables), region.output)

    def _norm(self, norm: NormRegion) -> None:
        first = norm.operators[0]
        if not self._view(norm.source).is_plain:
            # Over something else than a layer's features, such as groups of channels.
            self._opaque(norm.operators, norm.output)
            return
        rows, features = self.graph.rows_and_features(norm.source)
        is_module = self._is_leaf(first.path)
        layer = make.norm("", rows, features, statistics=norm.statistics)
        layer = replace(layer, modules=(first.path,) if is_module else ())
        name = first.path if is_module else self._join(first.path, "norm")
        variables = self._parameters(norm.learned, first.path)
        self._add(LayerDraft(layer, name, first.path, self._owners([norm.source]), variables), norm.output)

    def _attention(self, region: AttentionRegion) -> None:
        graph = self.graph
        total = sum(graph.elements(tensor) for tensor in region.sources) // (graph.batch * region.rows)
        kv_heads, rest = divmod(total - region.heads * region.head_dim, 2 * region.head_dim)
        if rest or kv_heads < 1 or region.heads % kv_heads:
            kv_heads = region.heads
        if region.causal is None:
            self.masked.append(region.path or "attention")
        layer = make.attention(
            "", region.rows, region.heads, region.head_dim, kv_heads=kv_heads, causal=region.causal is not False
        )
        kept = layer.kept_elements
        if region.dropout:  # the probabilities before, those after, and the mask
            kept = 2 * kept + make.kept_by_epilogue(("dropout",), kept)
        own_module = region.path and region.path not in self.blocks
        layer = replace(
            layer,
            input_shape=(region.rows, total),
            kept_elements=kept,
            modules=(region.path,) if region.path else (),
        )
        learned = [t for op in region.operators for t in graph.learned_inputs(op)]
        variables = self._parameters(learned, region.path)
        name = region.path if own_module else self._join(region.path, "attention")
        self._add(LayerDraft(layer, name, region.path, self._owners(region.sources), variables), region.output)

    def _dense(self, group: DenseGroup) -> None:
        first = group.parts[0]
        rows, in_features = self.graph.rows_and_features(first.source)
        names = [self._dense_name(part) for part in group.parts]
        out_features = sum(part.out_features for part in group.parts)
        epilogue = tuple(EPILOGUE_NAMES.get(a, a) for a in group.activations) + (("mul",) if group.output else ())
        layer = make.linear("", rows, in_features, out_features, epilogue=epilogue)
        variables = [
            parameter
            for part in group.parts
            for parameter in self._parameters(filter(None, (part.weight, part.bias)), part.product.path)
        ]
        modules = tuple(part.product.path for part in group.parts if part.product.path)
        draft = LayerDraft(
            layer=replace(layer, epilogue=(), kept_elements=0, modules=modules),
            name=_fused_name(names),
            path=first.product.path,
            inputs=self._owners([first.source]),
            variables=variables,
            epilogue=[(operation, rows * layer.features) for operation in epilogue],
        )
        self._add(draft, *(part.output for part in group.parts))
        if group.output:
            self.views[group.output] = self._plain(draft, group.output)

    def _dense_name(self, part: Dense) -> str:
        path = part.product.path
        if self._is_leaf(path):
            return path
        variables = self.graph.trained_variables(part.weight)
        for holder, attribute in self.graph.aliases.get(variables[0], ()) if len(variables) == 1 else ():
            if holder == path and attribute != "weight":
                return self._join(path, attribute)
        return self._join(path, "linear")

    # ---- Single operators -------------------------------------------------------------------------------------------

    def _operator(self, op: Operator) -> None:
        if op.kind in LOOKUPS and self._embedding(op):
            return
        if op.kind == "conv2d" and self._conv2d(op):
            return
        if op.kind in CROSS_ENTROPIES or (op.kind == "log_softmax" and self._is_read_by_nll(op)):
            self._loss(op)
        elif op.kind in VIEWS and len(self.graph.active_inputs(op)) == 1:
            self._view_operator(op)
        elif not self._joins_layer(op):
            self._opaque([op], op.output)

    def _embedding(self, op: Operator) -> bool:
        graph = self.graph
        table, indices = lookup_arguments(op)
        if not graph.is_learned(table) or not graph.is_raw(indices) or len(graph.shapes[table]) != 2:
            return False
        vocabulary, features = graph.shapes[table]
        layer = make.embedding("", graph.elements(indices) // graph.batch, vocabulary, features)
        self._add(self._module_draft(op, layer, "embedding", [table]), op.output)
        return True

    def _conv2d(self, op: Operator) -> bool:
        graph, given = self.graph, op.attributes
        source, weight = op.arguments["in"][0], op.arguments["weight"][0]
        squares = [set(given[key]) for key in ("kernel_size", "strides", "padding_before", "dilation_rate")]
        regular = all(len(lengths) == 1 for lengths in squares) and given["groups"] == 1 and squares[3] == {1}
        if not regular or given["data_format"] != "channels_first" or not graph.is_learned(weight):
            return False
        channels, height, width = graph.shapes[source][1:]
        kernel, stride, padding = (lengths.pop() for lengths in squares[:3])
        layer = make.conv2d(
            "", (channels, height, width), given["filters"], kernel_size=kernel, stride=stride, padding=padding
        )
        if (graph.batch, *layer.output_shape) != graph.shapes[op.output]:
            return False
        learned = [weight, *op.arguments.get("bias", ())]
        self._add(self._module_draft(op, layer, "conv2d", learned, [source]), op.output)
        return True

    def _module_draft(
        self, op: Operator, layer: Layer, kind: str, learned: Sequence[str], sources: Sequence[str] = ()
    ) -> LayerDraft:
        """The draft of an operator that is a module of its own, or else is named by its kind."""
        is_module = self._is_leaf(op.path)
        return LayerDraft(
            layer=replace(layer, modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, kind),
            path=op.path,
            inputs=self._owners(sources),
            variables=self._parameters(learned, op.path),
        )

    def _is_read_by_nll(self, op: Operator) -> bool:
        tensor = op.output
        while (reader := self.graph.sole_consumer(tensor)) is not None:
            if reader.kind == "nll":
                return True
            if reader.kind not in VIEWS:
                return False
            tensor = reader.output
        return False

    def _loss(self, op: Operator) -> None:
        logits = op.arguments.get("prediction", op.arguments.get("in", op.inputs[:1]))[0]
        rows, vocabulary = self.graph.rows_and_features(logits)
        layer = make.loss("", rows, vocabulary)
        is_module = self._is_leaf(op.path)
        draft = LayerDraft(
            layer=replace(layer, modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, "loss"),
            path=op.path,
            inputs=self._owners([logits]),
        )
        self._add(draft, *op.outputs)

    def _view_operator(self, op: Operator) -> None:
        graph = self.graph
        (source,) = graph.active_inputs(op)
        view = self._view(source)
        before, after = graph.shapes[source], graph.shapes[op.output]
        if op.kind == "transpose":
            dims = None if view.dims is None else tuple(view.dims[dim] for dim in op.attributes["perm"])
        elif before == after:
            dims = view.dims
        elif view.is_plain and (before[-1:] == after[-1:] or (len(after) == 2 and not self._has_features(view))):
            dims = tuple(range(len(after)))  # an image's flattened channels can be split as an image can: not at all
        else:
            dims = None
        for tensor in op.outputs:
            self.views[tensor] = View(view.draft, dims)

    def _joins_layer(self, op: Operator) -> bool:
        """Let an operator be part of the layer it follows (or be a residual sum); False where it cannot."""
        graph = self.graph
        active = graph.active_inputs(op)
        owners = list({id(d): d for t in active if (d := self._view(t).draft) is not None}.values())
        if not owners:
            return False
        elements = max(graph.elements(tensor) for tensor in active)
        if op.kind in ELEMENTWISE and graph.elements(op.output) == elements:
            if len(owners) > 1:
                return op.kind in SUMS and self._sum(op, active)
            return self._elementwise(op, owners[0], active)
        is_loss = owners[0].layer.kind == "loss" and len(owners) == 1
        if op.kind in ELEMENTWISE_LOSSES or is_loss or (len(owners) == 1 and self._is_row_reduction(op)):
            self._follow(op, owners[0], active)
            return True
        return False

    def _is_row_reduction(self, op: Operator) -> bool:
        """A reduction over rows, or over everything: not over the features alone."""
        if op.kind not in REDUCTIONS:
            return False
        shape, dims = self.graph.shapes[op.inputs[0]], self.graph.reduced_dims(op)
        view = self._view(op.inputs[0])
        return len(dims) == len(shape) or (
            view.is_plain and self._has_features(view) and not {0, len(shape) - 1} & set(dims)
        )

    def _elementwise(self, op: Operator, owner: LayerDraft, active: Sequence[str]) -> bool:
        tables = [tensor for tensor in op.inputs if tensor not in active and self._is_table(tensor, active[0])]
        if len(active) == 1 and tables and op.kind in SUMS - {"broadcast_sub"} and self._view(active[0]).is_plain:
            return self._sum(op, active)
        owner.variables += self._parameters(self.graph.learned_inputs(op), op.path)
        self._follow(op, owner, active)
        return True

    def _follow(self, op: Operator, owner: LayerDraft, active: Sequence[str]) -> None:
        """Let an operator be part of a layer's epilogue."""
        graph = self.graph
        is_bias = op.kind in (*SUMS, "bias_add") and len(active) == 1 and bool(graph.learned_inputs(op))
        if owner.layer.kind != "loss" and not is_bias:
            name = EPILOGUE_NAMES.get(op.kind, op.kind)
            if op.kind in PRODUCTS and len(active) == 1 and graph.learned_inputs(op):
                name = "scale"
            owner.epilogue.append((name, graph.elements(op.output) // graph.batch))
        views = [self._view(tensor) for tensor in active]
        same_shape = all(graph.shapes[tensor] == graph.shapes[op.output] for tensor in active)
        if same_shape and len({view.dims for view in views}) == 1:
            dims = views[0].dims
        elif all(view.is_plain for view in views):
            dims = tuple(range(len(graph.shapes[op.output])))
        else:
            dims = None
        for tensor in op.outputs:
            self.views[tensor] = View(owner, dims)

    def _is_table(self, tensor: str, active: str) -> bool:
        """Whether a learned tensor has a value for each row and feature of a sample (and is no bias), or data do."""
        graph = self.graph
        rows, features = self.graph.rows_and_features(active)
        if graph.is_raw(tensor):
            return graph.shapes[tensor] == graph.shapes[active]
        is_whole = graph.elements(tensor) in (rows * features, graph.elements(active))
        return graph.is_learned(tensor) and rows > 1 and is_whole

    def _sum(self, op: Operator, active: Sequence[str]) -> bool:
        """A residual sum; tables that are added are layers too."""
        graph = self.graph
        shapes = {graph.elements(tensor) for tensor in active}
        if len(shapes) > 1 or any(not self._view(tensor).is_plain for tensor in active):
            return False
        learned = graph.learned_inputs(op)
        tables = [tensor for tensor in learned if self._is_table(tensor, active[0])]
        if len(tables) < len(learned):
            return False
        sources: list[LayerDraft] = []
        for draft in self._owners(active):
            # A sum that nothing else reads is continued: three tables, or parallel branches.
            if draft.layer.kind == "add" and draft.output in active and graph.sole_consumer(draft.output) is op:
                self.drafts.remove(draft)
                sources += draft.inputs
            else:
                sources.append(draft)
        sources += [self._position(tensor, active[0]) for tensor in tables]
        shape = self.graph.sample_shape(op.output)
        only_tables = all(draft.layer.kind in ("embedding", "position") for draft in sources)
        name = self._join(op.path, "embed" if only_tables else "add")
        self._add(LayerDraft(make.add("", shape), name, op.path, sources), op.output)
        return True

    def _position(self, table: str, active: str) -> LayerDraft:
        """The layer of a learned table that is added to every sample."""
        graph = self.graph
        op = graph.producer.get(table)
        variable = graph.trained_variables(table)[0]
        holder, attribute = graph.aliases.get(variable, ((op.path if op else "", "position"),))[0]
        rows, features = self.graph.rows_and_features(active)
        whole = graph.shapes[variable]
        positions = whole[-2] if len(whole) > 1 and whole[-1] == features else rows
        layer = make.position("", rows, max(positions, rows), features)
        name = holder if self._is_leaf(holder) else self._join(holder, attribute)
        draft = LayerDraft(replace(layer, modules=(name,)), name, holder, [], self._parameters([table], holder))
        self._add(draft)
        return draft

    # ---- What is not understood -------------------------------------------------------------------------------------

    def _opaque(self, operators: Sequence[Operator], output: str, what: str = "") -> None:
        """One layer of operators that can be split along the batch only; ``what`` they are called in the notes."""
        graph, op = self.graph, operators[-1]
        inside = {tensor for member in operators for tensor in member.outputs}
        active = list(dict.fromkeys(t for m in operators for t in graph.active_inputs(m) if t not in inside))
        learned = [t for member in operators for t in graph.learned_inputs(member)]
        variables = self._parameters(learned, op.path)
        inputs = self._owners(active)
        cost = sum(flops(graph, member) for member in operators) / graph.batch
        extra = [t for m in operators for t in m.outputs if t != output and graph.has_batch(t)]
        kept = sum(graph.elements(tensor) for tensor in extra) // graph.batch
        if self._continues(op, inputs, active):
            draft = inputs[0]
            kept += draft.layer.output_elements
            draft.layer = replace(
                draft.layer,
                output_shape=self.graph.sample_shape(output),
                flops=draft.layer.flops + cost,
                kept_elements=draft.layer.kept_elements + kept,
            )
            draft.variables += variables
        else:
            raw = [t for member in operators for t in member.inputs if graph.is_raw(t)]
            source = (active or raw or [output])[0]
            is_module = self._is_leaf(op.path)
            layer = make.opaque(
                "",
                self.graph.sample_shape(source),
                self.graph.sample_shape(output),
                flops=cost,
                kept_elements=kept,
                modules=(op.path,) if is_module else (),
            )
            name = op.path if is_module else self._join(op.path, op.kind)
            draft = LayerDraft(layer, name, op.path, inputs, variables)
            self._add(draft)
        draft.kinds += [what] if what else [member.kind for member in operators]
        draft.mixes |= any(self._mixes_samples(member) for member in operators)
        for tensor in self._handed_on(operators):
            self.views[tensor] = self._plain(draft, tensor)

    def _mixes_samples(self, op: Operator) -> bool:
        """Whether what an operator makes of a sample depends on the others, as far as one can see."""
        if op.kind in REDUCTIONS and 0 in self.graph.reduced_dims(op):
            return True
        return bool(op.attributes.get("training")) and op.kind.startswith("normalization")

    def _continues(self, op: Operator, inputs: Sequence[LayerDraft], active: Sequence[str]) -> bool:
        """Whether an operator goes on with the opaque layer of its own module."""
        return (
            len(inputs) == 1
            and inputs[0].layer.kind == "opaque"
            and inputs[0].path == op.path
            and self._is_leaf(op.path)
            and all(self.graph.sole_consumer(tensor) is not None for tensor in active)
        )


def _fused_name(names: Sequence[str]) -> str:
    """``attn.query``, ``attn.key``, ``attn.value`` as ``attn.query+key+value``."""
    prefix = names[0].rpartition(".")[0]
    if all(name.rpartition(".")[0] == prefix for name in names):
        return ".".join(filter(None, [prefix, "+".join(name.rpartition(".")[2] for name in names)]))
    return "+".join(names)
