"""Costs of redistributions between canonical layouts, for all pairs of layouts at once.

The cost of a redistribution is affine in the bytes of the tensor, and the same for all tensors that divide into its digits.  So
the routes between all pairs of layouts are planned once, and one table of (fixed, per byte) serves all edges of all models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .cluster import Cluster
from .collectives import ADJOINT, Collective, Step
from .distribution import Axis, RowsAndFeatures, canonical, is_tiled, row_slices
from .errors import UserError
from .exchange import Exchange, exchange_between
from .redistribution import Redistribution, Route, redistribute
from .workload import Workload

__all__ = ["LayoutPrices", "communication_time"]

#: (seconds, seconds per byte) forward, the same backward, and the divisors of the tensor's rows, features and columns.
_Price = tuple[float, float, float, float, int, int, int]


def communication_time(cluster: Cluster, steps_: Sequence[Step]) -> float:
    """Total seconds of steps that run one after the other."""
    return sum(cluster.time(step) for step in steps_)


class LayoutPrices:
    """Costs of redistributions on one cluster, computed on demand and cached.

    Attributes:
        may_shrink: whether a redistribution priced so far may become cheaper with smaller micro-batches.  This happens if a tensor
            no longer divides into the digits of the collectives, and the exchange used instead costs less on these links.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.may_shrink = False
        self._tables: dict[object, np.ndarray] = {}
        self._known: dict[object, _Price] = {}
        self._collectives: dict[tuple[Collective, Axis], tuple[float, float]] = {}

    def costs(
        self,
        tensor: Sequence[int],
        sources: tuple[RowsAndFeatures, ...],
        targets: tuple[RowsAndFeatures, ...],
        workload: Workload,
        is_repeated: bool = False,
        hidden_passes: float = 0.0,
    ) -> np.ndarray:
        """Seconds per training step, forward and backward, between every pair of layouts; inf without a route.

        The arguments are those of :meth:`phases`, whether recomputation redistributes the tensor again, and the part of one
        backward pass that does not count (:class:`.overlap.Exposure`); the result has shape (sources, targets).
        """
        forward, backward = self.phases(tensor, sources, targets, workload)
        num = workload.num_micro_batches
        if hidden_passes:  # a difference of products would be undefined where there is no route
            return num * forward + (num - hidden_passes) * (backward + forward if is_repeated else backward)
        return num * (forward + backward + forward if is_repeated else forward + backward)

    def phases(
        self,
        tensor: Sequence[int],
        sources: tuple[RowsAndFeatures, ...],
        targets: tuple[RowsAndFeatures, ...],
        workload: Workload,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds per micro-batch of the forward and of the backward pass, between every pair of layouts; inf without a route.

        Args:
            tensor: (features of a whole sample's rows, features of a row that ranks may have alone, pixels of a row of images,
                elements per sample). The features differ for images, which are one row of all elements, or rows of a pixel's
                channels.
            sources, targets: layouts whose numbers of row slices divide the micro-batch, or its positions.

        Returns:
            Two arrays of shape (sources, targets).
        """
        whole_features, row_features, width, elements = tensor
        samples = workload.micro_batch
        table = self._table(sources, targets)
        prices = table[:, :, :4].copy()
        # Ranks that share the positions of a sample at one of the ends hold rows, not whole samples; or tiles, if they cut columns.
        slices = [np.array([row_slices(end) for end in ends]) for ends in (sources, targets)]
        is_shared = np.maximum.outer(*slices) > samples
        has_columns = np.logical_or.outer(*([is_tiled(end) for end in ends] for ends in (sources, targets)))
        rows = np.where(is_shared, samples * (elements // row_features), samples) // np.where(has_columns, width, 1)
        features = np.where(is_shared, row_features, whole_features)
        undivided = (
            (rows % table[:, :, 4] != 0)
            | (features % table[:, :, 5] != 0)
            | (has_columns & (width % table[:, :, 6] != 0))
        )
        for a, b in zip(*np.nonzero(undivided)):
            shape = (int(rows[a, b]), int(features[a, b]), width)
            prices[a, b] = self._price(sources[a], targets[b], shape[: 2 + int(has_columns[a, b])])[:4]
        nbytes = float(samples * elements * workload.itemsize)
        return prices[:, :, 0] + nbytes * prices[:, :, 1], prices[:, :, 2] + nbytes * prices[:, :, 3]

    def _table(self, sources: tuple[RowsAndFeatures, ...], targets: tuple[RowsAndFeatures, ...]) -> np.ndarray:
        """The cost for each pair of layouts (:meth:`_price`) of a tensor that divides into all digits."""
        if (sources, targets) not in self._tables:
            always = (self.cluster.num_devices**2,) * 3
            rows = [
                [self._price(source, target, always[: 2 + is_tiled(source, target)]) for target in targets]
                for source in sources
            ]
            self._tables[sources, targets] = np.array(rows)
        return self._tables[sources, targets]

    def _price(self, source: RowsAndFeatures, target: RowsAndFeatures, shape: tuple[int, ...]) -> _Price:
        """The price of a tensor of (rows, features), or (rows, features, columns) if columns are cut at one of the ends."""
        if source == target:
            return 0.0, 0.0, 0.0, 0.0, 1, 1, 1
        key = (source, target, *(math.gcd(length, self.cluster.num_devices**2) for length in shape))
        if key not in self._known:
            try:
                route = redistribute(canonical(source), canonical(target), shape)
            except UserError:
                self._known[key] = (math.inf, math.inf, math.inf, math.inf, 1, 1, 1)
            else:
                ways = [[self._affine(part, back) for part in route] for back in (False, True)]
                prices = [sum(price[which] for price in way) for way in ways for which in range(2)]
                parts = [math.lcm(*divisors) for divisors in zip(*(part.divisors for part in route))] + [1]
                self._known[key] = (prices[0], prices[1], prices[2], prices[3], parts[0], parts[1], parts[2])
                self._compare_exchange(route, prices[0] + prices[2], prices[1] + prices[3])
        return self._known[key]

    def _compare_exchange(self, route: Route, fixed: float, per_byte: float) -> None:
        """Set ``may_shrink`` if the exchange may be cheaper.  Smaller micro-batches mean at least twice as many passes."""
        num_dims = len(route[0].divisors)
        exchange = exchange_between(route[0].source, route[-1].target, num_dims) if len(route) > 1 else None
        if exchange is not None:
            ways = [self._affine(exchange, back) for back in (False, True)]
            its_fixed, its_per_byte = (sum(way[which] for way in ways) for which in range(2))
            self.may_shrink = self.may_shrink or 2 * its_fixed < fixed or its_per_byte < per_byte

    def _affine(self, part: Redistribution | Exchange, is_back: bool) -> tuple[float, float]:
        """(seconds, seconds per byte of the tensor) of a part of a route, forward or backward (``is_back``).

        The exchange's seconds per byte are read off a tensor of one byte.
        """
        if isinstance(part, Exchange):
            exchanged = [self.cluster.times(step.adjoint() if is_back else step) for step in part.steps(1.0)]
            return sum(latency for latency, _ in exchanged), sum(per_byte for _, per_byte in exchanged)
        sending = [
            (fraction, self._collective(ADJOINT[move.collective] if is_back else move.collective, move.axis))
            for move, fraction in zip(part.moves, part.fractions)
            if move.collective is not None
        ]
        return sum(latency for _, (latency, _) in sending), sum(
            fraction * slowness for fraction, (_, slowness) in sending
        )

    def _collective(self, collective: Collective, axis: Axis) -> tuple[float, float]:
        """(seconds, seconds per byte) of a collective along an axis: the parts of the time of one byte."""
        key = (collective, axis)
        if key not in self._collectives:
            self._collectives[key] = self.cluster.times(Step(collective, axis, 1.0))
        return self._collectives[key]
