"""Layers as modules of global tensors, for ``nn.Graph``. The graph executor runs them; exported files contain them as they are.

Every module is made for one mesh (`Mesh`) and computes on activations (samples, rows, features) of the layout ``ACTIVATIONS``:
samples are split over the mesh axis of the samples, features over that of the features. All layouts are said, of results and of
their gradients (``grad_sbp``): where they are left to OneFlow's compiler, it sends more, and some models abort the process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..load import load_oneflow

flow = load_oneflow()
nn: Any = flow.nn
functional = flow.nn.functional

__all__ = [
    "Attention",
    "Convolution",
    "CrossEntropy",
    "Embedding",
    "LayerNorm",
    "Linear",
    "Mesh",
    "Module",
    "Positions",
    "RMSNorm",
    "gather",
    "mean_difference",
    "move",
]

Tensor = Any
B, P, S0, S1, S2 = (
    *(flow.sbp.broadcast, flow.sbp.partial_sum),
    *(flow.sbp.split(0), flow.sbp.split(1), flow.sbp.split(2)),
)
#: Activations (samples, rows, features), as the arguments of `Mesh.sbp`.
ACTIVATIONS = (S0, S2)


class Mesh:
    """Ranks in one or two axes, each with a role: "samples" or "features".

    Args:
        placement: OneFlow's placement of the ranks.
        roles: Role of each axis.
    """

    def __init__(self, placement: Any, *roles: str):
        self.placement = placement
        self.roles = roles

    def sbp(self, samples: Any, features: Any) -> list[Any]:
        """Return an SBP signature: the states on the axis of the samples and on that of the features, as far as there are such."""
        return [samples if role == "samples" else features for role in self.roles]

    @property
    def splits_features(self) -> bool:
        """Whether there is an axis of features."""
        return "features" in self.roles

    def parameter(self, *shape: int, features: Any = B) -> Tensor:
        """Return a parameter of zeros with this state on the axis of the features; every sample's rank holds a copy."""
        sbp = self.sbp(B, features)
        return nn.Parameter(flow.zeros(*shape, dtype=flow.float32, placement=self.placement, sbp=sbp))

    def constant(self, values: np.ndarray) -> Tensor:
        """Return a tensor that every rank holds."""
        return flow.tensor(values, placement=self.placement, sbp=self.sbp(B, B))


def cast(x: Tensor, mesh: Mesh, after: Sequence[Any], gradient: Sequence[Any]) -> Tensor:
    """Bring a tensor to the layout ``after``, and its gradient to the layout ``gradient``; both as arguments of `Mesh.sbp`."""
    return x.to_global(sbp=mesh.sbp(*after), grad_sbp=mesh.sbp(*gradient))


def move(x: Tensor, source: Mesh, target: Mesh, samples: Any = S0) -> Tensor:
    """Change activations from one mesh to another. Tensors that belong to all samples have ``samples=B``."""
    return x.to_global(placement=target.placement, sbp=target.sbp(samples, S2), grad_sbp=source.sbp(samples, S2))


def gather(x: Tensor, mesh: Mesh) -> Tensor:
    """Gather the features: the input of products with split columns. The backward pass reduces and scatters the gradient."""
    return cast(x, mesh, (S0, B), ACTIVATIONS)


def summed(x: Tensor, mesh: Mesh) -> Tensor:
    """Sum partial sums over the axis of the features; their gradients too."""
    return cast(x, mesh, (S0, B), (S0, B))


