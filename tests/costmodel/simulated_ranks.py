"""All ranks of a mesh in one process: an executor of redistributions that shares no code with the planner of their moves.

It knows of :mod:`autoddl.costmodel.redistribution` only what the docstring says.  Every rank's local tensor is kept as a *digit
array*: each tensor dimension becomes one array dimension per digit, plus one for what the digits leave.  A digit that a mesh axis
owns has length 1 on this rank (the value of the digit is the rank's coordinate on that axis), any other its full length::

    dimension of length 12, digits (2, 3), digit 0 owned:   local slice of 6  =  digit array (1, 3, 2)

Ranks see each other's data only through :class:`Network`, which counts; the collectives are written with messages as a real
runtime would send them (pairwise: p - 1 messages of 1/p of the data, which is also a ring's volume).

An exchange's pieces are cut out of what their senders hold by global index, and every element that arrives has to be new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod

import numpy as np

from autoddl.costmodel.collectives import ADJOINT, Collective
from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.redistribution import Digit, Holding, Move, Redistribution, Route
from autoddl.costmodel.sbp import Broadcast, PartialSum, SBPState, Split

Digits = tuple[tuple[int, ...], ...]


# ------------------------------------------------------------------------------------------- distributions and routes


def all_states(num_dims: int) -> tuple[SBPState, ...]:
    """Every state that an axis can give a tensor of ``num_dims`` dimensions."""
    return (*(Split(dim) for dim in range(num_dims)), Broadcast(), PartialSum())


def all_distributions(mesh: Sequence[int], num_dims: int) -> list[Distribution]:
    """Every distribution of a ``num_dims``-dimensional tensor on a one-level mesh, axes in rank order."""
    choices = product(all_states(num_dims), repeat=len(mesh))
    return [Distribution.on_mesh([list(zip(mesh, states))]) for states in choices]


def reversed_route(route: Route) -> Route:
    """The route of the gradient: the adjoint moves in reverse order, on the dual distributions."""
    return tuple(
        part.reversed() if isinstance(part, Exchange) else reversed_redistribution(part) for part in reversed(route)
    )


def reversed_redistribution(part: Redistribution) -> Redistribution:
    """The redistribution of the gradient: the adjoint moves in reverse order, on the dual distributions."""
    held = dict(part.holdings)
    moves = []
    for move in part.moves:
        held.update({atom: after for atom, _, after in move.parts})
        parts = tuple((atom, dual(after), dual(before)) for atom, before, after in move.parts)
        moves.append(replace(move, collective=move.collective and ADJOINT[move.collective], parts=parts))
    return Redistribution(
        part.target.dual(),
        part.source.dual(),
        part.digits,
        tuple((atom, dual(holding)) for atom, holding in held.items()),
        tuple(reversed(moves)),
        tuple(reversed(part.fractions)),
    )


def dual(holding: Holding) -> Holding:
    """What an axis holds of the gradient of a tensor of which it has ``holding``."""
    if isinstance(holding, Broadcast):
        return PartialSum()
    if isinstance(holding, PartialSum):
        return Broadcast()
    return holding


# ------------------------------------------------------------------------------------------------- tensors on all ranks


def scatter(tensor: np.ndarray, distribution: Distribution, rng: np.random.Generator) -> list[np.ndarray]:
    """Each rank's local tensor.  All summands are random except the first, which is the difference to the tensor."""
    summands: dict[tuple[int, ...], np.ndarray] = {}
    partial = [axis for axis, state in zip(distribution.axes, distribution.states) if isinstance(state, PartialSum)]
    keys = [tuple(axis.coordinate(rank) for axis in partial) for rank in range(distribution.num_ranks)]
    for key in dict.fromkeys(keys):
        summands[key] = rng.integers(-99, 100, tensor.shape).astype(tensor.dtype)
    first = (0,) * len(partial)
    summands[first] = tensor - sum(value for key, value in summands.items() if key != first)
    return [summands[key][distribution.slices(rank, tensor.shape)].copy() for rank, key in enumerate(keys)]


def assemble(local: Sequence[np.ndarray], distribution: Distribution, shape: Sequence[int]) -> np.ndarray:
    """The tensor that the ranks hold.  Checks that copies are equal, and that every element has the right number of holders."""
    copies = [axis for axis, state in zip(distribution.axes, distribution.states) if isinstance(state, Broadcast)]
    by_copy: dict[tuple[int, ...], np.ndarray] = {}
    for rank, piece in enumerate(local):
        key = tuple(axis.coordinate(rank) for axis in copies)
        by_copy.setdefault(key, np.zeros(shape, piece.dtype))[distribution.slices(rank, shape)] += piece
    tensors = list(by_copy.values())
    for other in tensors[1:]:
        np.testing.assert_array_equal(other, tensors[0])
    return tensors[0]


# -------------------------------------------------------------------------------------------------------------- messages


