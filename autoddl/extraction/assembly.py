"""State of the pass that groups operators into layers: the layers so far, and the layer that holds each tensor's elements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoddl.costmodel.kinds.kind import Splitting
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.program import Scaled

from .drafts import LayerDraft
from .operators import Operator, OperatorGraph
from .samples import Samples

__all__ = ["Assembly"]


class Assembly:
    """Collects the drafts of layers, in topological order.

    The output of a layer has its samples first, then rows, and features last. A tensor in the table `owners` has the same elements
    in the same order, apart from the place of the samples.
    """

    def __init__(self, graph: OperatorGraph, samples: Samples, mixed: frozenset[str] = frozenset()):
        self.graph, self.samples = graph, samples
        #: Parameters that layers of kinds share which cannot share weights: programs read them.
        self.mixed = mixed
        self.drafts: list[LayerDraft] = []
        #: By tensor name: the layer whose output holds the elements of the tensor. Raw and fixed tensors have no entry.
        self.owners: dict[str, LayerDraft] = {}
        #: By operator name: why no layer of a kind with more strategies describes it.
        self.reasons: dict[str, str] = {}

    # ---- Layers -----------------------------------------------------------------------------------------------------------

    def _add(self, draft: LayerDraft, *tensors: str) -> None:
        """Append a layer; ``tensors`` are its outputs."""
        self.drafts.append(draft)
        draft.output = tensors[0] if tensors else ""
        self.owners.update((tensor, draft) for tensor in tensors)

    def _is_split(self, op: Operator) -> bool:
        """Return whether the results of an operator belong to single samples."""
        return self.samples.contexts[op.name] != "whole" and op.name not in self.samples.summed

    def _has_rows(self, tensor: str) -> bool:
        """Return whether a tensor is rows of features: its samples are in another dimension than the last one."""
        state, dims = self.samples.states[tensor], self.graph.dims[tensor]
        return state.kind == "split" and 0 <= state.dim < len(dims) - 1

    def _has_images(self, tensor: str) -> bool:
        """Return whether a tensor is one image for each sample: (samples, channels, height, width)."""
        state, dims = self.samples.states[tensor], self.graph.dims[tensor]
        return state.kind == "split" and state.dim == 0 and len(dims) == 4 and dims[0] == Scaled(1)

    @staticmethod
    def _has_features(draft: LayerDraft) -> bool:
        """Return whether the layer's output can be split along its features."""
        return kind_of(draft.layer.kind).splitting is not Splitting.SAMPLES

    def _is_leaf(self, path: str) -> bool:
        return bool(path) and path in self.graph.leaves

    @staticmethod
    def _join(path: str, name: str) -> str:
        return f"{path}.{name}" if path else name

    # ---- Parameters -------------------------------------------------------------------------------------------------------

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

    def _is_parameter(self, tensor: str, shape: Sequence[int] | None = None) -> bool:
        """Return whether a learned tensor is a parameter as it is, of a shape if one is given."""
        variable = self.graph.variables.get(tensor)
        return (
            variable is not None and variable.trained and shape in (None, variable.shape) and tensor not in self.mixed
        )

    # ---- Sources ----------------------------------------------------------------------------------------------------------

    def _sources(self, tensors: Sequence[str]) -> list[str]:
        """Return the active tensors among some, each once."""
        return list(dict.fromkeys(tensor for tensor in tensors if self.graph.is_active(tensor)))

    def _feed(self, tensors: Sequence[str]) -> str:
        """Return the raw tensor that a layer without active sources reads."""
        if any(self.graph.is_active(tensor) for tensor in tensors):
            return ""
        return next((tensor for tensor in tensors if self.graph.is_raw(tensor)), "")