def total(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum of all elements, on every rank. (OneFlow may hang if partial sums are used without this.)"""
    return cast(x.sum(), mesh, (B, B), (B, B))


class Module(nn.Module):
    """A layer on a mesh.

    Args:
        mesh: Mesh of the layer.
    """

    def __init__(self, mesh: Mesh):
        super().__init__()
        self.mesh = mesh


class Linear(Module):
    """x W' + b, with the weight W (out, in) split by columns (of W') or by rows over the axis of the features.

    By columns, the input is `gather`ed and the output is split. By rows, the input is split, and the output reduced and scattered.

    Args:
        mesh: Mesh of the layer.
        in_features: Columns of the weight.
        out_features: Rows of the weight.
        split: "columns", "rows", or "" if no axis splits features.
        bias: Whether there is a bias.
    """

    def __init__(self, mesh: Mesh, in_features: int, out_features: int, split: str, bias: bool = True):
        super().__init__(mesh)
        self.split = split
        self.weight = mesh.parameter(out_features, in_features, features={"columns": S0, "rows": S1}.get(split, B))
        self.bias = mesh.parameter(out_features, features=S0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = flow.matmul(x, self.weight, transpose_b=True)
        if self.split == "rows":
            x = cast(x, self.mesh, ACTIVATIONS, (S0, B))  # reduce-scatter; the gradient is gathered
        return x if self.bias is None else x + self.bias


class Embedding(Module):
    """Rows of a table (vocabulary, features), whose features (columns) or vocabulary (rows) are split."""

    def __init__(self, mesh: Mesh, vocabulary: int, features: int, split: str):
        super().__init__(mesh)
        self.split = split
        self.weight = mesh.parameter(vocabulary, features, features={"columns": S1, "rows": S0}.get(split, B))

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.embedding(tokens, self.weight)
        return cast(x, self.mesh, ACTIVATIONS, (S0, B)) if self.split == "rows" else x


class Positions(Module):
    """The first rows of a table, (1, rows, features), to be added to every sample."""

    def __init__(self, mesh: Mesh, positions: int, rows: int, features: int):
        super().__init__(mesh)
        self.rows = rows
        self.weight = mesh.parameter(positions, features, features=S1)

    def forward(self) -> Tensor:
        return self.weight[: self.rows].unsqueeze(0)


class LayerNorm(Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias. Ranks with a part of the features sum mean and variance."""

    def __init__(self, mesh: Mesh, features: int, eps: float = 1e-5, bias: bool = True):
        super().__init__(mesh)
        self.features, self.eps = features, eps
        self.weight = mesh.parameter(features, features=S0)
        self.bias = mesh.parameter(features, features=S0) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if not self.mesh.splits_features:
            return functional.layer_norm(x, (self.features,), self.weight, self.bias, self.eps)
        x = x - summed(x.sum(dim=-1, keepdim=True), self.mesh) / self.features
        variance = summed((x * x).sum(dim=-1, keepdim=True), self.mesh) / self.features
        x = x * flow.rsqrt(variance + self.eps) * self.weight
        return x if self.bias is None else x + self.bias


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight. Ranks with a part of the features sum the mean."""

    def __init__(self, mesh: Mesh, features: int, eps: float = 1e-6):
        super().__init__(mesh)
        self.features, self.eps = features, eps
        self.weight = mesh.parameter(features, features=S0)

    def forward(self, x: Tensor) -> Tensor:
        mean = summed((x * x).sum(dim=-1, keepdim=True), self.mesh) / self.features
        return x * flow.rsqrt(mean + self.eps) * self.weight


class Attention(Module):
    """softmax(q k' / sqrt(head_dim)) v. The axis of the features splits the heads.

    Args:
        mesh: Mesh of the layer.
        heads: Number of query heads.
        kv_heads: Number of key-value heads.
        rows: Sequence length.
        causal: Whether a position attends only to itself and to earlier ones.
        theta: Base of rotary positions; 0 without them.
        dropout: Probability of dropping an attention probability.
    """

    def __init__(
        self,
        mesh: Mesh,
        heads: int,
        kv_heads: int,
        rows: int,
        head_dim: int,
        causal: bool,
        theta: float = 0.0,
        dropout: float = 0.0,
    ):
        super().__init__(mesh)
        self.group_heads, self.kv_heads, self.head_dim = heads // kv_heads, kv_heads, head_dim
        self.dropout = nn.Dropout(dropout) if dropout else None
        self.has_rotary = theta > 0
        self.causal = causal
        if causal:  # added to the scores; the query heads of a group are stacked
            mask = np.triu(np.full((rows, rows), -np.inf, np.float32), 1)
            self.register_buffer("mask", mesh.constant(np.tile(mask, (heads // kv_heads, 1))))
        if theta:
            angles = np.outer(np.arange(rows), np.tile(theta ** (-np.arange(0, head_dim, 2) / head_dim), 2))
            self.register_buffer("cosine", mesh.constant(np.cos(angles).astype(np.float32)))
            self.register_buffer("sine", mesh.constant(np.sin(angles).astype(np.float32)))

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_dim / 2) of (samples, rows, ..., head_dim) by the angles of their positions."""
        half = self.head_dim // 2
        rotated = flow.cat([-x[..., half:], x[..., :half]], dim=-1)
        return x * self.cosine + rotated * self.sine

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        samples, rows, _ = query.shape
        groups, group_heads, head_dim = self.kv_heads, self.group_heads, self.head_dim
        query = query.reshape(samples, rows, groups, group_heads, head_dim).permute(0, 2, 3, 1, 4)
        key, value = (x.reshape(samples, rows, groups, head_dim).permute(0, 2, 1, 3) for x in (key, value))
        if self.has_rotary:
            query, key = self.rotate(query), self.rotate(key)
        query = query.reshape(samples, groups, group_heads * rows, head_dim)
        scores = flow.matmul(query, key, transpose_b=True) * (1.0 / math.sqrt(head_dim))
        if self.causal:
            scores = scores + self.mask
        probabilities = flow.softmax(scores, dim=-1)
        x = flow.matmul(probabilities if self.dropout is None else self.dropout(probabilities), value)
        x = x.reshape(samples, groups, group_heads, rows, head_dim).permute(0, 3, 1, 2, 4)
        return x.reshape(samples, rows, groups * group_heads * head_dim)


class CrossEntropy(Module):
    """The mean cross entropy of logits (samples, rows, vocabulary) over the targets that are not -100.

    OneFlow's operator knows split vocabularies: ranks exchange the maximum, the sum and the target's logit of each row.
    """

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        targets = targets.reshape(-1)
        counted = targets != -100
        logits = logits.reshape(len(targets), logits.shape[-1])
        losses = flow._C.sparse_softmax_cross_entropy(logits, targets * counted.to(targets.dtype))
        losses = cast(losses, self.mesh, (S0, B), (S0, B)) * counted.to(losses.dtype)
        return total(losses, self.mesh) / total(counted.to(losses.dtype), self.mesh)


class Convolution(Module):
    """A convolution of whole images, (samples, channels, height, width)."""

    def __init__(self, mesh: Mesh, shape: Sequence[int], bias: bool = True, **options: Any):
        super().__init__(mesh)
        self.options = options
        self.weight = mesh.parameter(*shape)
        self.bias = mesh.parameter(shape[0]) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weight, self.bias, **self.options)


def mean_difference(x: Tensor, targets: Tensor, mesh: Mesh, is_squared: bool) -> Tensor:
    """Return the mean squared (or absolute) difference between predictions and targets."""
    difference = x - targets
    errors = difference * difference if is_squared else flow.abs(difference)
    return total(errors, mesh) / float(np.prod(x.shape))
