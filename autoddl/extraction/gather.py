"""Groups the operators of a traced model into the layers of a layer graph.

1. Find the *regions*, groups of operators that are one layer each: modules of registered kinds, recurrent modules, norms, dense
   layers, attention cores, fused projections and gates.
2. Visit the operators in execution order.  An operator outside of all regions is skipped if none of its outputs is active.

   - The operator that ends a region adds the region's layer; the other operators of a region add nothing.
   - An embedding lookup, a convolution, a pooling, a batch norm or a cross entropy adds a layer.
   - A view adds no layer, it changes the order of a tensor's dimensions only.
   - A residual sum adds a layer of kind ``add``.
   - Any other element-wise operator, and a reduction over rows, joins the epilogue of the layer whose output it reads.
   - Every other operator adds an opaque layer, which can be split along the batch only.  The notes of the graph name it.
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
from .dense import Dense, DenseGroup, find_dense, find_recurrent_calls, fuse_gates, fuse_projections
from .drafts import LayerDraft, View, build_layer_graph, join_names
from .images import image_layer_of
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

#: Names of operators in an epilogue, by OneFlow's operator name, if the two differ.
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
    """Return the layer graph of traced operators.

    Args:
        graph: The traced operators.
        name: Name of the layer graph.

    Raises:
        UserError: If no operator depends on both inputs and parameters.
    """
    return _Gathering(graph).run(name)


class _Gathering(Assembly):
    """One pass over the operators of a graph."""

    def __init__(self, graph: OperatorGraph):
        super().__init__(graph)
        #: Modules whose attention has a mask of unknown values.
        self.unknown_masks: list[str] = []
        #: Paths of the children of module lists and sequences.
        self.container_children = {child for children in graph.containers.values() for child in children}
        #: By operator name, for the operators of regions: adds the region's layer.  None if another operator of the region does.
        self.actions: dict[str, Callable[[], None] | None] = {}

    def run(self, name: str) -> LayerGraph:
        """Return the layer graph."""
        # 1. Regions.
        self._find_regions()
        # 2. Layers, in execution order.
        for op in self.graph.operators:
            if op.name in self.actions:
                action = self.actions[op.name]
                if action is not None:
                    action()
            elif any(self.graph.is_active(tensor) for tensor in op.outputs):
                self._add_operator(op)
        if not self.drafts:
            raise UserError(
                f"no operator of {name} depends on both its inputs and its parameters: there is nothing to plan"
            )
        notes = list(self.graph.notes)
        if self.unknown_masks:
            notes.append(
                f"{join_names(self.unknown_masks)}: the values of the attention mask are unknown; it is taken as causal"
            )
        return build_layer_graph(self.drafts, self.graph, name, notes)

    # ---- Regions ----------------------------------------------------------------------------------------------------

    def _find_regions(self) -> None:
        """Find all regions and assign an action to each of their operators."""
        graph = self.graph
        dense, norms = find_dense(graph), find_norms(graph)
        loops = find_recurrent_calls(graph, dense)
        registered = find_registered(graph)
        # Registered modules take precedence over all other regions, recurrent modules over dense layers and norms.
        registered_operators = {op.name for region in registered for op in region.operators}
        loops = [loop for loop in loops if registered_operators.isdisjoint(op.name for op in loop)]
        assigned = registered_operators | {op.name for loop in loops for op in loop}
        dense = [part for part in dense if part.product.name not in assigned]
        norms = [norm for norm in norms if norm.operators[0].name not in assigned]
        # The norms of single heads are part of the attention core that contains them.
        head_norms = [norm for norm in norms if len(graph.shapes[norm.source]) > 3]
        ends = {part.output for part in dense} | {norm.output for norm in norms if norm not in head_norms}
        attentions = find_attentions(graph, ends, {op.name for norm in head_norms for op in norm.operators})
        attentions = [
            region for region in attentions if registered_operators.isdisjoint(op.name for op in region.operators)
        ]
        attention_operators = {op.name for region in attentions for op in region.operators}
        # Dense layers that are not fused are groups of one.
        groups = [*fuse_projections(graph, dense, attentions), *fuse_gates(graph, dense)]
        fused = {part.output for group in groups for part in group.parts}
        groups += [DenseGroup((part,)) for part in dense if part.output not in fused]
        # Later assignments replace earlier ones.
        for own_region in registered:
            self._assign(own_region.operators, own_region.output, partial(self._add_registered, own_region))
        for loop in loops:
            output = max(graph.results_of(loop), key=graph.elements, default=loop[-1].output)
            self._assign(loop, loop[-1].output, partial(self._add_opaque, loop, output, "a recurrent module"))
        for norm in norms:
            if attention_operators.isdisjoint(op.name for op in norm.operators):
                self._assign(norm.operators, norm.output, partial(self._add_norm, norm))
        for region in attentions:
            self._assign(region.operators, region.output, partial(self._add_attention, region))
        for group in groups:
            first = min((part.product for part in group.parts), key=lambda op: graph.position[op.name])
            members = [op for part in group.parts for op in part.operators]
            self._assign([*members, *group.gate], first.output, partial(self._add_dense, group))

    def _assign(self, operators: Sequence[Operator], tensor: str, action: Callable[[], None]) -> None:
        """Assign an action to the operator that computes ``tensor``, and no action to the others of the region."""
        for op in operators:
            self.actions[op.name] = action if tensor in op.outputs else None

    def _add_registered(self, region: RegisteredRegion) -> None:
        learned = [tensor for op in region.operators for tensor in self.graph.learned_inputs(op)]
        layer = replace(region.layer, name="", parameters=(), modules=(region.path,))
        inputs, variables = self._source_layers(region.sources), self._parameters(learned, region.path)
        self._add(LayerDraft(layer, region.path, region.path, inputs, variables), region.output)

    def _add_norm(self, norm: NormRegion) -> None:
        first = norm.operators[0]
        if not self._view(norm.source).has_features_last:
            # The norm is not taken over the features of a layer, but over groups of channels, for example.
            self._add_opaque(norm.operators, norm.output)
            return
        rows, features = self.graph.rows_and_features(norm.source)
        is_module = self._is_leaf(first.path)
        layer = make.norm("", rows, features, statistics=norm.statistics)
        layer = replace(layer, modules=(first.path,) if is_module else ())
        name = first.path if is_module else self._join(first.path, "norm")
        variables = self._parameters(norm.learned, first.path)
        self._add(LayerDraft(layer, name, first.path, self._source_layers([norm.source]), variables), norm.output)

    def _add_attention(self, region: AttentionRegion) -> None:
        graph = self.graph
        # A row of the sources has (heads + 2 kv_heads) * head_dim features.
        features = sum(graph.elements(tensor) for tensor in region.sources) // (graph.batch * region.rows)
        kv_heads, rest = divmod(features - region.heads * region.head_dim, 2 * region.head_dim)
        if rest or kv_heads < 1 or region.heads % kv_heads:
            kv_heads = region.heads
        if region.causal is None:
            self.unknown_masks.append(region.path or "attention")
        layer = make.attention(
            "",
            region.rows,
            region.heads,
            region.head_dim,
            kv_heads=kv_heads,
            causal=region.causal is not False,
            dropout=bool(region.dropout),
        )
        is_own_module = region.path and region.path not in self.container_children
        layer = replace(
            layer,
            input_shape=(region.rows, features),
            modules=(region.path,) if region.path else (),
        )
        learned = [t for op in region.operators for t in graph.learned_inputs(op)]
        variables = self._parameters(learned, region.path)
        name = region.path if is_own_module else self._join(region.path, "attention")
        self._add(LayerDraft(layer, name, region.path, self._source_layers(region.sources), variables), region.output)

    def _add_dense(self, group: DenseGroup) -> None:
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
            inputs=self._source_layers([first.source]),
            variables=variables,
            epilogue=[(operation, rows * layer.features) for operation in epilogue],
        )
        self._add(draft, *(part.output for part in group.parts))
        if group.output:
            self.views[group.output] = self._output_view(draft, group.output)

    def _dense_name(self, part: Dense) -> str:
        """Return the path of the layer's module or, in a larger module, the name of the weight or ``linear``."""
        path = part.product.path
        if self._is_leaf(path):
            return path
        variables = self.graph.trained_variables(part.weight)
        for holder, attribute in self.graph.aliases.get(variables[0], ()) if len(variables) == 1 else ():
            if holder == path and attribute != "weight":
                return self._join(path, attribute)
        return self._join(path, "linear")

    # ---- Single operators -------------------------------------------------------------------------------------------

    def _add_operator(self, op: Operator) -> None:
        """Add the layer or the view of an operator outside of all regions, or add the operator to the layer that it follows."""
        if op.kind in LOOKUPS and self._add_embedding(op):
            return
        found = image_layer_of(self.graph, op, self._is_image)
        if found is not None:
            self._add(self._module_draft(op, found.layer, found.layer.kind, found.learned, [found.source]), op.output)
            return
        if op.kind in CROSS_ENTROPIES or (op.kind == "log_softmax" and self._is_read_by_nll(op)):
            self._add_loss(op)
        elif op.kind in VIEWS and len(self.graph.active_inputs(op)) == 1:
            self._add_view(op)
        elif not self._join_layer(op):
            self._add_opaque([op], op.output)

    def _add_embedding(self, op: Operator) -> bool:
        """Add the layer of a lookup in a learned table by raw indices; return False for other lookups."""
        graph = self.graph
        table, indices = lookup_arguments(op)
        if not graph.is_learned(table) or not graph.is_raw(indices) or len(graph.shapes[table]) != 2:
            return False
        vocabulary, features = graph.shapes[table]
        layer = make.embedding("", graph.elements(indices) // graph.batch, vocabulary, features)
        self._add(self._module_draft(op, layer, "embedding", [table]), op.output)
        return True

    def _is_image(self, tensor: str) -> bool:
        """Return whether a tensor is raw data, or the image that a layer wrote, without a change of the order of its elements."""
        view = self._view(tensor)
        return view.draft is None or (
            len(view.draft.layer.output_shape) == 3 and view.dims == tuple(range(len(self.graph.shapes[tensor])))
        )

    def _module_draft(
        self, op: Operator, layer: Layer, kind: str, learned: Sequence[str], sources: Sequence[str] = ()
    ) -> LayerDraft:
        """Return the draft of an operator; its name is the path of its module or, in a larger module, its kind."""
        is_module = self._is_leaf(op.path)
        return LayerDraft(
            layer=replace(layer, modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, kind),
            path=op.path,
            inputs=self._source_layers(sources),
            variables=self._parameters(learned, op.path),
        )

    def _is_read_by_nll(self, op: Operator) -> bool:
        """Return whether a negative log-likelihood reads the output of an operator, directly or through views."""
        tensor = op.output
        while (reader := self.graph.sole_consumer(tensor)) is not None:
            if reader.kind == "nll":
                return True
            if reader.kind not in VIEWS:
                return False
            tensor = reader.output
        return False

    def _add_loss(self, op: Operator) -> None:
        logits = op.arguments.get("prediction", op.arguments.get("in", op.inputs[:1]))[0]
        rows, vocabulary = self.graph.rows_and_features(logits)
        layer = make.loss("", rows, vocabulary)
        is_module = self._is_leaf(op.path)
        draft = LayerDraft(
            layer=replace(layer, modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, "loss"),
            path=op.path,
            inputs=self._source_layers([logits]),
        )
        self._add(draft, *op.outputs)

    def _add_view(self, op: Operator) -> None:
        """Set the order of the dimensions of a view's output."""
        graph = self.graph
        (source,) = graph.active_inputs(op)
        view = self._view(source)
        before, after = graph.shapes[source], graph.shapes[op.output]
        if op.kind == "transpose":
            dims = None if view.dims is None else tuple(view.dims[dim] for dim in op.attributes["perm"])
        elif before == after:
            dims = view.dims
        elif view.draft is not None and len(view.draft.layer.output_shape) == 3:
            # Of an image, all elements in their order are one row; anything else reorders blocks of channels.
            dims = tuple(range(len(after))) if self._is_image(source) and len(after) == 2 else None
        elif view.has_features_last and (
            before[-1:] == after[-1:] or (len(after) == 2 and not self._has_features(view))
        ):
            dims = tuple(range(len(after)))
        else:
            dims = None
        for tensor in op.outputs:
            self.views[tensor] = View(view.draft, dims)

    def _join_layer(self, op: Operator) -> bool:
        """Add an operator to the layer that it follows, or add the layer of a residual sum.

        Returns:
            False if the operator is neither; nothing is changed then.
        """
        graph = self.graph
        active = graph.active_inputs(op)
        owners = list({id(d): d for t in active if (d := self._view(t).draft) is not None}.values())
        if not owners:
            return False
        elements = max(graph.elements(tensor) for tensor in active)
        if op.kind in ELEMENTWISE and graph.elements(op.output) == elements:
            if len(owners) > 1:
                return op.kind in SUMS and self._add_sum(op, active)
            return self._join_elementwise(op, owners[0], active)
        is_loss = owners[0].layer.kind == "loss" and len(owners) == 1
        if op.kind in ELEMENTWISE_LOSSES or is_loss or (len(owners) == 1 and self._is_row_reduction(op)):
            self._append_to_epilogue(op, owners[0], active)
            return True
        return False

    def _is_row_reduction(self, op: Operator) -> bool:
        """Return whether an operator reduces all dimensions of a tensor, or its rows but neither the batch nor the features."""
        if op.kind not in REDUCTIONS:
            return False
        shape, dims = self.graph.shapes[op.inputs[0]], self.graph.reduced_dims(op)
        view = self._view(op.inputs[0])
        if view.draft is not None and len(view.draft.layer.output_shape) == 3 and len(dims) < len(shape):
            return False
        return len(dims) == len(shape) or (
            view.has_features_last and self._has_features(view) and not {0, len(shape) - 1} & set(dims)
        )

    def _join_elementwise(self, op: Operator, owner: LayerDraft, active: Sequence[str]) -> bool:
        """Add an element-wise operator to a layer's epilogue; a sum with a table adds a layer instead."""
        tables = [tensor for tensor in op.inputs if tensor not in active and self._is_table(tensor, active[0])]
        if (
            len(active) == 1
            and tables
            and op.kind in SUMS - {"broadcast_sub"}
            and self._view(active[0]).has_features_last
        ):
            return self._add_sum(op, active)
        owner.variables += self._parameters(self.graph.learned_inputs(op), op.path)
        self._append_to_epilogue(op, owner, active)
        return True

    def _append_to_epilogue(self, op: Operator, owner: LayerDraft, active: Sequence[str]) -> None:
        """Append an operator to a layer's epilogue, and set the order of the dimensions of its outputs."""
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
        elif all(view.has_features_last for view in views):
            dims = tuple(range(len(graph.shapes[op.output])))
        else:
            dims = None
        for tensor in op.outputs:
            self.views[tensor] = View(owner, dims)

    def _is_table(self, tensor: str, active: str) -> bool:
        """Return whether a tensor has one element for each row and feature of an active tensor, so that it is not a bias.

        A raw tensor must have the whole shape; a learned one may have the shape of one sample.
        """
        graph = self.graph
        rows, features = graph.rows_and_features(active)
        if graph.is_raw(tensor):
            return graph.shapes[tensor] == graph.shapes[active]
        is_whole = graph.elements(tensor) in (rows * features, graph.elements(active))
        return graph.is_learned(tensor) and rows > 1 and is_whole

    def _add_sum(self, op: Operator, active: Sequence[str]) -> bool:
        """Add the layer of a residual sum, and a layer for each learned table that it adds.

        Returns:
            False if the operator is not such a sum; no layer is added then.
        """
        graph = self.graph
        sizes = {graph.elements(tensor) for tensor in active}
        if len(sizes) > 1 or any(not self._view(tensor).has_features_last for tensor in active):
            return False
        learned = graph.learned_inputs(op)
        tables = [tensor for tensor in learned if self._is_table(tensor, active[0])]
        if len(tables) < len(learned):
            return False
        sources: list[LayerDraft] = []
        for draft in self._source_layers(active):
            # A sum that only this sum reads becomes part of it (three tables, or parallel branches).
            if draft.layer.kind == "add" and draft.output in active and graph.sole_consumer(draft.output) is op:
                self.drafts.remove(draft)
                sources += draft.inputs
            else:
                sources.append(draft)
        sources += [self._add_position(tensor, active[0]) for tensor in tables]
        shape = graph.sample_shape(op.output)
        only_tables = all(draft.layer.kind in ("embedding", "position") for draft in sources)
        name = self._join(op.path, "embed" if only_tables else "add")
        self._add(LayerDraft(make.add("", shape), name, op.path, sources), op.output)
        return True

    def _add_position(self, table: str, active: str) -> LayerDraft:
        """Add and return the layer of a learned table that is added to every sample."""
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

    # ---- Opaque layers ----------------------------------------------------------------------------------------------

    def _add_opaque(self, operators: Sequence[Operator], output: str, description: str = "") -> None:
        """Add an opaque layer, which can be split along the batch only.

        An operator that follows an opaque layer of the same module becomes part of this layer instead.

        Args:
            operators: Operators of the layer, in execution order.
            output: Output tensor of the layer.
            description: What the notes call the operators.  Default: their kinds.
        """
        graph, op = self.graph, operators[-1]
        computed = {tensor for member in operators for tensor in member.outputs}
        active = list(dict.fromkeys(t for m in operators for t in graph.active_inputs(m) if t not in computed))
        learned = [t for member in operators for t in graph.learned_inputs(member)]
        variables = self._parameters(learned, op.path)
        inputs = self._source_layers(active)
        products = [count for member in operators if (count := flops(graph, member))]
        sample_flops = sum(products) / graph.batch
        intermediate = [t for m in operators for t in m.outputs if t != output and graph.has_batch(t)]
        kept = sum(graph.elements(tensor) for tensor in intermediate) // graph.batch
        if self._continues_opaque(op, inputs, active):
            draft = inputs[0]
            kept += draft.layer.output_elements
            draft.layer = replace(
                draft.layer,
                output_shape=graph.sample_shape(output),
                attributes=_with_products(draft.layer, len(products)),
                flops=draft.layer.flops + sample_flops,
                kept_elements=draft.layer.kept_elements + kept,
            )
            draft.variables += variables
        else:
            raw = [t for member in operators for t in member.inputs if graph.is_raw(t)]
            source = (active or raw or [output])[0]
            is_module = self._is_leaf(op.path)
            layer = make.opaque(
                "",
                graph.sample_shape(source),
                graph.sample_shape(output),
                flops=sample_flops,
                products=len(products),
                kept_elements=kept,
                modules=(op.path,) if is_module else (),
            )
            name = op.path if is_module else self._join(op.path, op.kind)
            draft = LayerDraft(layer, name, op.path, inputs, variables)
            self._add(draft)
        draft.kinds += [description] if description else [member.kind for member in operators]
        draft.mixes_samples |= any(self._mixes_samples(member) for member in operators)
        for tensor in graph.results_of(operators):
            self.views[tensor] = self._output_view(draft, tensor)

    def _mixes_samples(self, op: Operator) -> bool:
        """Return whether an operator is known to mix samples: it reduces the batch, or is a batch norm in training mode."""
        if op.kind in REDUCTIONS and 0 in self.graph.reduced_dims(op):
            return True
        return bool(op.attributes.get("training")) and op.kind.startswith("normalization")

    def _continues_opaque(self, op: Operator, inputs: Sequence[LayerDraft], active: Sequence[str]) -> bool:
        """Return whether an operator is the only reader of an opaque layer of its own module."""
        return (
            len(inputs) == 1
            and inputs[0].layer.kind == "opaque"
            and inputs[0].path == op.path
            and self._is_leaf(op.path)
            and all(self.graph.sole_consumer(tensor) is not None for tensor in active)
        )


def _with_products(layer: Layer, products: int) -> dict[str, int]:
    """Return the attributes of an opaque layer after operators with further ``products`` have joined it."""
    total = layer.attributes.get("products", 0) + products
    return {**layer.attributes, "products": total} if total else dict(layer.attributes)


def _fused_name(names: Sequence[str]) -> str:
    """Return one name for fused layers.

    >>> _fused_name(["attn.query", "attn.key", "attn.value"])
    'attn.query+key+value'
    >>> _fused_name(["attn.query", "cross.key"])
    'attn.query+cross.key'
    """
    prefix = names[0].rpartition(".")[0]
    if all(name.rpartition(".")[0] == prefix for name in names):
        return ".".join(filter(None, [prefix, "+".join(name.rpartition(".")[2] for name in names)]))
    return "+".join(names)
