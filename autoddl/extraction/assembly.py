"""State of the pass that groups operators into layers: the layers so far, and the layer that holds each tensor's elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of

from ..zoo import layers as make
from .drafts import LayerDraft, View
from .operators import OperatorGraph

__all__ = ["Assembly"]


class Assembly:
    """Collects the drafts of layers, in topological order."""

    def __init__(self, graph: OperatorGraph):
        self.graph = graph
        self.drafts: list[LayerDraft] = []
        #: By tensor name: which layer's output holds the elements of the tensor.  Raw tensors have no entry.
        self.views: dict[str, View] = {}

    # ---- Layers and views ---------------------------------------------------------------------------------------------

    def _add(self, draft: LayerDraft, *tensors: str) -> None:
        """Append a layer; ``tensors`` are its outputs, with their features last."""
        self.drafts.append(draft)
        draft.output = tensors[0] if tensors else ""
        for tensor in tensors:
            self.views[tensor] = self._output_view(draft, tensor)

    def _output_view(self, draft: LayerDraft, tensor: str) -> View:
        return View(draft, tuple(range(len(self.graph.shapes[tensor]))))

    def _view(self, tensor: str) -> View:
        return self.views.get(tensor, View(None, None))

    @staticmethod
    def _has_features(view: View) -> bool:
        """Return whether the layer's output can be split along its features."""
        return view.draft is not None and kind_of(view.draft.layer.kind).splitting is not Splitting.SAMPLES

    def _is_leaf(self, path: str) -> bool:
        return bool(path) and path in self.graph.leaves

    @staticmethod
    def _join(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name

    def _parameters(self, tensors: Iterable[str], path: str) -> list[tuple[str, str]]:
        """Return the parameters that learned tensors depend on, as pairs of variable and name in the module at ``path``."""
        variables = dict.fromkeys(v for tensor in tensors for v in self.graph.trained_variables(tensor))
        return [(variable, self._parameter_name(variable, path)) for variable in variables]

    def _parameter_name(self, variable: str, path: str) -> str:
        """Return the name of a parameter in the module at ``path``, or its first name if that module does not have it."""
        aliases = self.graph.aliases.get(variable, ())
        for holder, attribute in aliases:
            if holder == path:
                return self._join(holder, attribute)
        return self._join(*aliases[0]) if aliases else self.graph.variables[variable].name

    def _source_layers(self, tensors: Sequence[str]) -> list[LayerDraft]:
        """Return the layers whose outputs hold the tensors, each once.

        If the features of a tensor are not its last dimension, a layer that reorders the elements is added and returned.
        """
        owners: dict[int, LayerDraft] = {}
        for tensor in tensors:
            view = self._view(tensor)
            if not view.has_features_last:
                view = self._add_reordering(tensor, view)
            if view.draft is not None:
                owners.setdefault(id(view.draft), view.draft)
        return list(owners.values())

    def _add_reordering(self, tensor: str, view: View) -> View:
        """Add an opaque layer that puts the elements of a view in order, and return the view of its output."""
        assert view.draft is not None
        op = self.graph.producer[tensor]
        shape = self.graph.sample_shape(tensor)
        layer = make.opaque("", shape, shape, modules=())
        layer = replace(layer, input_shape=view.draft.layer.output_shape)
        draft = LayerDraft(layer, self._join(op.path, op.kind), op.path, [view.draft], kinds=[op.kind])
        self._add(draft, tensor)
        return self.views[tensor]
