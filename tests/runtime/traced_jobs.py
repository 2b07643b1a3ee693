"""Jobs of `test_replay`: models of the benchmark on ranks, and single operators. Only ranks import this module."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.strategy import Strategy, data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.extraction import extract
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow

# Ranks load this file by its path, not as a part of a package.
sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import zoo_models

flow: Any = load_oneflow()


class KeyGroups(flow.nn.Module):
    """Two query heads for each key, a mask of the input, a bias with a column per head, and a dropout of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.table = flow.nn.Embedding(20, 32)
        self.q, self.k, self.v = flow.nn.Linear(32, 32), flow.nn.Linear(32, 16), flow.nn.Linear(32, 16)
        self.o = flow.nn.Linear(32, 20)
        self.bias = flow.nn.Parameter(flow.randn(23, 4))
        self.register_buffer("distances", flow.arange(12)[:, None] - flow.arange(12)[None] + 11)
        self.drop = flow.nn.Dropout(0.2)

    def forward(self, tokens: Any, labels: Any) -> Any:
        h = self.table(tokens)
        q = self.q(h).reshape(-1, 12, 4, 8).transpose(1, 2)
        k, v = (part.reshape(-1, 12, 2, 8).transpose(1, 2) for part in (self.k(h), self.v(h)))
        k, v = (part.unsqueeze(2).expand(-1, 2, 2, 12, 8).reshape(-1, 4, 12, 8) for part in (k, v))
        scores = flow.matmul(q, k.transpose(-2, -1)) / 3 + self.bias[self.distances].permute(2, 0, 1)
        scores = scores.masked_fill((tokens == 0)[:, None, None, :], -1e9)
        y = flow.matmul(self.drop(flow.softmax(scores, dim=-1)), v).transpose(1, 2).reshape(-1, 12, 32)
        return flow.nn.functional.cross_entropy(self.o(y).reshape(-1, 20), labels.reshape(-1))


def key_groups() -> tuple[Any, Any]:
    tokens = flow.randint(0, 20, (8, 12))
    return KeyGroups(), (tokens, tokens)


