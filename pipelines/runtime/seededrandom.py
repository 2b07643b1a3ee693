"""The user's model on one device with the random numbers that the ranks of a plan draw (:mod:`randomness`).

Inside of :func:`seeded_random`, dropouts and the functions ``rand``, ``randn``, ``randint``, ``normal`` and ``bernoulli`` return
these numbers in place of those of OneFlow's generators. Recurrent modules draw inside of OneFlow's functions; there they run layer
by layer, with such dropouts between.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.graph import LayerGraph

from .load import load_oneflow
from .randomness import normal_at, stream_name, uniform_at
from .replay.operators import RANDOM

flow: Any = load_oneflow()

__all__ = ["has_named_random", "random_places", "seeded_random"]

Tensor = Any


def has_named_random(graph: LayerGraph) -> bool:
    """Return whether the random numbers of all dropouts of a graph have names: it was traced."""
    return all(
        len(layer.dropouts) >= layer.epilogue.count("dropout") + (layer.mask_bytes > 0 and layer.kind == "attention")
        for layer in graph.layers
    )


def random_places(graph: LayerGraph) -> dict[str, tuple[int, ...]]:
    """Return where the samples lie in the results of the random operators of programs, by the name of the operator."""
    programs = (program for layer in graph.layers for program in layer.programs)
    calls = [call for program in programs for call in program.calls if call.kind in RANDOM]
    return {call.attributes["stream"]: tuple(call.attributes["place"]) for call in calls}


@contextlib.contextmanager
def seeded_random(module: Any, places: Mapping[str, tuple[int, ...]], steps: Sequence[int | None]) -> Iterator[None]:
    """Let a module draw the numbers of a plan while the context is active.

    Args:
        module: The user's model.
        places: Where the samples lie in the results of random operators, see `random_places`. In the others they are the first
            dimension.
        steps: Numbers of the training passes that the samples of a call belong to, the same number of samples each.
    """
    numbers = _SeededNumbers(places, steps)
    modules = [(path, part, vars(part).get("forward")) for path, part in module.named_modules()]
    for path, part, _ in modules:
        object.__setattr__(part, "forward", functools.partial(numbers.call, path, part, part.forward))
    functions = numbers.functions()
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in functions]
    for owner, name, function in functions:
        setattr(owner, name, function)
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
        for _, part, forward in modules:
            if forward is None:
                del part.__dict__["forward"]
            else:
                object.__setattr__(part, "forward", forward)


class _SeededNumbers:
    """Draws numbers for the operators of a model; the arguments are those of `seeded_random`."""

    def __init__(self, places: Mapping[str, tuple[int, ...]], steps: Sequence[int | None]):
        self._steps, self._places = steps, places
        self._paths: list[str] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    def call(self, path: str, part: Any, forward: Any, *args: Any, **options: Any) -> Any:
        """Run the forward pass of a module; a dropout draws here."""
        if not path:
            self._counts.clear()
        self._paths.append(path)
        try:
            if isinstance(part, flow.nn.Dropout):
                return self.dropout(args[0], part.p, part.training)
            return forward(*args, **options)
        finally:
            self._paths.pop()

    def functions(self) -> list[tuple[Any, str, Any]]:
        """Return the functions that draw, with the modules that have them and their names there."""
        found = []
        for owner in (flow, flow._C, flow.nn.functional):
            for name in ("dropout", "bernoulli", "rand", "randn", "normal", "randint"):
                if hasattr(owner, name):
                    found.append((owner, name, getattr(self, name)))
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            found.append((flow._C, name, functools.partial(self.recurrent, getattr(flow._C, name))))
        return found

    # ---- The functions -----------------------------------------------------------------------------------------------

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
        drawn = self._drawn("dropout", tuple(x.shape))
        if not training or p == 0:
            return x
        kept = (drawn >= p).astype(np.float32) * (1.0 / (1.0 - p))
        return x * flow.tensor(kept, dtype=x.dtype, device=x.device)

    def recurrent(self, function: Any, x: Tensor, states: Any, *arguments: Any) -> Any:
        """Run recurrent layers; the arguments are those of OneFlow's functions, which have others for packed sequences."""
        if len(arguments) != 7:
            return function(x, states, *arguments)
        weights, has_biases, num_layers, dropout, training, is_bidirectional, is_batch_first = arguments
        if num_layers == 1 or not dropout or not training:
            return function(x, states, *arguments)
        x = x.transpose(0, 1) if is_batch_first else x
        every, size, each = _listed(states), 1 + is_bidirectional, len(weights) // num_layers
        ends = []
        for layer in range(num_layers):
            own = [state[layer * size : (layer + 1) * size] for state in every]
            x, *end = function(
                x,
                own if isinstance(states, (list, tuple)) else own[0],
                weights[layer * each : (layer + 1) * each],
                *(has_biases, 1, 0.0, training, is_bidirectional, False),
            )
            ends.append(end)
            x = self.dropout(x, dropout) if layer + 1 < num_layers else x
        return (x.transpose(0, 1) if is_batch_first else x, *(flow.cat(parts, dim=0) for parts in zip(*ends)))

    def bernoulli(self, x: Tensor, p: float | None = None, **_: Any) -> Tensor:
        drawn = flow.tensor(self._drawn("bernoulli", tuple(x.shape)), dtype=x.dtype, device=x.device)
        return (drawn < (x if p is None else p)).to(x.dtype)

    def rand(self, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        return flow.tensor(self._drawn("uniform", _shape(size)), dtype=dtype or flow.float32, device=device)

    def randn(self, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        drawn = self._drawn("normal", _shape(size), normal_at)
        return flow.tensor(drawn, dtype=dtype or flow.float32, device=device)

    def normal(self, mean: float, std: float, *size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
        drawn = mean + std * self._drawn("normal", _shape(size), normal_at)
        return flow.tensor(drawn, dtype=dtype or flow.float32, device=device)

    def randint(self, low: int, high: Any = None, size: Any = None, **options: Any) -> Tensor:
        if size is None:
            low, high, size = 0, low, high
        drawn = np.floor(low + (high - low) * self._drawn("uniform_int", _shape((size,))))
        return flow.tensor(drawn.astype(np.int64), device=options.get("device"))

    def _drawn(self, kind: str, shape: tuple[int, ...], draw: Any = uniform_at) -> np.ndarray:
        path = self._paths[-1] if self._paths else ""
        stream = stream_name(path, kind, self._counts[path, kind])
        self._counts[path, kind] += 1
        place = self._places.get(stream, (0, 1))
        if not place:
            return draw(np.arange(prod(shape)).reshape(shape), stream, self._steps[0])
        dim, outer = place
        before = prod(shape[:dim]) * outer
        width = prod(shape) // before // len(self._steps)
        index = np.arange(before * width).reshape(before, width)
        return np.concatenate([draw(index, stream, step) for step in self._steps], axis=1).reshape(shape)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _shape(size: Sequence[Any]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, flow.Size)) else tuple(size)
