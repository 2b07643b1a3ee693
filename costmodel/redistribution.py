"""Redistribution: the communication steps between two distributions of a tensor over the same ranks.

*One list, used twice*: the cost model prices these steps and the runtime executes them.

**Digits.**  Both meshes are refined until every axis of one is an axis of the other (2 x 4 and 4 x 2 ranks become 2 x 2 x 2),
and every dimension until both ends cut it at the same places.  Then each axis of the refined mesh owns one *digit* of one
dimension's index (the dimension is split there), or holds a copy (``B``) or a summand (``P``).  Digits that no axis owns are
local.  A redistribution changes the owners of digits; every change is one collective along one axis:

=========================  ==================  =====================================================
change of an axis          step                n (bytes per device)
=========================  ==================  =====================================================
B -> digit                 local slice         -
P -> digit                 reduce-scatter      the local tensor before
digit -> another digit     all-to-all          the local tensor
P -> B                     all-reduce          the local tensor
digit -> B                 all-gather          the local tensor after
B -> P, digit -> P         local zero-fill     -
=========================  ==================  =====================================================

An axis can take a digit only if no other axis owns it.  The steps are ordered so that few bytes move: first those that shrink the
tensor (slice, reduce-scatter), then all-to-all and all-reduce, and last those that enlarge it (all-gather, outer network level
first, while the tensor is small).  Neighbouring axes with the same kind of change at the same time share one collective.  A cycle
of axes that wait for each other's digits is broken through a spare digit of the tensor, or by gathering one axis.

**Without a common refinement** (2 x 3 and 3 x 2), the tensor goes through a distribution that both meshes can express: split along
one dimension over all ranks, or copied everywhere, whichever sends less.  Between two even splits, one exchange of unequal pieces
(:mod:`.exchange`) is the alternative.  It is chosen

- if it cannot be slower, for any latency and bandwidth: it sends on no network level more bytes or messages, and on some level
  fewer of either;
- or if the collectives would gather on the way what is split at both ends, unless the exchange sends more bytes on some level.
  On 12 x 8 ranks such a gather sends up to 95 times the bytes that a rank holds, and needs the memory for them.

If the chosen collectives do not divide a tensor, the same two rules decide between collectives that do and the exchange, which
always does.  So a redistribution may take less time with a smaller micro-batch, on some links
(:attr:`.layoutprices.LayoutPrices.may_shrink`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod
from typing import Union

from .collectives import Collective, Step
from .distribution import Axis, Distribution
from .errors import UserError
from .exchange import Exchange, exchange_between
from .sbp import Broadcast, PartialSum, SBPState, Split

__all__ = ["Digit", "Move", "Redistribution", "Route", "redistribute", "steps"]


@dataclass(frozen=True)
class Digit:
    """A digit of the index of a tensor dimension.

    Attributes:
        dim: the dimension.
        index: position of the digit; 0 is the most significant.
    """

    dim: int
    index: int


#: Fractions of a tensor that differ by less than this are equal.
_ROUNDING = 1e-9

#: What an axis holds: a digit, a copy or a summand.
Holding = Union[Digit, Broadcast, PartialSum]


@dataclass(frozen=True)
class Move:
    """A simultaneous change of what some neighbouring axes hold.

    Attributes:
        collective: the collective of the change; None if the change is local.
        axis: the axis that spans all of them.
        parts: (axis of the refined mesh, its holding before, its holding after), outermost first.
    """

    collective: Collective | None
    axis: Axis
    parts: tuple[tuple[Axis, Holding, Holding], ...]


@dataclass(frozen=True)
class Redistribution:
    """The moves between two distributions that share a refined mesh.

    Attributes:
        source, target: the two distributions.
        digits: for each tensor dimension the sizes of its digits, most significant first; the rest of the dimension is one more,
            local digit.
        holdings: what each axis of the refined mesh holds at the start.
        moves: the changes, in order.
        fractions: for each move, the bytes n of its collective as a fraction of the logical tensor.
    """

    source: Distribution
    target: Distribution
    digits: tuple[tuple[int, ...], ...]
    holdings: tuple[tuple[Axis, Holding], ...]
    moves: tuple[Move, ...]
    fractions: tuple[float, ...]

    @property
    def divisors(self) -> tuple[int, ...]:
        """The number that each dimension of the tensor must be divisible by."""
        return tuple(prod(sizes) for sizes in self.digits)

    def steps(self, nbytes: float) -> tuple[Step, ...]:
        """The collectives for a tensor of ``nbytes`` in total; local changes send nothing."""
        return tuple(
            Step(move.collective, move.axis, fraction * nbytes)
            for move, fraction in zip(self.moves, self.fractions)
            if move.collective is not None
        )


#: The parts of a route between two distributions, in order.
Route = tuple[Union[Redistribution, Exchange], ...]


def redistribute(source: Distribution, target: Distribution, shape: Sequence[int]) -> Route:
    """The route of a tensor of ``shape`` from ``source`` to ``target``.

    Returns:
        Usually one :class:`Redistribution`.  If the meshes have no common refinement, two, or one :class:`Exchange`.

    Raises:
        UserError: the tensor does not divide at one of the ends, the numbers of ranks differ, or there is no route.

    >>> route = redistribute(Distribution.parse("(S0:4)"), Distribution.parse("(B:4)"), (8, 8))
    >>> [str(step) for step in steps(route, 1024)]
    ['all-gather over 4 (stride 1), 1,024 bytes']
    """
    if source.num_ranks != target.num_ranks:
        raise UserError(
            f"{source} is on {source.num_ranks} ranks, {target} on {target.num_ranks}; the numbers should be equal"
        )
    source.local_shape(shape)
    target.local_shape(shape)
    source, target = source.without_unit_axes(), target.without_unit_axes()
    # Only the divisibility of the dimensions matters.  Most tensors divide into all digits of the route, so they share the
    # cached route of a tensor that always divides.
    route = _best_route(source, target, (source.num_ranks**2,) * len(shape))
    if route is None or not divides(route, shape):
        is_refined = route is not None and len(route) == 1
        find = _route if is_refined else _best_route
        route = find(source, target, tuple(gcd(length, source.num_ranks**2) for length in shape))
    if route is None:
        raise UserError(
            f"shape {tuple(shape)} cannot be brought from {source} to {target} without dividing a dimension unevenly"
        )
    return route


def divides(route: Route, shape: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` divides into the digits of the route."""
    return not any(length % divisor for part in route for length, divisor in zip(shape, part.divisors))


