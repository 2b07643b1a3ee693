"""The formulas that a network level may be fitted with, from one (alpha, beta) to terms for every collective and group size.

Every form predicts, for a group of p ranks and n bytes (messages and sent bytes as in :mod:`autoddl.costmodel.collectives`),

    seconds = messages (alpha + e alpha') + sent (beta + e beta') + n gamma

==========================  ==============================================================================================
form                        parameters
==========================  ==============================================================================================
level                       alpha, beta of the level (the paper's)
collective                  alpha, beta of each collective
... + copy                  gamma of each: a cost per byte of local reduction and copying, which shrinks no more as p grows
... + crowding              alpha', beta': the price of e = max(0, ranks per core - 1), where ranks share cores
group                       alpha, beta of each collective in groups of each size (which holds gamma already)
group + crowding            alpha', beta' for each of them
==========================  ==============================================================================================

All are linear in their parameters and separate into *scopes* (the level; a collective; a collective and a group size) that share
none.  A column that says nothing new of a scope's points (copying, where there is one group size) is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.cluster import excess
from autoddl.costmodel.collectives import Collective

__all__ = ["FORMS", "Form", "Key", "Point", "Scope", "scopes"]


@dataclass(frozen=True, eq=False)
class Point:
    """The repetitions of one measurement, and what they are of.

    Attributes:
        collective, level, ranks, num_bytes: as the columns of samples.
        ranks_per_node, cores, stride: likewise.
        repetitions: seconds, shape (repetitions,).
        seconds: their robust centre.
    """

    collective: str
    level: str
    ranks: int
    num_bytes: int
    ranks_per_node: int
    cores: int
    stride: int
    repetitions: np.ndarray
    seconds: float

    @property
    def excess(self) -> float:
        """Ranks per core beyond one."""
        return excess(self.ranks_per_node, self.cores or None)

    @property
    def messages(self) -> float:
        """That each rank sends."""
        return 1.0 if self.collective == TRANSFER else float(Collective(self.collective).messages(self.ranks))

    @property
    def sent_bytes(self) -> float:
        """That each rank sends."""
        if self.collective == TRANSFER:
            return float(self.num_bytes)
        return Collective(self.collective).sent_bytes(self.ranks, self.num_bytes)


class Key(NamedTuple):
    """One parameter: of which collective ("" for all), of which group size (0 for all), which term."""

    collective: str
    group: int
    term: str


class Scope(NamedTuple):
    """Points that share parameters: which points (indices), the parameters, and the columns (points, parameters)."""

    points: np.ndarray
    keys: tuple[Key, ...]
    columns: np.ndarray


@dataclass(frozen=True)
class Form:
    """Which terms there are (table: module docstring)."""

    name: str
    by_collective: bool = True
    by_group: bool = False
    copy: bool = False
    crowding: bool = False


#: From few parameters to many.
FORMS = (
    Form("level", by_collective=False),
    Form("level + crowding", by_collective=False, crowding=True),
    Form("collective"),
    Form("collective + copy", copy=True),
    Form("collective + crowding", crowding=True),
    Form("collective + copy + crowding", copy=True, crowding=True),
    Form("group", by_group=True),
    Form("group + crowding", by_group=True, crowding=True),
)


def scopes(form: Form, points: Sequence[Point], is_fit: bool = True) -> list[Scope]:
    """The separate fits that a form consists of; for a prediction (not ``is_fit``) with every column that the form has."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, point in enumerate(points):
        scope = (point.collective if form.by_collective else "", point.ranks if form.by_group else 0)
        members.setdefault(scope, []).append(i)
    result = []
    for (collective, group), indices in members.items():
        columns = _columns(form, [points[i] for i in indices])
        if is_fit:
            columns = _independent(columns)
        keys = tuple(Key(collective, group, term) for term, _ in columns)
        result.append(Scope(np.array(indices), keys, np.stack([column for _, column in columns], axis=1)))
    return result


def _columns(form: Form, points: Sequence[Point]) -> list[tuple[str, np.ndarray]]:
    messages = np.array([point.messages for point in points])
    sent = np.array([point.sent_bytes for point in points])
    crowd = np.array([point.excess for point in points])
    columns = [("latency", messages), ("slowness", sent)]
    if form.copy:
        columns.append(("copy", np.array([float(point.num_bytes) for point in points])))
    if form.crowding:
        columns += [("crowded latency", messages * crowd), ("crowded slowness", sent * crowd)]
    return columns


def _independent(columns: Sequence[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Those that are no combination of the ones before them."""
    kept: list[tuple[str, np.ndarray]] = []
    rows: list[np.ndarray] = []
    for term, column in columns:
        if np.any(column):
            rows.append(column / np.abs(column).max())
            if np.linalg.matrix_rank(np.stack(rows)) == len(rows):
                kept.append((term, column))
            else:
                rows.pop()
    return kept