class Turned(flow.nn.Module):
    """Positions turn neighbours of half the features of a head, by angles of the forward pass; keys of two query heads."""

    def __init__(self) -> None:
        super().__init__()
        self.table = flow.nn.Embedding(20, 32)
        self.q, self.o = (flow.nn.Linear(32, 32) for _ in range(2))
        self.k, self.v = (flow.nn.Linear(32, 16) for _ in range(2))
        self.register_buffer("frequencies", 300.0 ** (-flow.arange(0, 4, 2).float() / 4))

    def turn(self, x: Any) -> Any:
        angles = flow.arange(12).float().unsqueeze(1) * self.frequencies
        pairs = x[..., :4].reshape(*x.shape[:-1], 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = flow.stack([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
        return flow.cat([turned.reshape(*x.shape[:-1], 4), x[..., 4:]], dim=-1)

    def forward(self, tokens: Any, labels: Any) -> Any:
        h = self.table(tokens)
        q = self.q(h).reshape(-1, 12, 4, 8).transpose(1, 2)
        k, v = (part.reshape(-1, 12, 2, 8).transpose(1, 2) for part in (self.k(h), self.v(h)))
        q, k = self.turn(q), self.turn(k)
        k, v = (flow.repeat_interleave(part, 2, dim=1) for part in (k, v))
        scores = self.hide(flow.matmul(q, k.transpose(-2, -1)) / 8**0.5, tokens)
        y = flow.matmul(flow.softmax(scores, dim=-1), v).transpose(1, 2).reshape(-1, 12, 32)
        return flow.nn.functional.cross_entropy(self.o(y).reshape(-1, 32), labels.reshape(-1))

    def hide(self, scores: Any, tokens: Any) -> Any:
        return scores


class TurnedWithMask(Turned):
    """The same with a mask of padding."""

    def hide(self, scores: Any, tokens: Any) -> Any:
        return scores.masked_fill((tokens == 0)[:, None, None, :], -1e9)


def turned() -> tuple[Any, Any]:
    return Turned(), (flow.randint(0, 20, (8, 12)), flow.randint(0, 20, (8, 12)))


def turned_with_mask() -> tuple[Any, Any]:
    return TurnedWithMask(), turned()[1]


class Across(flow.nn.Module):
    """Queries of 7 rows, keys of 12, a mask of both, and a dropout of probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.table = flow.nn.Embedding(20, 32)
        self.q, self.k, self.v, self.o = (flow.nn.Linear(32, 32) for _ in range(4))
        self.drop = flow.nn.Dropout(0.2)

    def forward(self, source: Any, target: Any, labels: Any) -> Any:
        x, y = self.table(target), self.table(source)
        q = self.q(x).reshape(-1, 7, 4, 8).transpose(1, 2)
        k, v = (part(y).reshape(-1, 12, 4, 8).transpose(1, 2) for part in (self.k, self.v))
        scores = flow.matmul(q, k.transpose(-2, -1)) / math.sqrt(8)
        is_hidden = ((source == 0)[:, None] | (source[:, None] == target[:, :, None]))[:, None]
        scores = scores.masked_fill(is_hidden, -1e9)
        y = flow.matmul(self.drop(flow.softmax(scores, dim=-1)), v).transpose(1, 2).reshape(-1, 7, 32)
        return flow.nn.functional.cross_entropy((x + self.o(y)).reshape(-1, 32), labels.reshape(-1))


def across() -> tuple[Any, Any]:
    return Across(), (flow.randint(0, 20, (8, 12)), *(flow.randint(0, 20, (8, 7)) for _ in range(2)))


class Gated(flow.nn.Module):
    """Gates that are the first or the last half of a product, gates of two products, and products that are no gates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.both, self.scaled = (flow.nn.Linear(16, 32) for _ in range(4))
        self.gate, self.up, self.end = (flow.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Any, y: Any) -> Any:
        functional = flow.nn.functional
        a, b = self.first(x).chunk(2, dim=-1)
        x = x + functional.silu(a) * b
        a, b = self.last(x).chunk(2, dim=-1)
        x = x + a * functional.gelu(b)
        a, b = self.both(x).chunk(2, dim=-1)
        x = x + flow.tanh(a) * flow.sigmoid(b)
        a, b = self.scaled(x).chunk(2, dim=-1)
        x = x + a * (0.3 * b)
        x = x + self.up(x) * flow.sigmoid(self.gate(x))
        return functional.mse_loss(self.end(x), y)


def gated() -> tuple[Any, Any]:
    return Gated(), (flow.randn(8, 6, 16), flow.randn(8, 6, 16))


class Ties(flow.nn.Module):
    """Layers that have the weight of one other layer and the bias of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (flow.nn.Linear(16, 16) for _ in range(3))
        self.norm, self.norm_2, self.norm_3 = (flow.nn.LayerNorm(16) for _ in range(3))
        self.last = flow.nn.Linear(16, 3)
        self.third.weight, self.third.bias = self.first.weight, self.second.bias
        self.norm_3.weight, self.norm_3.bias = self.norm.weight, self.norm_2.bias

    def forward(self, x: Any, labels: Any) -> Any:
        for layer, norm in ((self.first, self.norm), (self.second, self.norm_2), (self.third, self.norm_3)):
            x = norm(flow.relu(layer(x)))
        return flow.nn.functional.cross_entropy(self.last(x).reshape(-1, 3), labels.reshape(-1))


class StackedGRU(flow.nn.Module):
    """Two layers in both directions with a dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.o = flow.nn.Embedding(20, 16), flow.nn.Linear(24, 20)
        self.gru = flow.nn.GRU(16, 12, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True)

    def forward(self, tokens: Any, labels: Any) -> Any:
        return flow.nn.functional.cross_entropy(
            self.o(self.gru(self.table(tokens))[0]).reshape(-1, 20), labels.reshape(-1)
        )


def stacked_gru() -> tuple[Any, Any]:
    return StackedGRU(), tuple(flow.randint(0, 20, (8, 5)) for _ in range(2))


class NormsByHand(flow.nn.Module):
    """A layer norm and an RMS norm that no module says eps of, and one that divides by an unbiased deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = flow.nn.Linear(16, 16), flow.nn.Linear(16, 3)
        self.eps = 1e-6  # of none of them
        for name in "abcde":
            setattr(self, name, flow.nn.Parameter(flow.rand(16) + 0.5))

    def forward(self, x: Any, labels: Any) -> Any:
        x = self.first(x) / 8
        centred = x - x.mean(-1, keepdim=True)
        x = x + self.a * centred / flow.sqrt((centred * centred).mean(-1, keepdim=True) + 1e-2) + self.b
        x = x + x * flow.rsqrt((x * x).mean(-1, keepdim=True) + 1e-1) * self.c
        x = x + self.d * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-2) + self.e
        return flow.nn.functional.cross_entropy(self.last(x).reshape(-1, 3), labels.reshape(-1))


class RowNorms(flow.nn.Module):
    """Batch norms of all rows of all samples, as LeViT has them after its products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = flow.nn.Linear(16, 16), flow.nn.Linear(16, 3)
        self.norm = flow.nn.BatchNorm1d(16)

    def forward(self, x: Any, labels: Any) -> Any:
        y = self.first(x)
        y = x + self.norm(y.flatten(0, 1)).reshape(y.shape)
        return flow.nn.functional.cross_entropy(self.last(y).reshape(-1, 3), labels.reshape(-1))


def row_norms() -> tuple[Any, Any]:
    return RowNorms(), (flow.randn(8, 6, 16), flow.randint(0, 3, (8, 6)))


OWN_MODELS = {
    "ties": lambda: (Ties(), row_norms()[1]),
    "stacked_gru": stacked_gru,
    "norms_by_hand": lambda: (NormsByHand(), row_norms()[1]),
    "row_norms": row_norms,
    "gated": gated,
    "across": across,
    "key_groups": key_groups,
    "turned": turned,
    "turned_with_mask": turned_with_mask,
    "windows_with_dropout": lambda: zoo_models.swin(attn_drop_rate=0.2),
}


def compared(names: list[str], is_by_features: bool = False) -> dict[str, str]:
    """Compare losses (or outputs) and gradients with those of the plain models; return the differences.

    Args:
        names: The models.
        is_by_features: Whether layers are split along their features or heads where they can be, not along the batch.
    """
    differences = {}
    for name in names:
        flow.manual_seed(0)  # the same model and examples on every rank
        make = OWN_MODELS.get(name) or getattr(zoo_models, name)
        differences[name] = _difference(*make(), is_by_features=is_by_features)
    return differences


def _difference(module: Any, inputs: Any, is_by_features: bool) -> str:
    graph = extract(module, inputs)
    size = flow.env.get_world_size()
    strategies = {layer.name: data_parallel((size,)) for layer in graph.layers}
    if is_by_features:
        tied = [(layer.name, p.tied_to) for layer in graph.layers for p in layer.parameters if p.tied_to]
        shared = {name for names in tied for name in names}
        by_features = Strategy(((1, size, 1),))
        strategies |= {
            layer.name: by_features
            for layer in graph.layers
            # A table and a product that share a weight are not divided in the same way.
            if by_features.divides(layer) and (layer.kind == "attention" or layer.name not in shared)
        }
    divided = [layer for layer in graph.layers if layer.kind == "attention" and strategies[layer.name].p1 == size]
    if is_by_features and not divided:
        return "no attention is divided by heads"
    workload = Workload(len(inputs[0]), len(inputs[0]), "float32")
    applied = AppliedModule(module, graph, strategies, workload, check=True)
    rng = np.random.default_rng(0)
    try:
        values = applied(*(_shuffled(x.numpy(), rng) for x in inputs))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    values = values if isinstance(values, tuple) else (values,)
    return "" if all(np.isfinite(value.detach().numpy()).all() for value in values) else "not finite"


def _shuffled(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The samples in another order, the same on every rank."""
    return np.ascontiguousarray(x[rng.permutation(len(x))])


# ---- Single operators --------------------------------------------------------------------------------------------------------


class Operator(flow.nn.Module):
    """A function of a parameter times the input, and of integers."""

    def __init__(self, function: Any, shape: tuple[int, ...]):
        super().__init__()
        self.scale = flow.nn.Parameter(flow.rand(*shape[1:]) + 0.5)
        self.function = function

    def forward(self, x: Any, places: Any) -> Any:
        y = self.function(x * self.scale, places)
        return (y * y).mean() if y.ndim else y


def replayed(function: Any, shape: tuple[int, ...]) -> str:
    """Replay the operators of a function on one rank, and return how loss or gradient differ from the function's."""
    module = Operator(function, (1, *shape))
    graph = extract(module, (flow.rand(2, *shape), flow.zeros(2, shape[0], dtype=flow.int64)))
    strategies = {layer.name: data_parallel((1,)) for layer in graph.layers}
    applied = AppliedModule(module, graph, strategies, Workload(4, 4, "float32"), check=True)
    rng = np.random.default_rng(0)
    data = rng.random((4, *shape)).astype(np.float32) + 0.2, rng.integers(0, 6, (4, shape[0]))
    # The first pass compares the two on as few samples as possible; here on all of them.
    applied.train(False)
    module.train(False)
    try:
        loss = applied(*data)
    except UserError as error:
        return str(error)
    expected = module(*map(flow.tensor, data))
    loss.backward()
    expected.backward()
    (gradient,) = applied.logical_gradients().values()
    errors = [
        np.abs(actual - wanted).max() / max(np.abs(wanted).max(), 1e-6)
        for actual, wanted in ((loss.numpy(), expected.numpy()), (gradient, module.scale.grad.numpy()))
    ]
    return "" if max(errors) < 1e-4 else f"off by {max(errors):.1e}"


def refusals(module: Any, examples: Any, batches: list[Any]) -> list[str]:
    """Return the errors that an applied module on one rank has for batches."""
    graph = extract(module, examples)
    strategies = {layer.name: data_parallel((1,)) for layer in graph.layers}
    applied = AppliedModule(module, graph, strategies, Workload(4, 4, "float32"))
    words = []
    for batch in batches:
        try:
            applied(*batch)
        except UserError as error:
            words.append(str(error))
    return words


def main() -> None:
    """Print what differs in each of the operator cases, as one JSON line."""
    import operator_cases

    found = {}
    for table, shape in (("ROWS", (6, 8)), ("IMAGES", (6, 8, 8))):
        for name, function in getattr(operator_cases, table).items():
            found[f"{table} {name}"] = replayed(function, shape)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
