"""Dropout on the ranks.

On CPU ranks, whether an element is dropped depends on the element, on the name of the dropout and on the number of the pass
(:mod:`randomness`): the same elements are dropped whatever the plan, and when recomputation repeats a forward pass. On GPUs, every
rank draws for its own elements with the generator of its device, which is much faster; its seed depends on the rank.

A layer graph of a traced model has the names of the dropouts, which contain the paths of their modules. Without them, the
probability is searched for in the module of the layer, then in the enclosing modules, innermost first. If all ``nn.Dropout``
modules inside one of them agree, their probability is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of

from .backend import is_on_gpu
from .comm.layouts import Layout
from .facts import find_module
from .load import load_oneflow
from .randomness import uniform_at
from .stepping import Ranks

flow = load_oneflow()

__all__ = ["Dropout", "apply_dropout", "bind_dropout", "check_dropouts", "dropout_of"]

Tensor = Any


class Dropout:
    """Sets elements to zero with ``probability``, and divides the others by ``1 - probability``.

    Args:
        probability: Probability of dropping an element.
        stream: Name of the dropout, which its random numbers depend on.
    """

    def __init__(self, probability: float, stream: str):
        self.probability = probability
        self._stream = stream
        self._generators: dict[str, Any] = {}  # by type of device

    def __call__(self, x: Tensor, step: int | None, rank: int, index: Callable[[], np.ndarray]) -> Tensor:
        """Apply the dropout of training pass ``step``. Return ``x`` if ``step`` is None, which means evaluation.

        Args:
            x: This rank's part of the tensor.
            step: Number of the training pass.
            rank: The rank.
            index: Returns the index of each element of ``x`` in the tensor of all samples.
        """
        if step is None or self.probability == 0:
            return x
        if is_on_gpu(x):
            return flow._C.dropout(x, self.probability, True, False, self._generator(x, step, rank), addend=None)
        kept = uniform_at(index(), self._stream, step).reshape(tuple(x.shape)) >= self.probability
        scale = kept.astype(np.float32) * (1.0 / (1.0 - self.probability))
        return x * flow.tensor(scale, dtype=x.dtype, device=x.device)

    def _generator(self, x: Tensor, step: int, rank: int) -> Any:
        device = x.device.type
        if device not in self._generators:
            self._generators[device] = flow.Generator(device=device)
        seed = crc32(f"{self._stream} {rank}".encode())
        self._generators[device].manual_seed((seed + 1_000_003 * step) % 2**31)
        return self._generators[device]


def apply_dropout(
    x: Tensor,
    dropout: Dropout,
    step: int | None,
    ranks: Ranks,
    layout: Layout,
    samples: int,
    shape: tuple[int, ...],
    is_mirrored: bool = False,
) -> Tensor:
    """Apply a dropout to the elements of this rank.

    Args:
        x: This rank's part of a layer's output.
        dropout: The dropout.
        step: Number of the training pass.
        ranks: The ranks.
        layout: Distribution of the output.
        samples: Samples of all ranks.
        shape: Shape of a sample of the output: (rows, features).
        is_mirrored: Whether rows are in mirrored order.
    """

    def index() -> np.ndarray:
        rows = shape[0] if len(shape) == 2 else 1
        columns = layout.blocks(shape[-1])[ranks.rank]
        return np.add.outer(_own_rows(layout, samples, rows, ranks.rank, is_mirrored) * shape[-1], columns)

    return dropout(x, step, ranks.rank, index)


def _own_rows(layout: Layout, samples: int, rows: int, rank: int, is_mirrored: bool) -> np.ndarray:
    """Return the numbers of a rank's rows, counted over all samples: (samples, rows)."""
    numbers = np.arange(samples * rows).reshape(samples, rows)
    return layout.part_of_rows(numbers, rank, rows, is_mirrored)[:, :, 0]


def bind_dropout(
    dropout: Dropout,
    step: int | None,
    ranks: Ranks,
    layout: Layout,
    samples: int,
    rows: int,
    heads: int,
    windows: int = 1,
    key_rows: int | None = None,
) -> Callable[[Tensor, np.ndarray, np.ndarray], Tensor]:
    """Return the dropout of attention as a function of the probabilities, and of the positions of queries and keys.

    Args:
        dropout, step, ranks, layout, samples: As those of `apply_dropout`.
        rows: Positions per sample.
        heads: Query heads of all ranks.
        windows: Number of windows of positions that attend to themselves alone.
        key_rows: Rows of keys per sample; None: as many as positions.
    """
    num_queries, num_keys = rows // windows, (key_rows or rows) // windows

    def drop(x: Tensor, queries: np.ndarray, keys: np.ndarray) -> Tensor:
        def index() -> np.ndarray:
            own = np.unique(_own_rows(layout, samples, rows, ranks.rank, False)[:, 0] // rows)
            of_window = np.add.outer(own * windows, np.arange(windows)) * heads
            matrices = np.add.outer(of_window, layout.blocks(heads)[ranks.rank]).reshape(-1)
            return np.add.outer(np.add.outer(matrices * num_queries, queries) * num_keys, keys)

        return dropout(x, step, ranks.rank, index)

    return drop


def dropout_of(model: Any, path: str, layer: str, number: int, stream: str = "") -> Dropout:
    """Make a dropout of a layer, with the probability that the model has for it.

    Args:
        model: The user's model.
        path: Path of the layer's module.
        layer: Name of the layer.
        number: Index of the dropout in the layer.
        stream: Name of the dropout in a traced model, which begins with the path of its module.

    Raises:
        UserError: The ``nn.Dropout`` modules of the model do not determine the probability.
    """
    if stream:
        own = find_module(model, stream.rsplit(" ", 2)[0])
        if own is None or not hasattr(own, "p"):
            raise UserError(f"the model has no nn.Dropout {stream.rsplit(' ', 2)[0]}: it was made for another model")
        return Dropout(float(own.p), stream)
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = find_module(model, ".".join(names[:end]))
        if module is None:
            continue
        found = {name: m.p for name, m in module.named_modules() if isinstance(m, flow.nn.Dropout)}
        if len(set(found.values())) == 1:
            return Dropout(float(next(iter(found.values()))), f"{layer} {number}")
        if found:
            probabilities = ", ".join(f"{name} ({p:g})" for name, p in sorted(found.items()))
            raise UserError(f"the probability of its dropout is ambiguous: {probabilities}; they should be equal")
    raise UserError("it has a dropout, but no nn.Dropout of the model gives its probability")


def check_dropouts(module: Any, graph: LayerGraph) -> None:
    """Check that the graph contains dropouts if the model does.

    Raises:
        UserError: The model has dropouts, and the graph has none.
    """
    if any("dropout" in layer.epilogue or kind_of(layer.kind).drops_elements(layer) for layer in graph.layers):
        return
    if any(layer.programs for layer in graph.layers):
        return  # the graph was traced, with the dropouts that the model had
    opaque = tuple(path for layer in graph.layers if kind_of(layer.kind).is_opaque for path in layer.modules)
    for path, part in module.named_modules():
        if isinstance(part, flow.nn.Dropout) and part.p > 0 and not path.startswith(opaque or ("\0",)):
            raise UserError(
                f"the plan was made without dropout, but {path} has p = {part.p}: plan this model again, or set p to 0"
            )
