"""Groups the operators of a traced model into the layers of a layer graph.

1. Find the *regions*, groups of operators that are one layer each: modules of registered kinds, recurrent modules, norms, dense
   layers, attention cores, fused projections and gates, and the loss.
2. Visit the operators in execution order.  An operator outside of all regions is skipped if none of its outputs is active, or if
   it mixes samples.

   - The operator that ends a region adds the region's layer; the other operators of a region add nothing.
   - An embedding lookup, a convolution, a pooling or a batch norm adds a layer.
   - A view that keeps the order of the elements adds no layer.
   - A residual sum adds a layer of kind ``add``.
   - An element-wise operator that ranks know joins the epilogue of the layer whose output it reads.
   - Every other operator begins a program (:mod:`.programs`).
3. Join programs (:mod:`.clusters`), and return what the model returns.

Skipped operators become part of the programs that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer, LayerGraph
from autoddl.costmodel.kinds.epilogue import LOSSES
from autoddl.pipelines.runtime.facts import find_eps, rotary_base_of

from ..zoo import layers as make
from .activations import epilogue_name, is_plain_activation
from .assembly import Assembly
from .attention import AttentionRegion, find_attentions
from .dense import Dense, DenseGroup, find_dense, find_recurrent_calls, fuse_gates, fuse_projections
from .drafts import LayerDraft, MixedWeights
from .finishing import finish, where
from .images import image_layer_of, is_synchronised
from .losses import LossRegion, find_loss
from .norms import NormRegion, find_norms
from .operators import LOOKUPS, SUMS, Operator, OperatorGraph, lookup_arguments, stream_of
from .programs import MadeProgram, make_score_program
from .registered import RegisteredRegion, find_registered
from .rotary import rotary_attributes
from .samples import find_samples

__all__ = ["gather"]

#: Operators that keep the elements and their order.
_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims", "identity", "to_contiguous"})


def gather(graph: OperatorGraph, name: str) -> LayerGraph:
    """Return the layer graph of traced operators.

    Args:
        graph: The traced operators.
        name: Name of the layer graph.

    Raises:
        UserError: If no operator depends on both inputs and parameters, or if ranks cannot run an operator.
    """
    mixed: frozenset[str] = frozenset()
    while True:
        try:
            return _Gathering(graph, mixed).run(name)
        except MixedWeights as error:
            mixed |= error.variables  # gather again, with programs in place of the layers that share them


class _Gathering(Assembly):
    """One pass over the operators of a graph."""

    def __init__(self, graph: OperatorGraph, mixed: frozenset[str]):
        super().__init__(graph, find_samples(graph), mixed)
        #: Paths of the children of module lists and sequences.
        self.container_children = {child for children in graph.containers.values() for child in children}
        #: By operator name, for the operators of regions: adds the region's layer.  None if another operator of the region does.
        self.actions: dict[str, Callable[[], None] | None] = {}
        #: What changes the scores of attention cores, by their outputs.
        self.score_programs: dict[str, MadeProgram] = {}
        #: Names of the operators of recurrent modules.
        self.recurrent: set[str] = set()

    def run(self, name: str) -> LayerGraph:
        """Return the layer graph."""
        if not any(self.graph.is_active(tensor) for op in self.graph.operators for tensor in op.outputs):
            raise UserError(
                f"no operator of {name} depends on both its inputs and its parameters: there is nothing to plan"
            )
        # 1. Regions.
        self._find_regions()
        # 2. Layers, in execution order.
        for op in self.graph.operators:
            if op.name in self.actions:
                action = self.actions[op.name]
                if action is not None:
                    action()
            elif self._is_split(op) and any(self.graph.is_active(tensor) for tensor in op.outputs):
                self._add_operator(op)
        # 3. Programs and outputs.
        return finish(self, name, self.graph.notes)

    # ---- Regions ----------------------------------------------------------------------------------------------------

    def _find_regions(self) -> None:
        """Find all regions and assign an action to each of their operators."""
        graph = self.graph
        dense = [part for part in find_dense(graph) if self._is_known_product(part)]
        norms = [norm for norm in find_norms(graph) if self._is_known_norm(norm)]
        loops = find_recurrent_calls(graph, dense)
        registered = find_registered(graph)
        # Registered modules take precedence over all other regions, recurrent modules over dense layers and norms.
        registered_operators = {op.name for region in registered for op in region.operators}
        loops = [loop for loop in loops if registered_operators.isdisjoint(op.name for op in loop)]
        self.reasons |= {op.name: "it is a recurrent module" for loop in loops for op in loop}
        self.recurrent = {op.name for loop in loops for op in loop}
        assigned = registered_operators | {op.name for loop in loops for op in loop}
        dense = [part for part in dense if part.product.name not in assigned]
        norms = [norm for norm in norms if norm.operators[0].name not in assigned]
        # The norms of single heads are part of the attention core that contains them.
        head_norms = [norm for norm in norms if len(graph.shapes[norm.source]) > 3]
        ends = {part.output for part in dense} | {norm.output for norm in norms if norm not in head_norms}
        attentions = find_attentions(graph, ends, {op.name for norm in head_norms for op in norm.operators})
        attentions = [
            region
            for region in attentions
            if registered_operators.isdisjoint(op.name for op in region.operators)
            and self._is_known_attention(region, {part.output: part.source for part in dense})
        ]
        attention_operators = {op.name for region in attentions for op in region.operators}
        # Dense layers that are not fused are groups of one.
        groups = [*fuse_projections(graph, dense, attentions), *fuse_gates(graph, dense)]
        fused = {part.output for group in groups for part in group.parts}
        groups += [DenseGroup((part,)) for part in dense if part.output not in fused]
        # Later assignments replace earlier ones.
        for own_region in registered:
            self._assign(own_region.operators, own_region.output, partial(self._add_registered, own_region))
        for norm in norms:
            if attention_operators.isdisjoint(op.name for op in norm.operators):
                self._assign(norm.operators, norm.output, partial(self._add_norm, norm))
        for region in attentions:
            self._assign(region.operators, region.output, partial(self._add_attention, region))
        for group in groups:
            first = min((part.product for part in group.parts), key=lambda op: graph.position[op.name])
            members = [op for part in group.parts for op in part.operators]
            self._assign([*members, *group.gate], first.output, partial(self._add_dense, group))
        loss = find_loss(graph, self.samples)
        if loss is not None and not any(op.name in self.actions for op in loss.operators):
            self._assign(loss.operators, loss.first.output, partial(self._add_loss, loss))

    def _assign(self, operators: Sequence[Operator], tensor: str, action: Callable[[], None]) -> None:
        """Assign an action to the operator that computes ``tensor``, and no action to the others of the region."""
        for op in operators:
            self.actions[op.name] = action if tensor in op.outputs else None

    def _is_known_product(self, part: Dense) -> bool:
        """Return whether ranks have the product: its weight is a parameter, and its rows belong to single samples."""
        graph, samples = self.graph, self.samples
        if not all(self._is_split(op) for op in part.operators) or not self._has_rows(part.source):
            return False
        if part.product.kind == "fused_matmul_bias":
            return self._is_parameter(part.weight)
        is_stored = self._is_parameter(part.weight)
        if not is_stored:
            shared = "read by another part of the model, too" if part.weight in self.mixed else ""
            self.reasons[part.product.name] = f"its weight is {shared or 'computed'}"
        is_vector = not part.bias or self._is_parameter(part.bias, (part.out_features,))
        return is_stored and is_vector and samples.states[part.source].dim < len(graph.dims[part.source]) - 1

    def _is_known_norm(self, norm: NormRegion) -> bool:
        """Return whether ranks have the norm: it is one, and its vectors are parameters."""
        features = self.graph.shapes[norm.source][-1]
        are_vectors = bool(norm.learned) and all(self._is_parameter(tensor, (features,)) for tensor in norm.learned)
        if norm.reason:
            reason = norm.reason
        elif not are_vectors:
            reason = "its norm has no scale that is a parameter with an element for each feature"
        elif not self._has_rows(norm.source) or not all(map(self._is_split, norm.operators)):
            reason = "its norm has the samples along the features, or mixes samples"
        else:
            return True
        self.reasons |= {op.name: reason for op in norm.operators}
        return False

    def _is_known_attention(self, region: AttentionRegion, projected: Mapping[str, str]) -> bool:
        """Return whether ranks have the attention core; if not, its operators get the reason. ``projected`` says what each dense
        layer reads, by its output."""
        reason = region.reason
        read = {projected.get(tensor, tensor) for tensor in region.sources}
        if not reason and (len(region.sources), len(read)) not in ((1, 1), (3, 1), (3, 2), (3, 3)):
            reason = "it does not read queries, keys and values as one tensor, or as three"
        if not reason and region.key_rows != region.rows and len(region.sources) < 3:
            reason = "its keys are some of the rows that its queries are"
        if not reason and not all(self.samples.contexts[op.name] in ("split", "fixed") for op in region.operators):
            reason = "its attention mixes samples"
        if not reason and any(
            self.samples.states[tensor].dim != 0 or self.samples.states[tensor].outer != 1 for tensor in region.sources
        ):
            reason = "its attention does not have samples first"
        dropouts = [op for op in region.operators if op.kind == "dropout"]
        if not reason and (len(dropouts) > 1 or any(not self._is_dropout_module(op) for op in dropouts)):
            reason = "its attention has a dropout that is no module nn.Dropout"
        if not reason and region.changes is not None:
            made = make_score_program(self.graph, self.samples, region.changes, where)
            self.score_programs[region.output] = made
            if made.reads or any(True for _ in made.program.crossings):
                reason = "its attention has a mask that mixes samples"
        if reason:
            self.reasons |= {op.name: reason for op in region.operators}
        return not reason

    def _add_registered(self, region: RegisteredRegion) -> None:
        learned = [tensor for op in region.operators for tensor in self.graph.learned_inputs(op)]
        layer = replace(region.layer, name="", parameters=(), modules=(region.path,))
        sources, variables = self._sources(region.sources), self._parameters(learned, region.path)
        draft = LayerDraft(layer, region.path, region.path, sources, variables, feed=self._feed(region.sources))
        self._add(draft, region.output)

    def _add_norm(self, norm: NormRegion) -> None:
        first = norm.operators[0]
        rows, features = self.graph.rows_and_features(norm.source)
        is_module = self._is_leaf(first.path)
        layer = make.norm("", rows, features, statistics=norm.statistics)
        said = find_eps(self.graph.model, first.path)
        is_said = said is not None and math.isclose(said, norm.eps, rel_tol=1e-2)
        layer = replace(layer, modules=(first.path,), eps=None if is_said else norm.eps)
        name = first.path if is_module else self._join(first.path, "norm")
        variables = self._parameters(norm.learned, first.path)
        sources, feed = self._sources([norm.source]), self._feed([norm.source])
        self._add(LayerDraft(layer, name, first.path, sources, variables, feed=feed), norm.output)

    def _add_attention(self, region: AttentionRegion) -> None:
        graph = self.graph
        # A row of the sources has (heads + 2 kv_heads) * head_dim features.
        is_across = region.key_rows != region.rows
        features = sum(graph.elements(tensor) for tensor in region.sources) // (graph.batch * region.rows)
        kv_heads, rest = divmod(features - region.heads * region.head_dim, 2 * region.head_dim)
        if is_across:
            kv_heads = graph.elements(region.sources[1]) // (graph.batch * region.key_rows * region.head_dim)
            rest = 0
        if rest or kv_heads < 1 or region.heads % kv_heads:
            kv_heads = region.heads
        made = self.score_programs[region.output] if region.changes is not None else None
        layer = make.attention(
            "",
            region.rows,
            region.heads,
            region.head_dim,
            kv_heads=kv_heads,
            causal=region.causal is not False,
            key_rows=region.key_rows if is_across else None,
            windows=region.windows,
            changes=None if made is None else len(made.program.results),
            dropout=bool(region.dropout),
        )
        is_own_module = region.path and region.path not in self.container_children
        layer = replace(
            layer,
            input_shape=layer.input_shape if is_across else (region.rows, features),
            modules=(region.path,) if region.path else (),
            attributes={
                **layer.attributes,
                **({"interleaved": 1} if region.is_interleaved else {}),
                **rotary_attributes(region.rotary, region.head_dim, rotary_base_of(graph.model, region.path)),
            },
            scores=None if made is None else made.program,
        )
        learned = () if made is None else made.parameters
        variables = [(variable, self._parameter_name(variable, region.path)) for variable in learned]
        name = region.path if is_own_module else self._join(region.path, "attention")
        draft = LayerDraft(layer, name, region.path, self._sources(region.sources), variables)
        draft.streams += [stream_of(graph, op) for op in region.operators if op.kind == "dropout"]
        self._add(draft, region.output)

    def _add_dense(self, group: DenseGroup) -> None:
        first = group.parts[0]
        rows, in_features = self.graph.rows_and_features(first.source)
        names = [self._dense_name(part) for part in group.parts]
        out_features = sum(part.out_features for part in group.parts)
        epilogue = tuple(map(epilogue_name, group.activations)) + ((group.operation,) if group.output else ())
        layer = make.linear("", rows, in_features, out_features, epilogue=epilogue)
        if first.is_transposed:
            layer = replace(layer, attributes={**layer.attributes, "transposed": 1})
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
            sources=self._sources([first.source]),
            variables=variables,
            epilogue=[(operation, rows * layer.features) for operation in epilogue],
            feed=self._feed([first.source]),
        )
        self._add(draft, *(part.output for part in group.parts))
        if group.output:
            self.owners[group.output] = draft
            draft.output = group.output

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

    def _add_loss(self, region: LossRegion) -> None:
        """Add the cross entropy, or the error that ends the linear layer before it."""
        rows, vocabulary = self.graph.rows_and_features(region.source)
        path = region.first.path
        owner = self.owners.get(region.source)
        if region.error and owner is not None and owner.layer.kind == "linear" and not owner.epilogue_has(LOSSES):
            owner.epilogue.append((region.error, self.graph.elements(region.source) // self.graph.batch))
            self.owners[region.output] = owner
            return
        if region.error:
            self._add_program([region.first], region.first.output)
            for op in region.operators:
                del self.actions[op.name]
            return
        layer = make.loss("", rows, vocabulary)
        is_module = self._is_leaf(path)
        draft = LayerDraft(
            layer=replace(layer, modules=(path,) if is_module else ()),
            name=path if is_module else self._join(path, "loss"),
            path=path,
            sources=self._sources([region.source]),
        )
        self._add(draft, region.output)

    # ---- Single operators -------------------------------------------------------------------------------------------

    def _add_operator(self, op: Operator) -> None:
        """Add the layer of an operator outside of all regions, or add the operator to the layer that it follows."""
        if op.name in self.recurrent:
            self._add_program([op], op.output)
            return
        if op.kind in LOOKUPS and self._add_embedding(op):
            return
        found = image_layer_of(self.graph, op, self._has_images) if op.outputs else None
        if found is not None and all(self._is_parameter(tensor) for tensor in found.learned):
            draft = self._module_draft(op, found.layer, found.layer.kind, found.learned, [found.source])
            self._add(draft, op.output)
        elif not (self._is_alias(op) or self._add_sum(op) or self._join_epilogue(op)):
            self._add_program([op], op.output)

    def _add_embedding(self, op: Operator) -> bool:
        """Add the layer of a lookup in a table by raw indices; return False for other lookups."""
        graph = self.graph
        table, indices = lookup_arguments(op)
        module = graph.modules.get(op.path)
        options = (getattr(module, name, None) for name in ("padding_idx", "max_norm", "scale_grad_by_freq"))
        is_plain = module is not None and hasattr(module, "weight") and all(o is None or o is False for o in options)
        shape = graph.shapes[table]
        if not is_plain or not graph.is_raw(indices) or len(shape) != 2 or not self._is_parameter(table):
            return False
        if op.attributes.get("axis", 0) != 0 or self.samples.states[indices].kind != "split":
            return False
        layer = make.embedding("", graph.elements(indices) // graph.batch, *shape)
        self._add(self._module_draft(op, layer, "embedding", [table], [indices]), op.output)
        return True

    def _module_draft(
        self, op: Operator, layer: Layer, kind: str, learned: Sequence[str], sources: Sequence[str] = ()
    ) -> LayerDraft:
        """Return the draft of an operator; its name is the path of its module or, in a larger module, its kind."""
        is_module = self._is_leaf(op.path)
        return LayerDraft(
            layer=replace(layer, modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, kind),
            path=op.path,
            sources=self._sources(sources),
            variables=self._parameters(learned, op.path),
            feed=self._feed(sources),
        )

    def _is_alias(self, op: Operator) -> bool:
        """Take the output of a view for the output of the layer that it views, if it has the same rows of features.

        Returns:
            False if the view changes the order of elements, or their division into features.
        """
        graph = self.graph
        first = graph.producer.get(op.inputs[0]) if op.kind == "transpose" else None
        if first is not None and first.kind == "transpose" and self._is_undone(first, op):
            source = self.owners.get(first.inputs[0])
            if source is not None and not source.is_program:
                self.owners[op.output] = source
                return True
        owner = self.owners.get(op.inputs[0]) if op.inputs else None
        if owner is None or owner.is_program or not self._keeps_order(op):
            return False
        before, after = graph.shapes[op.inputs[0]], graph.shapes[op.output]
        if len(owner.layer.output_shape) == 3:
            keeps = before == after or len(after) == 2  # all elements of an image are one row
        else:
            keeps = before[-1:] == after[-1:] or (len(after) == 2 and not self._has_features(owner))
        if keeps:
            self.owners[op.output] = owner
        return keeps

    @staticmethod
    def _is_undone(first: Operator, second: Operator) -> bool:
        """Return whether the second of two transpositions undoes the first."""
        order = [first.attributes["perm"][dim] for dim in second.attributes["perm"]]
        return order == sorted(order)

    def _keeps_order(self, op: Operator) -> bool:
        if op.kind == "transpose":
            return tuple(op.attributes["perm"]) == tuple(range(len(op.attributes["perm"])))
        if op.kind == "cast":
            return self.graph.dims[op.inputs[0]] == self.graph.dims[op.output]
        return op.kind in _RESHAPES

    def _join_epilogue(self, op: Operator) -> bool:
        """Add an element-wise operator to the epilogue of the only layer that it reads; False if ranks cannot run it there."""
        graph = self.graph
        owner = self.owners.get(op.inputs[0])
        if len(op.inputs) == 2 and self._join_bias(op):
            return True
        if owner is None or len(op.inputs) != 1 or owner.is_program or owner.layer.kind in ("attention", "position"):
            return False
        if op.kind == "dropout":
            is_known = self._is_dropout_module(op) and len(owner.layer.output_shape) < 3
        else:
            is_known = is_plain_activation(op)
        # The operations of an epilogue follow each other, and nothing else reads the results between them.
        is_last = self._follows(owner, op.inputs[0])
        if not is_known or not is_last:
            return False
        owner.epilogue.append((epilogue_name(op.kind), graph.elements(op.output) // graph.batch))
        owner.streams += [stream_of(graph, op)] if op.kind == "dropout" else []
        self._take_over(owner, op)
        return True

    def _is_dropout_module(self, op: Operator) -> bool:
        return op.path in self.graph.leaves and hasattr(self.graph.modules.get(op.path), "p")

    def _follows(self, owner: LayerDraft, tensor: str) -> bool:
        """Return whether nothing but one operator reads a layer's output, as it is or in another shape."""
        graph = self.graph
        while True:
            if graph.sole_consumer(tensor) is None:
                return False
            if tensor == owner.output:
                return True
            tensor = graph.producer[tensor].inputs[0]
            if self.owners.get(tensor) is not owner:
                return False

    def _join_bias(self, op: Operator) -> bool:
        """Add the bias of a convolution to its layer."""
        graph = self.graph
        active = [tensor for tensor in op.inputs if tensor in self.owners]
        others = [tensor for tensor in op.inputs if tensor not in active]
        if len(active) != 1 or op.kind not in ("bias_add", "broadcast_add", "add_n"):
            return False
        owner = self.owners[active[0]]
        is_of_convolution = owner.layer.kind == "conv2d" and op.path == owner.path and not owner.epilogue
        if not is_of_convolution or not self._is_parameter(others[0], (owner.layer.attributes["out_channels"],)):
            return False
        if owner.output != active[0] or graph.sole_consumer(active[0]) is None:
            return False
        owner.variables += self._parameters(others, op.path)
        self._take_over(owner, op)
        return True

    def _take_over(self, owner: LayerDraft, op: Operator) -> None:
        """Take the result of an operator for the output of a layer."""
        self.owners[op.output] = owner
        owner.output = op.output

    def _add_sum(self, op: Operator) -> bool:
        """Add the layer of a residual sum, and a layer for each learned table that it adds; False for other operators."""
        graph = self.graph
        if op.kind not in SUMS - {"broadcast_sub"}:
            return False
        active = [tensor for tensor in op.inputs if tensor in self.owners]
        tables = [tensor for tensor in op.inputs if tensor not in active]
        dims, is_image = graph.dims[op.output], self._has_images(op.output)
        if any(graph.dims[tensor] != dims for tensor in active) or not (self._has_rows(op.output) or is_image):
            return False
        if (
            len(set(active)) < len(active)
            or not active
            or not all(self._is_table(tensor, op.output) for tensor in tables)
        ):
            return False
        shapes = {self.owners[tensor].layer.output_shape for tensor in active if not self.owners[tensor].is_program}
        images = {len(shape) == 3 for shape in shapes}
        if len(images) > 1 or len(active) + len(tables) < 2 or (tables and True in images):
            return False
        are_images = True in images or (not images and is_image and self._are_image_programs(active))
        further = [self._add_position(tensor, active[0]) for tensor in tables]
        sources: list[str] = []
        for tensor in active:
            draft = self.owners[tensor]
            # A sum that only this sum reads becomes part of it (three tables, or parallel branches).
            if draft.layer.kind == "add" and tensor == draft.output and graph.sole_consumer(tensor) is op:
                self.drafts.remove(draft)
                sources += draft.sources
                further = [*draft.further, *further]
            else:
                sources.append(tensor)
        shape = tuple(graph.shapes[op.output][1:]) if are_images else graph.rows_and_features(op.output)
        only_tables = all(self.owners[tensor].layer.kind == "embedding" for tensor in sources)
        name = self._join(op.path, "embed" if only_tables else "add")
        self._add(LayerDraft(make.add("", shape), name, op.path, sources, further=further), op.output)
        return True

    def _are_image_programs(self, tensors: Sequence[str]) -> bool:
        """Return whether programs compute images: a convolution or a batch norm is among their operators."""
        kinds = {kind for tensor in tensors for kind in self.owners[tensor].kinds}
        return bool(kinds & {"conv2d", "deconv2d", "normalization", "bias_add", "concat", "max_pool_2d"})

    def _is_table(self, tensor: str, total: str) -> bool:
        """Return whether a learned tensor is a table of positions: a parameter, or its first rows, added to every sample."""
        graph = self.graph
        rows, features = graph.rows_and_features(total)
        if not graph.is_learned(tensor) or graph.elements(tensor) != rows * features or rows < 2:
            return False
        variables = graph.trained_variables(tensor)
        if len(variables) != 1 or self.samples.states[total].outer != 1 or self.samples.states[total].dim != 0:
            return False
        shape = graph.variables[variables[0]].shape
        return shape[-1] == features and {op.kind for op in graph.ancestors(tensor)} <= _TABLE_OPERATORS

    def _add_position(self, table: str, active: str) -> LayerDraft:
        """Add and return the layer of a learned table that is added to every sample."""
        graph = self.graph
        op = graph.producer.get(table)
        variable = graph.trained_variables(table)[0]
        holder, attribute = graph.aliases.get(variable, ((op.path if op else "", "position"),))[0]
        rows, features = graph.rows_and_features(active)
        whole = graph.shapes[variable]
        positions = whole[-2] if len(whole) > 1 and whole[-1] == features else rows
        layer = make.position("", rows, max(positions, rows), features)
        name = holder if self._is_leaf(holder) else self._join(holder, attribute)
        draft = LayerDraft(replace(layer, modules=(name,)), name, holder, variables=self._parameters([table], holder))
        self._add(draft)
        return draft

    # ---- Programs ---------------------------------------------------------------------------------------------------

    def _add_program(self, operators: Sequence[Operator], output: str) -> None:
        """Begin a program."""
        op = operators[-1]
        is_module = self._is_leaf(op.path)
        draft = LayerDraft(
            layer=make.opaque("", (1,), (1,), modules=(op.path,) if is_module else ()),
            name=op.path if is_module else self._join(op.path, op.kind),
            path=op.path,
            kinds=[member.kind for member in operators],
            is_program=True,
            operators=list(operators),
            mixes_samples=any(
                member.kind == "normalization"
                and member.attributes.get("training")
                and not is_synchronised(self.graph.modules.get(member.path))
                for member in operators
            ),
        )
        self._add(draft, output, *(tensor for tensor in op.outputs if tensor != output))
        draft.output = output
        draft.results = [output]


#: Operators between a table of positions and its parameter.
_TABLE_OPERATORS = frozenset(
    {"gather", "embedding", "arange", "reshape", "expand_dims", "squeeze", "slice", "narrow", "expand", "cast"}
)


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