@dataclass
class Network:
    """Counts what ranks receive from and send to each other, in elements, and on which pairs of ranks there are messages."""

    received: dict[int, int] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    pairs: set[tuple[int, int]] = field(default_factory=set)

    def send(self, source: int, target: int, data: np.ndarray) -> np.ndarray:
        """``data`` as ``target`` receives it."""
        if source != target:
            self.received[target] = self.received.get(target, 0) + data.size
            self.sent[source] = self.sent.get(source, 0) + data.size
            self.pairs.add((source, target))
        return data.copy()


def groups_along(axis: Axis, num_ranks: int) -> list[list[int]]:
    """The ranks that differ only on this axis, in the order of their coordinates."""
    groups: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        groups.setdefault(rank - axis.coordinate(rank) * axis.stride, []).append(rank)
    return [sorted(group, key=axis.coordinate) for group in groups.values()]


# ----------------------------------------------------------------------------------------------------------- digit arrays


class DigitArrays:
    """The local tensors of all ranks as digit arrays."""

    def __init__(self, part: Redistribution, local: Sequence[np.ndarray], shape: Sequence[int]):
        self.digits: Digits = part.digits
        self.shape = tuple(shape)
        self.held = dict(part.holdings)
        self.rest = [length // prod(sizes) for length, sizes in zip(shape, self.digits)]
        assert all(rest * prod(sizes) == length for length, sizes, rest in zip(shape, self.digits, self.rest))
        self.local = [piece.reshape(self._local_digit_shape()) for piece in local]

    def _owned(self) -> set[Digit]:
        owned = [holding for holding in self.held.values() if isinstance(holding, Digit)]
        assert len(owned) == len(set(owned)), "a digit has two owners"
        return set(owned)

    def _local_digit_shape(self) -> list[int]:
        owned = self._owned()
        lengths = []
        for dim, sizes in enumerate(self.digits):
            lengths += [1 if Digit(dim, i) in owned else size for i, size in enumerate(sizes)]
            lengths.append(self.rest[dim])
        return lengths

    def position(self, digit: Digit) -> int:
        """The array dimension of a digit."""
        return sum(len(sizes) + 1 for sizes in self.digits[: digit.dim]) + digit.index

    def tensors(self) -> list[np.ndarray]:
        """The local tensors with the dimensions of the logical tensor, as in the runtime."""
        owned = self._owned()
        local_shape = [
            rest * prod(size for i, size in enumerate(sizes) if Digit(dim, i) not in owned)
            for dim, (sizes, rest) in enumerate(zip(self.digits, self.rest))
        ]
        return [piece.reshape(local_shape) for piece in self.local]

    def execute(self, move: Move, network: Network) -> None:
        """One move on all ranks."""
        for axis, before, _ in move.parts:
            assert self.held[axis] == before, "the move starts from something else than what is held"
        assert prod(axis.size for axis, _, _ in move.parts) == move.axis.size
        after: dict[int, np.ndarray] = {}
        for group in groups_along(move.axis, len(self.local)):
            after.update(zip(group, self._in_group(move, group, network)))
        self.local = [after[rank] for rank in range(len(self.local))]
        self.held.update({axis: holding for axis, _, holding in move.parts})
        assert all(list(piece.shape) == self._local_digit_shape() for piece in self.local)

    def _in_group(self, move: Move, group: list[int], network: Network) -> list[np.ndarray]:
        if move.collective is None:
            return [self._local_change(move, rank) for rank in group]
        exchange = {
            Collective.ALL_GATHER: self._all_gather,
            Collective.REDUCE_SCATTER: self._reduce_scatter,
            Collective.ALL_TO_ALL: self._all_to_all,
            Collective.ALL_REDUCE: self._all_reduce,
        }[move.collective]
        return exchange(move, group, network)

    # What a rank has of an array whose digits nobody owns, by the coordinates of its parts -- and the reverse.

    def _piece(self, move: Move, rank: int, which: int) -> tuple[slice, ...]:
        """Where ``rank``'s own digits lie before (``which`` = 1) or after (2) the move, in an array that has them all."""
        index = [slice(None)] * self.local[rank].ndim
        for part in move.parts:
            axis, holding = part[0], part[which]
            if isinstance(holding, Digit):
                value = axis.coordinate(rank)
                index[self.position(holding)] = slice(value, value + 1)
        return tuple(index)

    def _lengths_with(self, move: Move, rank: int, which: int) -> list[int]:
        """The array's lengths with all digits of the parts in full."""
        lengths = list(self.local[rank].shape)
        for part in move.parts:
            if isinstance(part[which], Digit):
                lengths[self.position(part[which])] = part[0].size
        return lengths

    def _local_change(self, move: Move, rank: int) -> np.ndarray:
        array = self.local[rank]
        for part in move.parts:
            axis, before, after = part
            single = Move(None, axis, (part,))
            if isinstance(before, Broadcast) and isinstance(after, Digit):
                array = array[self._piece(single, rank, 2)]
            elif isinstance(before, Broadcast) and isinstance(after, PartialSum):
                # One copy counts, the others become zero summands.
                array = array if axis.coordinate(rank) == 0 else np.zeros_like(array)
            else:
                assert isinstance(before, Digit) and isinstance(after, PartialSum), f"{before} -> {after} is not local"
                lengths = list(array.shape)
                lengths[self.position(before)] = axis.size
                summand = np.zeros(lengths, array.dtype)
                summand[self._piece(single, rank, 1)] = array
                array = summand
        return array

    def _all_gather(self, move: Move, group: list[int], network: Network) -> list[np.ndarray]:
        assert all(isinstance(b, Digit) and isinstance(a, Broadcast) for _, b, a in move.parts)
        gathered = []
        for rank in group:
            whole = np.empty(self._lengths_with(move, rank, 1), self.local[rank].dtype)
            for peer in group:
                whole[self._piece(move, peer, 1)] = network.send(peer, rank, self.local[peer])
            gathered.append(whole)
        return gathered

    def _reduce_scatter(self, move: Move, group: list[int], network: Network) -> list[np.ndarray]:
        assert all(isinstance(b, PartialSum) and isinstance(a, Digit) for _, b, a in move.parts)
        return [
            sum(network.send(peer, rank, self.local[peer][self._piece(move, rank, 2)]) for peer in group)
            for rank in group
        ]

    def _all_to_all(self, move: Move, group: list[int], network: Network) -> list[np.ndarray]:
        assert all(isinstance(b, Digit) and isinstance(a, Digit) for _, b, a in move.parts)
        exchanged = []
        for rank in group:
            mine = self.local[rank][self._piece(move, rank, 2)]
            whole = np.empty([move_length for move_length in self._after_lengths(move, mine)], mine.dtype)
            for peer in group:
                whole[self._piece(move, peer, 1)] = network.send(
                    peer, rank, self.local[peer][self._piece(move, rank, 2)]
                )
            exchanged.append(whole)
        return exchanged

    def _after_lengths(self, move: Move, mine: np.ndarray) -> list[int]:
        lengths = list(mine.shape)
        for axis, before, _ in move.parts:
            lengths[self.position(before)] = axis.size
        return lengths

    def _all_reduce(self, move: Move, group: list[int], network: Network) -> list[np.ndarray]:
        assert all(isinstance(b, PartialSum) and isinstance(a, Broadcast) for _, b, a in move.parts)
        shape = self.local[group[0]].shape
        flat = {rank: self.local[rank].reshape(-1) for rank in group}
        # Where p does not divide the elements, some ranks own a chunk that is one element longer.
        chunks = np.array_split(np.arange(flat[group[0]].size), len(group))
        reduced = {
            rank: sum(network.send(peer, rank, flat[peer][chunk]) for peer in group)
            for rank, chunk in zip(group, chunks)
        }
        results = []
        for rank in group:
            whole = np.empty_like(flat[rank])
            for peer, chunk in zip(group, chunks):
                whole[chunk] = network.send(peer, rank, reduced[peer])
            results.append(whole.reshape(shape))
        return results


def run_exchange(
    part: Exchange, local: Sequence[np.ndarray], shape: Sequence[int], network: Network
) -> list[np.ndarray]:
    """Send every piece from its source to its destination; pieces that stay on a rank are copied."""

    def held(distribution: Distribution, rank: int) -> tuple[np.ndarray, ...]:
        return tuple(np.arange(length)[part] for length, part in zip(shape, distribution.slices(rank, shape)))

    def places(index: Sequence[Sequence[int]], among: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        assert all(np.isin(own, of).all() for own, of in zip(index, among)), "a piece is not where it should be"
        return np.ix_(*(np.searchsorted(of, own) for own, of in zip(index, among)))

    found, pieces = [], part.pieces(shape)
    for rank in range(len(local)):
        own, wanted = held(part.source, rank), held(part.target, rank)
        result = np.zeros([len(index) for index in wanted], local[rank].dtype)
        times = np.zeros(result.shape, int)
        common = [np.intersect1d(mine, other) for mine, other in zip(own, wanted)]
        result[places(common, wanted)] = local[rank][places(common, own)]
        times[places(common, wanted)] += 1
        for piece in pieces:
            if piece.destination == rank:
                data = local[piece.source][places(piece.block, held(part.source, piece.source))]
                result[places(piece.block, wanted)] = network.send(piece.source, rank, data)
                times[places(piece.block, wanted)] += 1
        assert (times == 1).all(), "an element is missing, or came twice"
        found.append(result)
    return found


def execute(
    route: Route, local: Sequence[np.ndarray], shape: Sequence[int], network: Network | None = None
) -> list[np.ndarray]:
    """Run a route: from every rank's local tensor at its source to every rank's local tensor at its target."""
    network = Network() if network is None else network
    for part in route:
        if isinstance(part, Exchange):
            local = run_exchange(part, local, shape, network)
            continue
        arrays = DigitArrays(part, local, shape)
        for move in part.moves:
            arrays.execute(move, network)
        local = arrays.tensors()
    return list(local)