def steps(route: Route, nbytes: float) -> tuple[Step, ...]:
    """The communication steps of a route for a tensor of ``nbytes`` in total."""
    return tuple(step for part in route for step in part.steps(nbytes))


@lru_cache(maxsize=1 << 17)
def _best_route(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> Route | None:
    """The collectives or an exchange, by the rules of the module's docstring."""
    moves = _route(source, target, shape)
    exceeds_ends = moves is not None and _exceeds_ends(moves, source, target, len(shape))
    if moves is not None and len(moves) == 1 and not exceeds_ends:
        return moves
    exchange = exchange_between(source, target, len(shape))
    if exchange is None or (moves is not None and not _prefers_exchange(moves, exchange, exceeds_ends)):
        return moves
    return (exchange,)


def _exceeds_ends(route: tuple[Redistribution, ...], source: Distribution, target: Distribution, num_dims: int) -> bool:
    """Whether a rank holds more of the tensor on the way than at both ends."""
    if all(fraction * source.num_ranks < 1.0 + _ROUNDING for part in route for fraction in part.fractions):
        return False  # the usual case: never more than an even split
    fewest_parts = min(prod(end.split_sizes(num_dims)) for end in (source, target))
    return any(step.nbytes * fewest_parts > 1.0 + _ROUNDING for step in steps(route, 1.0))


def _prefers_exchange(moves: Route, exchange: Exchange, exceeds_ends: bool) -> bool:
    """Whether the exchange is chosen over ``moves``; ``exceeds_ends`` says whether those hold more on the way than at both ends."""
    mine, its = (_loads_by_level(part) for part in (steps(moves, 1.0), exchange.steps(1.0)))
    pairs = [(its.get(level, (0.0, 0)), own) for level, own in mine.items()]
    if its.keys() - mine.keys() or any(sent > own_sent + _ROUNDING for (sent, _), (own_sent, _) in pairs):
        return False
    has_fewer = any(sent < own_sent - _ROUNDING or count < own_count for (sent, count), (own_sent, own_count) in pairs)
    return exceeds_ends or (has_fewer and all(count <= own_count for (_, count), (_, own_count) in pairs))


def _loads_by_level(steps_: Iterable[Step]) -> dict[int, tuple[float, float]]:
    """(bytes, messages) that the busiest rank sends, for each network level."""
    loads: dict[int, tuple[float, float]] = {}
    for step in steps_:
        nbytes, messages = loads.get(step.axis.level, (0.0, 0))
        loads[step.axis.level] = nbytes + step.sent_bytes, messages + step.messages
    return loads


@lru_cache(maxsize=1 << 17)
def _route(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> tuple[Redistribution, ...] | None:
    direct = _direct(source, target, shape)
    if direct is not None:
        return (direct,)
    candidates = []
    for halfway in _common_distributions(source, target, shape):
        first = _direct(source, halfway[0], shape)
        second = _direct(halfway[1], target, shape)
        if first is not None and second is not None:
            candidates.append((first, second))
    return min(candidates, key=lambda route: sum(step.sent_bytes for step in steps(route, 1.0)), default=None)


def _common_distributions(
    source: Distribution, target: Distribution, shape: tuple[int, ...]
) -> list[tuple[Distribution, Distribution]]:
    """Distributions that both meshes can express, each as a pair (on the source's mesh, on the target's mesh)."""
    states: list[SBPState] = [Broadcast()]
    states += [Split(dim) for dim, length in enumerate(shape) if length % source.num_ranks == 0]
    pairs = []
    for state in states:
        ends = []
        for end in (source, target):
            axes = tuple(sorted(end.axes, key=lambda axis: -axis.stride))
            ends.append(Distribution(axes, (state,) * len(axes)))
        pairs.append((ends[0], ends[1]))
    return pairs


def _direct(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> Redistribution | None:
    """The moves on the common refinement; None if there is no refinement, or the tensor does not divide."""
    refined = _refine(source, target, len(shape))
    if refined is None:
        return None
    digits, start, goal = refined
    if any(length % prod(sizes) for length, sizes in zip(shape, digits)):
        return None
    planner = _Planner(digits, start, goal, shape)
    if not planner.run():
        return None
    return Redistribution(
        source,
        target,
        tuple(tuple(sizes) for sizes in planner.digits),
        tuple(start.items()),
        tuple(planner.moves),
        tuple(planner.fractions),
    )


# ----------------------------------------------------------------------------------------------------- common refinement


def _refine(
    source: Distribution, target: Distribution, num_dims: int
) -> tuple[list[list[int]], dict[Axis, Holding], dict[Axis, Holding]] | None:
    """The common refinement of both ends: (digit sizes per dimension, holdings at the start, holdings at the goal)."""
    rank_cuts = {axis.stride for end in (source, target) for axis in end.axes} | {source.num_ranks}
    dim_cuts = [{1} for _ in range(num_dims)]
    while True:
        if not _is_chain(rank_cuts):
            return None
        before = (len(rank_cuts), [len(cuts) for cuts in dim_cuts])
        ordered = sorted(rank_cuts)
        for end in (source, target):
            positions = [1] * num_dims
            for axis, state in zip(end.axes, end.states):
                if isinstance(state, Split):
                    for stride, size in _atoms(axis, ordered):
                        _cut_inside(dim_cuts[state.dim], positions[state.dim], stride, size, rank_cuts)
                        positions[state.dim] *= size
                        dim_cuts[state.dim].add(positions[state.dim])
        if not all(_is_chain(cuts) for cuts in dim_cuts):
            return None
        if (len(rank_cuts), [len(cuts) for cuts in dim_cuts]) == before:
            break
    atoms = {stride: Axis(size, stride, axis.level) for axis in source.axes for stride, size in _atoms(axis, ordered)}
    start, goal = (_holdings(end, ordered, atoms, num_dims) for end in (source, target))
    return [_quotients(cuts) for cuts in dim_cuts], start, goal


def _holdings(
    end: Distribution, rank_cuts: Sequence[int], atoms: Mapping[int, Axis], num_dims: int
) -> dict[Axis, Holding]:
    """What each atom (axis of the refined mesh) holds at one end."""
    free: dict[Axis, Holding] = {}
    owners: list[list[Axis]] = [[] for _ in range(num_dims)]
    for axis, state in zip(end.axes, end.states):
        for stride, _ in _atoms(axis, rank_cuts):
            if isinstance(state, Split):
                owners[state.dim].append(atoms[stride])
            else:
                free[atoms[stride]] = state
    digits = {atom: Digit(dim, index) for dim in range(num_dims) for index, atom in enumerate(owners[dim])}
    return {**free, **digits}


def _is_chain(cuts: set[int]) -> bool:
    ordered = sorted(cuts)
    return all(larger % smaller == 0 for smaller, larger in zip(ordered, ordered[1:]))


def _quotients(cuts: set[int]) -> list[int]:
    ordered = sorted(cuts)
    return [larger // smaller for smaller, larger in zip(ordered, ordered[1:])]


def _atoms(axis: Axis, rank_cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(stride, size) of the pieces that ascending cuts divide an axis into, outermost first, in the order of their digits."""
    first, last = bisect_left(rank_cuts, axis.stride), bisect_left(rank_cuts, axis.stride * axis.size)
    for cut in range(last - 1, first - 1, -1):
        yield rank_cuts[cut], rank_cuts[cut + 1] // rank_cuts[cut]


def _cut_inside(cuts: set[int], position: int, stride: int, size: int, rank_cuts: set[int]) -> None:
    """Cut this atom wherever the other end cuts the dimension inside the atom's digit; adds to ``rank_cuts``."""
    for cut in cuts:
        if position < cut < position * size and cut % position == 0 and size % (cut // position) == 0:
            rank_cuts.add(stride * size // (cut // position))


# ------------------------------------------------------------------------------------------------------------- the moves


class _Planner:
    """The state of one redistribution while its moves are chosen."""

    def __init__(
        self, digits: list[list[int]], start: dict[Axis, Holding], goal: dict[Axis, Holding], shape: tuple[int, ...]
    ):
        self.digits = digits
        self.held = dict(start)
        self.goal = goal
        self.pending = [atom for atom in self.held if self.held[atom] != goal[atom]]
        self.shape = shape
        self.moves: list[Move] = []
        self.fractions: list[float] = []
        # Number of parts that the tensor is cut into; a rank holds one.
        self.parts = prod(atom.size for atom, held in self.held.items() if isinstance(held, Digit))

    def run(self) -> bool:
        """Choose the moves; False if a cycle cannot be broken."""
        while True:
            while self._take_free_digits():
                pass
            waiting = [atom for atom in self.pending if isinstance(self.goal[atom], Digit)]
            if not waiting:
                break
            if not (self._release_a_blocker(waiting) or self._break_a_cycle(waiting)):
                return False
        self._finish()
        return True

    def _take_free_digits(self) -> bool:
        """Let axes take digits that are free: slices first, then reduce-scatters, then all-to-alls.  False if there are none."""
        wanted = [atom for atom in self.pending if isinstance(self.goal[atom], Digit)]
        if not wanted:
            return False
        taken = set(self.held.values())
        ready = [atom for atom in wanted if self.goal[atom] not in taken]
        for kind, collective in (
            (Broadcast, None),
            (PartialSum, Collective.REDUCE_SCATTER),
            (Digit, Collective.ALL_TO_ALL),
        ):
            chosen = [atom for atom in ready if isinstance(self.held[atom], kind)]
            if chosen:
                # Inner levels shrink the tensor before it crosses the outer ones.
                self._change(collective, {atom: self.goal[atom] for atom in chosen}, outer_first=False)
                return True
        return False

    def _release_a_blocker(self, waiting: list[Axis]) -> bool:
        """Release digits that other axes wait for, from axes whose goal is not a digit.  False if there are none."""
        wanted = {self.goal[atom] for atom in waiting}
        blockers = [a for a in self.pending if self.held[a] in wanted and not isinstance(self.goal[a], Digit)]
        if blockers:
            to_sum = [atom for atom in blockers if isinstance(self.goal[atom], PartialSum)]
            if to_sum:
                self._change(None, {atom: PartialSum() for atom in to_sum})
            else:
                self._change(Collective.ALL_GATHER, {atom: Broadcast() for atom in blockers}, outer_first=True)
        return bool(blockers)

    def _break_a_cycle(self, waiting: list[Axis]) -> bool:
        """Break a cycle of axes that wait for each other's digits: move one to a spare digit, or gather it."""
        atom = min(
            (a for a in waiting if isinstance(self.held[a], Digit)), key=lambda a: (-a.level, a.stride), default=None
        )
        if atom is None:
            return False
        for dim, sizes in enumerate(self.digits):
            if self.shape[dim] % (prod(sizes) * atom.size) == 0:
                sizes.append(atom.size)
                self._change(Collective.ALL_TO_ALL, {atom: Digit(dim, len(sizes) - 1)})
                return True
        self._change(Collective.ALL_GATHER, {atom: Broadcast()})
        return True

    def _finish(self) -> None:
        """The changes that need no free digit: all-reduces, then all-gathers, then local changes to summands."""
        pending = tuple(self.pending)
        reduced = {a: self.goal[a] for a in pending if isinstance(self.held[a], PartialSum)}
        self._change(Collective.ALL_REDUCE, reduced, outer_first=False)
        gathered = {
            a: self.goal[a] for a in pending if isinstance(self.held[a], Digit) and isinstance(self.goal[a], Broadcast)
        }
        self._change(Collective.ALL_GATHER, gathered, outer_first=True)
        self._change(None, {a: self.goal[a] for a in self.pending})

    def _change(self, collective: Collective | None, goal: dict[Axis, Holding], outer_first: bool = True) -> None:
        """Change the axes of ``goal`` at the same time; neighbours of one level share one move."""
        runs: list[list[Axis]] = []
        for atom in sorted(goal, key=lambda a: -a.stride):
            previous = runs[-1][-1] if runs else None
            if previous and previous.stride == atom.stride * atom.size and previous.level == atom.level:
                runs[-1].append(atom)
            else:
                runs.append([atom])
        for run in runs if outer_first else reversed(runs):
            changes = tuple([(atom, self.held[atom], goal[atom]) for atom in run])
            fewest = self.parts
            for atom, before, after in changes:
                self.held[atom] = after
                if isinstance(before, Digit):
                    self.parts //= atom.size
                if isinstance(after, Digit):
                    self.parts *= atom.size
            fewest = min(fewest, self.parts)
            axis = Axis(prod(atom.size for atom in run), run[-1].stride, run[-1].level)
            self.moves.append(Move(collective, axis, changes))
            self.fractions.append(1.0 / fewest if collective else 0.0)
        if goal:
            self.pending = [atom for atom in self.pending if self.held[atom] != self.goal[atom]]
