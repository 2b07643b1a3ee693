"""Redistributions written out: the moves of :mod:`autoddl.costmodel.redistribution` as lines of Python.

The runtime executes the same moves (:mod:`autoddl.pipelines.runtime.moving`, which explains the digits).  A digit that is the
outermost of its dimension can be cut or joined as the dimension itself, ``all_to_all(x, axis, split_dim=2, concat_dim=0)``; others
are named by their places in a view of the tensor.  An exchange is one line, which names the layouts at its two ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import Exchange
from autoddl.costmodel.redistribution import Digit, Move, Redistribution, Route

from .source import value_text

__all__ = ["MoveLine", "move_lines"]


@dataclass(frozen=True)
class MoveLine:
    """An expression of ``{x}``, and the collectives that it is priced as (none: a local change)."""

    expression: str
    collectives: tuple[Collective, ...] = ()


def move_lines(
    route: Route, shape: tuple[int, int, int], axis_name: Callable[[Axis], str], layouts: tuple[str, str]
) -> list[MoveLine]:
    """The lines that bring a rank's part (samples, rows, features) along a route.

    Args:
        shape: of the part before.
        axis_name: the name of a mesh axis in the file.
        layouts: the expressions of the layouts at the ends.

    Raises:
        UserError: a move is none that activations make.
    """
    lines: list[MoveLine] = []
    for part in route:
        if isinstance(part, Exchange):
            assert len(route) == 1, "an exchange leads from one end to the other"
            collectives = tuple(step.collective for step in part.steps(1.0))
            return [MoveLine(f"exchange({{x}}, RANKS, {layouts[0]}, {layouts[1]})", collectives)]
        view = _View(part, shape)
        for move in part.moves:
            lines += view.lines(move, axis_name)
        shape = view.shape
        lines += view.restored()
    return lines


class _View:
    """The dimension-per-digit view of one redistribution (samples, rows, features; rows are whole)."""

    def __init__(self, part: Redistribution, shape: tuple[int, int, int]):
        owned = {holding for _, holding in part.holdings if isinstance(holding, Digit)}
        self.places: dict[Digit, int] = {}
        self.lengths: list[int] = []
        self.spans: list[range] = []
        for dim, length in enumerate(shape):
            start = len(self.lengths)
            if dim != 1:
                which = dim // 2
                for index, size in enumerate(part.digits[which]):
                    self.places[Digit(which, index)] = len(self.lengths)
                    self.lengths.append(1 if Digit(which, index) in owned else size)
            self.lengths.append(length // prod(self.lengths[start:]))
            self.spans.append(range(start, len(self.lengths)))
        self.is_flat = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tensor now."""
        first, rows, last = (prod(self.lengths[i] for i in span) for span in self.spans)
        return first, rows, last

    def restored(self) -> list[MoveLine]:
        """Back to (samples, rows, features), where a move left the tensor flat."""
        if not self.is_flat:
            return []
        self.is_flat = False
        _, rows, features = self.shape
        return [MoveLine(f"{{x}}.reshape(-1, {rows}, {features})")]

    def lines(self, move: Move, axis_name: Callable[[Axis], str]) -> list[MoveLine]:
        """One move."""
        if move.collective is None:
            return [line for atom, _, after in move.parts for line in self._slice(atom, after, axis_name)]
        taken = [self.places[after] for _, _, after in move.parts if isinstance(after, Digit)]
        given = [self.places[before] for _, before, _ in move.parts if isinstance(before, Digit)]
        sizes = [atom.size for atom, _, _ in move.parts]
        if move.collective not in (Collective.ALL_TO_ALL, Collective.ALL_GATHER) or not given:
            raise UserError(f"a {move.collective.value} between two layers cannot be exported")
        axis = axis_name(move.axis)
        split, concat = self._whole_dim(taken), self._whole_dim(given)
        lines = []
        if concat is not None and not taken:
            lines = [
                *self.restored(),
                MoveLine(f"RANKS.all_gather({{x}}, axis={axis}, dim={concat})", (move.collective,)),
            ]
        elif concat is not None and split is not None and split != concat:
            text = f"RANKS.all_to_all({{x}}, axis={axis}, split_dim={split}, concat_dim={concat})"
            lines = [*self.restored(), MoveLine(text, (move.collective,))]
        else:
            kept = [i for i, length in enumerate(self.lengths) if length > 1 or i in given or i == self.spans[0][-1]]
            shown = {
                "view": [-1 if i == self.spans[0][-1] else self.lengths[i] for i in kept],
                "split": [kept.index(i) for i in taken],
                "concat": [kept.index(i) for i in given],
                "sizes": sizes,
            }
            options = ", ".join(f"{name}={value_text(value)}" for name, value in shown.items())
            lines = [MoveLine(f"exchange_digits({{x}}, RANKS, axis={axis}, {options})", (move.collective,))]
            self.is_flat = True
        for place in taken:
            self.lengths[place] = 1
        for place, size in zip(given, sizes):
            self.lengths[place] = size
        return lines

    def _slice(self, atom: Axis, after: object, axis_name: Callable[[Axis], str]) -> list[MoveLine]:
        if not isinstance(after, Digit):
            raise UserError("a partial sum between two layers cannot be exported")
        place = self.places[after]
        before = prod(self.lengths[:place])
        behind = prod(self.lengths[place + 1 :])
        on_samples = place in self.spans[0]
        view = (before, self.lengths[place], -1) if on_samples else (-1, self.lengths[place], behind)
        self.lengths[place] = 1
        self.is_flat = True
        text = f"take_shard({{x}}.reshape{value_text(view)}, RANKS.axis({axis_name(atom)}), dim=1).reshape(-1)"
        return [MoveLine(text)]

    def _whole_dim(self, places: Sequence[int]) -> int | None:
        """The dimension of the tensor whose outermost digits ``places`` are, in order; None where there is none."""
        dim = next((dim for dim, span in enumerate(self.spans) if places and places[0] in span), None)
        if dim is None:
            return None
        span = self.spans[dim]
        if any(place not in span for place in places) or list(places) != sorted(places):
            return None
        others = [i for i in range(span[0], places[-1] + 1) if i not in places]
        return dim if all(self.lengths[i] == 1 for i in others) else None
