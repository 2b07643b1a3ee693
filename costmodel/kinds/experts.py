"""Experts: gated MLPs of which a router chooses k for every token (Shazeer et al. 2017; GShard, Lepikhin et al., ICLR 2021).

The layer reads the tokens x of d features and the logits of a router, a linear layer d -> E in front of it.  Let s be the softmax
of the logits (or their sigmoids), T(x) the k largest of them, and w the shares of T(x), divided by their sum if they are
renormalised, times a constant factor:

    y(x) = sum over e in T(x) of  w_e  down_e (silu(gate_e x) * up_e x)          gate_e, up_e: (f, d), down_e: (d, f)

**Capacity.**  An expert has C slots for the tokens of one sample.  The first choices of all tokens, in their order, take slots
before the second choices do.  A choice without a slot is dropped: it adds nothing.  With a capacity factor c, an expert has
C = ceil(c k rows / E) slots: c is how much more the experts compute than tokens need if they were balanced.  C = rows drops none.
Samples are never split, so the same tokens are dropped on any number of devices, and all messages have fixed sizes.

**Strategies.**  Samples are split over p0, the features f inside the experts over p1, and the experts over e of the p0 ranks
(:mod:`autoddl.costmodel.strategy`); there are p0 / e copies.  With B samples on a rank, rows S, bytes a of an element, and n as in
:mod:`autoddl.costmodel.collectives`, the forward pass has the steps

===================================  =============  =======================  ====================
step                                 axis           n [bytes], e = 1         n [bytes], e > 1
===================================  =============  =======================  ====================
all-gather the logits                p1             B S E a                  B S E a
all-gather the input                 p1             B S d a                  -
all-to-all of the slots' tokens      e              -                        B E C d a / p1
all-gather the slots' tokens         p1             -                        B E C d a
reduce-scatter the slots' results    p1             -                        B E C d a
all-to-all of the slots' results     e              -                        B E C d a / p1
reduce-scatter the output            p1             B S d a                  -
===================================  =============  =======================  ====================

and the backward pass their adjoints.  On several network levels an all-to-all runs along one level after the other.  If experts
are divided, tokens travel between ranks with 1 / p1 of their features, before they are gathered.  If they are not, tokens are
gathered before they are copied to slots, k C times as many.

**Work.**  A sample takes 6 E C d f FLOPs in the forward pass, and twice as many in the backward pass.  The backward pass keeps the
slots' gathered tokens, the results of the three products, and the probabilities of the router.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from ..collectives import Collective, Step, gather_steps, scatter_steps
from ..layer import Layer, Parameter
from ..localwork import elementwise
from ..nearest import divisors
from ..sbp import Broadcast, PartialSum, Split
from .kind import Body, LayerKind, LayerQuantities, States

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..distribution import Axis
    from ..strategy import Strategy

__all__ = ["Experts", "capacity_of", "experts"]


class Experts(LayerKind):
    """Gated MLPs, of which logits choose some for every token."""

    name = "experts"
    attributes = ("experts", "per_token", "inner", "capacity", "renormalises")
    may_be_zero = frozenset({"renormalises", "sigmoid"})
    #: ``sigmoid``: shares are sigmoids, not a softmax.  ``scaling``: thousandths of the factor of the shares.  Of ``groups`` of
    #: experts, only those of the best ``groups_per_token`` can be chosen.
    optional_attributes = frozenset({"sigmoid", "scaling", "groups", "groups_per_token"})
    reads_data = False
    reads_order = True  # first choices of earlier tokens take slots first
    colour = "#e6d5f0"

    def shape_text(self, layer: Layer) -> str:
        attributes = layer.attributes
        return (
            f"{attributes['per_token']} of {attributes['experts']} experts, {layer.features} -> {attributes['inner']}"
        )

    def variants(self, layer: Layer, strategy: Strategy) -> Iterator[Strategy]:
        yield strategy
        for parts in product(*(divisors(p0) for p0, _, _ in strategy.splits)):
            if prod(parts) > 1:
                yield replace(strategy, experts=parts)

    def offers_choices(self, layer: Layer, strategy: Strategy) -> bool:
        parts = strategy.experts
        if not super().offers_choices(layer, replace(strategy, experts=())):
            return False
        return not parts or (
            len(parts) == len(strategy.splits)
            and strategy.expert_parts > 1
            and not any(split[0] % part for split, part in zip(strategy.splits, parts))
            and layer.attributes["experts"] % strategy.expert_parts == 0
        )

    def divides(self, layer: Layer, strategy: Strategy) -> bool:
        parts = strategy.p1 * strategy.p2
        attributes = layer.attributes
        return not (layer.features % parts or attributes["inner"] % parts or attributes["experts"] % parts)

    @property
    def states(self) -> tuple[States, States, States]:
        return (
            (Split(0), Broadcast(), Broadcast()),
            (Broadcast(), Split(1), Broadcast()),
            (Split(0), PartialSum(), Broadcast()),
        )

    def work(self, quantities: LayerQuantities, is_first: bool) -> Body:
        layer, strategy, itemsize = quantities.layer, quantities.strategy, quantities.itemsize
        num, features, inner = layer.attributes["experts"], layer.features, layer.attributes["inner"]
        parts, p1 = strategy.expert_parts, strategy.axes(1)
        tokens, samples = quantities.rows, quantities.samples / quantities.p0
        slots = samples * (num * layer.attributes["capacity"])
        logits_bytes = tokens * (num * itemsize)
        # The tokens that are copied to slots and back.
        moved_features = features if parts == 1 else features / quantities.p1
        slot_bytes, moved_bytes = slots * (features * itemsize), slots * moved_features * itemsize
        steps = _steps(
            p1, strategy.expert_axes(), logits_bytes, tokens * (features * itemsize), slot_bytes, moved_bytes
        )
        # Each rank has num / parts experts, with the slots of the samples of `parts` ranks.
        width, slots_of_one = inner / quantities.p1, slots * parts / num
        products = 2 * quantities.matmul(slots_of_one, features, width, num / parts) + quantities.matmul(
            slots_of_one, width, features, num / parts
        )
        inner_bytes = slots * width * itemsize
        picked_bytes = tokens * layer.attributes["per_token"] * moved_features * itemsize
        route = elementwise(3 * logits_bytes)
        copies = elementwise(2 * moved_bytes) + elementwise(2 * picked_bytes)
        after, after_backward = quantities.epilogue()
        return Body(
            forward=steps,
            backward=tuple(step.adjoint() for step in reversed(steps)),
            forward_work=products + elementwise(3 * inner_bytes) + route + copies + after,
            backward_work=2 * products + elementwise(5 * inner_bytes) + route + copies + copies + after_backward,
            kept_bytes=2 * logits_bytes + slot_bytes + 3 * inner_bytes + picked_bytes,
            buffer_bytes=2 * slot_bytes,
        )


def _steps(
    p1: Sequence[Axis], experts: Sequence[Axis], logits: Any, tokens: Any, slots: Any, moved: Any
) -> tuple[Step, ...]:
    """The steps of the forward pass, given the bytes of the logits, the tokens, the slots' tokens and those that move."""
    if not experts:
        return (*gather_steps(p1, logits), *gather_steps(p1, tokens), *scatter_steps(p1, tokens))
    exchange = tuple(Step(Collective.ALL_TO_ALL, axis, moved) for axis in experts)
    return (
        *gather_steps(p1, logits),
        *exchange,
        *gather_steps(p1, slots),
        *scatter_steps(p1, slots),
        *reversed(exchange),
    )


