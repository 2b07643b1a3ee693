"""Values of the row search (:mod:`.row_search`): extensions of states, states of a stage, and failed states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np

from autoddl.costmodel.stopping import Stop
from autoddl.search.dominance import undominated

__all__ = ["Extensions", "FailedStates", "States", "groups_of"]


@dataclass(frozen=True, eq=False)
class Extensions:
    """The rows of all arcs that begin with one unit at one stage.  An arc without loaded rows counts as a single row.

    Attributes:
        stop: The unit behind the last one of the stage, shape (extensions,).
        row: Index of the row in its arc; -1 if the rows of the arc are not loaded.
        costs: Value in every bound, with the least transfers over the boundary behind the stage; shape (extensions, bounds).
        memory, buffer: Resident bytes, and bytes of the largest buffer.
        shared: Bytes of the gradients of the stage's shared weights that a device updates, shape (extensions, shared weights of the
            stage).
        entry, exit: Numbers of the layouts at both sides; -1 if they do not matter.
    """

    stop: np.ndarray
    row: np.ndarray
    costs: np.ndarray
    memory: np.ndarray
    buffer: np.ndarray
    shared: np.ndarray
    entry: np.ndarray
    exit: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Extensions]) -> Extensions:
        """Return the extensions of all parts."""
        return cls(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(cls)))

    def __len__(self) -> int:
        return len(self.stop)


@dataclass(frozen=True, eq=False)
class States:
    """The states of one stage with equal (unit, layout), and how to trace each back to the stage before.

    Attributes:
        sums: Shape (states, columns).
        origin: Index of the previous state among the states of its (unit, layout).
        extension: Index of the extension that leads from the previous state to this one.
        sources: The (unit, layout) of previous states.
        source: Index, in ``sources``, of the (unit, layout) of the previous state.
    """

    sums: np.ndarray
    origin: np.ndarray
    extension: np.ndarray
    sources: tuple[tuple[int, int], ...]
    source: np.ndarray

    @classmethod
    def of_one_source(
        cls, sums: np.ndarray, origin: np.ndarray, extension: np.ndarray, source: tuple[int, int]
    ) -> States:
        """Return states whose previous states all have the same (unit, layout)."""
        return cls(sums, origin, extension, (source,), np.zeros(len(sums), dtype=np.intp))

    @classmethod
    def initial(cls, sums: np.ndarray) -> States:
        """Return the single state before the first stage."""
        none = np.zeros(1, dtype=np.intp)
        return cls.of_one_source(sums[None], none, none, (0, -1))

    @classmethod
    def merged(cls, parts: Sequence[States], stop: Stop | None = None) -> States:
        """Return the states of all parts, which have one source each, without those that another state dominates.

        Raises:
            StopRequestedError: ``stop`` was requested.
        """
        sums = np.concatenate([part.sums for part in parts])
        source = np.repeat(np.arange(len(parts)), [len(part.sums) for part in parts])
        selected = undominated(np.zeros(len(sums), dtype=np.intp), sums - sums.min(axis=0, initial=0.0), stop)
        return cls(
            sums[selected],
            np.concatenate([part.origin for part in parts])[selected],
            np.concatenate([part.extension for part in parts])[selected],
            tuple(part.sources[0] for part in parts),
            source[selected],
        )


class FailedStates:
    """The sums of states of one (stage, unit, layout) from which no selection is below the threshold.

    They stay failed when bounds are added.

    Args:
        num_other_columns: Number of columns behind those of the bounds.
    """

    def __init__(self, num_other_columns: int) -> None:
        self.num_other_columns = num_other_columns
        self._sums: np.ndarray | None = None

    def add(self, sums: np.ndarray) -> None:
        """Add a failed state; those that it implies are dropped."""
        if self._sums is None:
            self._sums = sums[None]
            return
        known = self._with_columns(len(sums))
        self._sums = np.vstack([known[~(sums <= known).all(axis=1)], sums])

    def implies(self, sums: np.ndarray) -> bool:
        """Return whether a failed state is at most as large as this one in every column, so that this one fails, too."""
        return self._sums is not None and bool((self._with_columns(len(sums)) <= sums).all(axis=1).any())

    def _with_columns(self, num_columns: int) -> np.ndarray:
        """Return all failed states with columns of -inf for bounds that were not known when they failed."""
        assert self._sums is not None
        num_new = num_columns - self._sums.shape[1]
        if num_new:
            num_bounds = self._sums.shape[1] - self.num_other_columns
            new = np.full((len(self._sums), num_new), -np.inf)
            self._sums = np.hstack([self._sums[:, :num_bounds], new, self._sums[:, num_bounds:]])
        return self._sums


def groups_of(stop: np.ndarray, layout: np.ndarray) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Yield every distinct pair (stop, layout), and the indices at which it occurs."""
    if not len(stop):
        return
    pairs = np.stack([stop, layout], axis=1)
    distinct, number = np.unique(pairs, axis=0, return_inverse=True)
    number = number.ravel()
    for index, (one_stop, one_layout) in enumerate(distinct.tolist()):
        yield (one_stop, one_layout), np.flatnonzero(number == index)
