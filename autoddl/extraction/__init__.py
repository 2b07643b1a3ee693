"""From an unmodified OneFlow module to its layer graph.

:func:`extract` traces a module lazily (nothing executes) and gathers its operators into layers; :func:`extract_from_file`
does so for ``FILE.py:FUNCTION``, and for models far larger than memory.  Both need OneFlow, which is imported when they are
called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

__all__ = ["extract", "extract_from_file"]


def extract(module: Any, inputs: Sequence[Any], *, name: str = "") -> LayerGraph:
    """The layer graph of ``module(*inputs)``.

    What is not understood becomes a layer of kind ``opaque``, which can be split along the batch only, and is named in
    the graph's notes.

    Args:
        module: any ``oneflow.nn.Module`` of local tensors; its mode (training or evaluation) is kept.
        inputs: example tensors (or one), the batch as their first dimension.  Those that do not begin with the first one's
            batch are taken as constants, with a note.
        name: of the graph; by default the class of the module.

    Raises:
        UserError: OneFlow is not there, the module cannot be traced, or it holds nothing that depends on its inputs and
            its parameters.
    """
    from .gather import gather
    from .trace import trace

    if not isinstance(inputs, (tuple, list)):
        inputs = (inputs,)
    name = name or type(module).__name__
    return gather(trace(module, inputs), name)


def extract_from_file(text: str) -> LayerGraph:
    """The layer graph of the module that ``FILE.py:FUNCTION`` returns with its example inputs.

    Raises:
        UserError: as for :func:`extract`; or there is no such file or function, it raises, or returns something else.
    """
    from .userfile import load_model

    module, inputs = load_model(text)
    try:
        return extract(module, inputs)
    except UserError as error:
        raise UserError(f"{text}: {error}") from error
