"""Element-wise operators that ranks compute after a layer, by name."""

from __future__ import annotations

from autoddl.pipelines.runtime.statements import EPILOGUES

from .operators import Operator

__all__ = ["epilogue_name", "is_plain_activation"]

#: Names of operators in an epilogue, by OneFlow's operator name, if the two differ.
_NAMES = {"fast_gelu": "gelu", "sigmoid_v2": "sigmoid"}
#: Attributes of operators that ranks do not know with other values.
_PLAIN_ATTRIBUTES = {"elu": {"alpha": 1.0}, "softplus": {"beta": 1.0, "threshold": 20.0}}
#: Element-wise operators of layers without a product, such as losses.
_NO_ACTIVATIONS = frozenset({"square", "abs", "exp", "identity"})


def epilogue_name(kind: str) -> str:
    """Return the name of an operator in an epilogue."""
    return _NAMES.get(kind, kind)


def is_plain_activation(op: Operator) -> bool:
    """Return whether ranks know an operator of one tensor by its name alone."""
    name = epilogue_name(op.kind)
    plain = _PLAIN_ATTRIBUTES.get(op.kind, {})
    return name in EPILOGUES and name not in _NO_ACTIVATIONS and plain == {key: op.attributes.get(key) for key in plain}