def capacity_of(factor: float, per_token: int, rows: int, num_experts: int) -> int:
    """The slots of an expert for a sample of ``rows`` tokens: ceil(factor k rows / E), at most one for each token.

    >>> capacity_of(1.25, 2, 4096, 8), capacity_of(8.0, 2, 16, 4)
    (1280, 16)
    """
    return min(rows, ceil(factor * per_token * rows / num_experts))


def experts(
    name: str,
    rows: int,
    features: int,
    inner: int,
    *,
    num: int,
    per_token: int,
    capacity: int,
    renormalises: bool = True,
    **options: int,
) -> Layer:
    """Make a layer of experts, which reads tokens (rows, features) and logits (rows, num).

    Args:
        name: of the layer and its module.
        rows, features: shape of a sample.
        inner: features inside an expert.
        num: number of experts.
        per_token: number of experts that every token chooses.
        capacity: slots of an expert for the tokens of a sample (:func:`capacity_of`).
        renormalises: whether the shares of the chosen experts sum to 1.
        options: the optional attributes of :class:`Experts`.
    """
    shapes = {
        "gate_proj": (num, inner, features),
        "up_proj": (num, inner, features),
        "down_proj": (num, features, inner),
    }
    return Layer(
        name=name,
        kind="experts",
        input_shape=(rows, features + num),
        output_shape=(rows, features),
        attributes={
            "experts": num,
            "per_token": per_token,
            "inner": inner,
            "capacity": capacity,
            "renormalises": int(renormalises),
            **options,
        },
        parameters=tuple(Parameter(f"{name}.{part}", shape) for part, shape in shapes.items()),
        flops=2.0 * capacity * sum(map(prod, shapes.values())),
        kept_elements=num * capacity * (features + 3 * inner),
        modules=(name,),
    )
