"""A transformer's profile without a measurement: its layers are priced by the cluster's device model.

Per layer with hidden size h, a heads of h/a, s tokens per sequence and b sequences, in fp32 (or half precision if the device's
default is mixed precision):

- forward: the four linear layers (h -> 3h, h -> h, h -> 4h, 4h -> h) and the two products of the attention (2 b s^2 h FLOP each),
  at the cluster's speed for products of that size; backward: twice that;
- parameters: 12 h^2 + 13 h; output: b s h elements;
- kept for the backward (Korthikanti et al., "Reducing activation recomputation in large transformer models"):
  s b h (34 + 5 a s / h) bytes in half precision; in fp32, with elements twice as large but masks unchanged,
  s b h (66 + 9 a s / h).

An embedding (tokens and positions) comes before the layers, and a head (an untied product h -> vocabulary) after them.
"""

from __future__ import annotations

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
        micro_batch: sequences per micro-batch b.
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
    precision = cluster.default_precision
    itemsize = precision_of(precision).itemsize
    heads = heads or max(1, hidden // 64)
    tokens = micro_batch * sequence

    def product(k: int, n: int) -> float:
        return cluster.matmul_time(tokens, k, n, precision, itemsize)

    linears = product(hidden, 3 * hidden) + product(hidden, hidden) + 2 * product(hidden, 4 * hidden)
    forward = linears + 2 * product(hidden, sequence)
    output = tokens * hidden * itemsize
    per_element, per_score = (34, 5) if itemsize == 2 else (66, 9)
    stored = tokens * (per_element * hidden + per_score * heads * sequence)
    parameters = (12 * hidden * hidden + 13 * hidden) * itemsize
    lookup = cluster.elementwise_time(2 * output)
    head = product(hidden, vocabulary)
    layers = [
        ProfiledLayer("embedding", lookup, lookup, output, (vocabulary + sequence) * hidden * itemsize, output),
        *(ProfiledLayer(f"layer_{i}", forward, 2 * forward, output, parameters, stored) for i in range(num_layers)),
        ProfiledLayer(
            "head",
            head,
            2 * head,
            tokens * vocabulary * itemsize,
            (vocabulary * (hidden + 1) + hidden * hidden + hidden) * itemsize,
        ),
    ]
    title = name or f"transformer:{num_layers}x{hidden}x{sequence}"
    return Profile.chain(title, micro_batch, layers)
