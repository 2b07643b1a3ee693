"""Extracts the layer graph of an unmodified OneFlow module.

:func:`extract` traces a module lazily (no operator executes) and groups the traced operators into layers.
:func:`extract_from_file` does the same for the module that ``FILE.py:FUNCTION`` returns, even if its parameters are far larger
than memory.  Both functions import OneFlow when they are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

__all__ = ["extract", "extract_from_file"]


def extract(module: Any, inputs: Sequence[Any], *, name: str = "") -> LayerGraph:
    """Return the layer graph of ``module(*inputs)``.

    Operators that match no known kind of layer become layers of kind ``opaque``, which can be split along the batch only.  The
    notes of the graph name these layers.

    Args:
        module: Any ``oneflow.nn.Module`` of local tensors.  Its mode (training or evaluation) is not changed.
        inputs: Example tensors, or a single one.  Their first dimension is the batch.  A tensor whose first dimension differs
            from that of the first tensor is taken as a constant, and a note says so.
        name: Name of the graph.  Default: the name of the module's class.

    Raises:
        UserError: If OneFlow is not installed, the module cannot be traced, or no operator depends on both its inputs and its
            parameters.
    """
    from .gather import gather
    from .trace import trace

    if not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    name = name or type(module).__name__
    return gather(trace(module, inputs), name)


def extract_from_file(text: str) -> LayerGraph:
    """Return the layer graph of the module and the example inputs that a user's function returns.

    Args:
        text: ``FILE.py:FUNCTION``.

    Raises:
        UserError: If :func:`extract` raises it, the file or the function does not exist, or the function raises or returns
            anything but a module and example inputs.
    """
    from .userfile import load_model

    module, inputs = load_model(text)
    try:
        return extract(module, inputs)
    except UserError as error:
        raise UserError(f"{text}: {error}") from error
