"""A transformer's profile without a measurement: its layers are priced by the cluster's device model.

The planners ask for the times of a number of samples on one device (:meth:`.Profile.times`), and the layers are priced for just
that number: kernel launches and the efficiency of small products do not grow with the batch, so that times are not linear in
it.

Per layer with hidden size h, a heads of h/a, s tokens per sequence and b sequences on the device, in fp32 (or half precision if
the device's default is mixed precision):

- forward: the four linear layers (h -> 3h, h -> h, h -> 4h, 4h -> h) and the two products of the attention (2 b s^2 h FLOP
  each), at the cluster's speed for products of that size, and the element-wise kernels, each of which reads and writes b s h
  numbers or (the first two) b a s^2: softmax, its dropout, twice dropout, residual sum (reads two) and normalisation, and the
  activation of 4 h; backward: twice that;
- parameters: 12 h^2 + 13 h; output: b s h elements;
- kept for the backward (Korthikanti et al., "Reducing activation recomputation in large transformer models"): s b h (34 + 5 a s
  / h) bytes in half precision; in fp32, with elements twice as large but masks unchanged, s b h (66 + 9 a s / h).

An embedding (tokens and positions) comes before the layers, and a head (an untied product h -> vocabulary) after them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.limits import MAX_PROFILE_LAYERS
from autoddl.costmodel.precision import precision_of

from ..profile import Profile, ProfiledLayer
from .workload import PlannerError

__all__ = ["transformer_profile"]

BERT_VOCABULARY = 30_522


def transformer_profile(
    cluster: Cluster,
    num_layers: int,
    hidden: int,
    sequence: int,
    *,
    heads: int | None = None,
    vocabulary: int = BERT_VOCABULARY,
    micro_batch: int = 1,
    name: str | None = None,
) -> Profile:
    """The profile of ``num_layers`` equal layers on the cluster's device (formulas: module's docstring).

    Args:
        cluster: whose device prices the layers.
        num_layers: number of transformer layers.
        hidden: hidden size h.
        sequence: tokens per sequence s.
        heads: attention heads a; by default one per 64 of ``hidden``.
        vocabulary: number of tokens of the vocabulary.
        micro_batch: sequences b that the bytes and times of the profile's layers are given for. It does not matter to planners:
            :meth:`.Profile.times` prices the layers for the number of sequences that is asked for.
        name: of the profile; by default made of the sizes.

    Raises:
        PlannerError: a size is below 1.
    """
    for what, value in (
        ("layers", num_layers),
        ("hidden size", hidden),
        ("sequence", sequence),
        ("micro-batch", micro_batch),
    ):
        if value < 1:
            raise PlannerError(f"{what} of a transformer is {value}, should be at least 1")
    if num_layers + 2 > MAX_PROFILE_LAYERS:  # with the embedding and the head
        raise PlannerError(f"layers of a transformer are {num_layers:,}, should be at most {MAX_PROFILE_LAYERS - 2:,}")
    sizes = _Sizes(num_layers, hidden, sequence, heads or max(1, hidden // 64), vocabulary)
    layers = tuple(_layers(cluster, sizes, micro_batch))
    return Profile(
        name=name or f"transformer:{num_layers}x{hidden}x{sequence}",
        micro_batch=micro_batch,
        layers=layers,
        edges=tuple((i, i + 1) for i in range(len(layers) - 1)),
        price=lambda samples: [(layer.forward_s, layer.backward_s) for layer in _layers(cluster, sizes, samples)],
    )


class _Sizes(NamedTuple):
    """The sizes of a transformer, as of :func:`transformer_profile`."""

    num_layers: int
    hidden: int
    sequence: int
    heads: int
    vocabulary: int


def _layers(cluster: Cluster, sizes: _Sizes, samples: float) -> Iterator[ProfiledLayer]:
    """The layers, priced for ``samples`` sequences on one device (formulas: module's docstring)."""
    num_layers, hidden, sequence, heads, vocabulary = sizes
    precision = cluster.default_precision
    itemsize = precision_of(precision).itemsize
    tokens = samples * sequence

    def product(k: int, n: int) -> float:
        return cluster.matmul_time(tokens, k, n, precision, itemsize)

    linears = product(hidden, 3 * hidden) + product(hidden, hidden) + 2 * product(hidden, 4 * hidden)
    scores = heads * sequence
    # Numbers per token that each element-wise kernel reads and writes.
    kernels = (2 * scores, 2 * scores, *(2 * hidden, 3 * hidden, 2 * hidden) * 2, 8 * hidden)
    element_wise = sum(cluster.elementwise_time(tokens * numbers * itemsize) for numbers in kernels)
    forward = linears + 2 * product(hidden, sequence) + element_wise
    output = tokens * hidden * itemsize
    per_element, per_score = (34, 5) if itemsize == 2 else (66, 9)
    stored = tokens * (per_element * hidden + per_score * scores)
    parameters = (12 * hidden * hidden + 13 * hidden) * itemsize
    lookup = cluster.elementwise_time(2 * output)
    head = product(hidden, vocabulary)
    yield ProfiledLayer("embedding", lookup, lookup, output, (vocabulary + sequence) * hidden * itemsize, output)
    for i in range(num_layers):
        yield ProfiledLayer(f"layer_{i}", forward, 2 * forward, output, parameters, stored)
    head_parameters = (vocabulary * (hidden + 1) + hidden * hidden + hidden) * itemsize
    yield ProfiledLayer("head", head, 2 * head, tokens * vocabulary * itemsize, head_parameters)
