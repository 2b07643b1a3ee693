"""The forms (formulas) that are fitted to a network level, from one (alpha, beta) to terms for every collective and group size.

Every form predicts, for a group of p ranks and n bytes (messages and sent bytes as in :mod:`autoddl.costmodel.collectives`),

    seconds = messages (alpha + e alpha' + x alpha'') + sent (beta + e beta' + x beta'') + n gamma

==========================  ==============================================================================================
form                        parameters
==========================  ==============================================================================================
level                       alpha, beta of the level (as in the AutoDDL paper)
level + exchange            alpha'', beta'': the cost of x = 1, if pairs of ranks exchange (:func:`is_exchange`); else x = 0
collective                  alpha, beta of each collective
... + copy                  gamma of each: a cost per byte of local reduction and copying, independent of p
... + crowding              alpha', beta': the cost of e = max(0, ranks per core - 1), if ranks share cores
group                       alpha, beta of each collective in groups of each size (which includes gamma)
group + crowding            alpha', beta' for each of them
==========================  ==============================================================================================

CPU ranks need the terms of exchanges: two ranks request data over the connection that carries it, so the directions of an exchange
may follow each other (:mod:`.measure`).

All forms are linear in their parameters.  Each separates into *scopes* (the level; a collective; a collective and a group size)
without common parameters.  Columns that depend linearly on others (copy, for a single group size) are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.cluster import excess
from autoddl.costmodel.collectives import Collective

__all__ = ["FORMS", "Form", "Key", "MeasuredPoint", "Scope", "is_exchange", "scopes"]


def is_exchange(collective: str, ranks: int = 0) -> bool:
    """Whether ranks send to each other in pairs: in groups of two, and in all-to-alls, which CPU ranks run pair by pair.

    Args:
        collective: name of the collective, or of transfers.
        ranks: number of ranks of a group; 0 for more than two.
    """
    return collective == Collective.ALL_TO_ALL.value or (ranks == 2 and collective != TRANSFER)


@dataclass(frozen=True, eq=False)
class MeasuredPoint:
    """One measured setting with its repetitions.

    Attributes:
        collective, level, ranks, num_bytes, ranks_per_node, cores, stride: as the columns of samples
            (:mod:`autoddl.calib.measurements`).
        repetitions: seconds, shape (repetitions,).
        seconds: robust centre of the repetitions.
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
        """Ranks per core in excess of one."""
        return excess(self.ranks_per_node, self.cores or None)

    @property
    def messages(self) -> float:
        """Number of messages that each rank sends."""
        return 1.0 if self.collective == TRANSFER else float(Collective(self.collective).messages(self.ranks))

    @property
    def sent_bytes(self) -> float:
        """Number of bytes that each rank sends."""
        if self.collective == TRANSFER:
            return float(self.num_bytes)
        return Collective(self.collective).sent_bytes(self.ranks, self.num_bytes)


class Key(NamedTuple):
    """The name of a parameter.

    Attributes:
        collective: its collective; "" for all.
        group: its group size; 0 for all.
        term: ``latency``, ``slowness`` or ``copy``; ``crowded`` or ``exchanged`` before the first two.
    """

    collective: str
    group: int
    term: str


class Scope(NamedTuple):
    """Points that share parameters.

    Attributes:
        points: indices of the points.
        keys: the parameters.
        columns: the linear map from parameters to seconds, shape (points, parameters).
    """

    points: np.ndarray
    keys: tuple[Key, ...]
    columns: np.ndarray


@dataclass(frozen=True)
class Form:
    """The terms of a formula (table: module docstring).

    Attributes:
        name: of the form.
        by_collective, by_group: whether each collective and each group size has its own parameters.
        copy: whether there is a term gamma.
        crowding: whether there are terms alpha' and beta'.
        exchange: whether there are terms alpha'' and beta''.
    """

    name: str
    by_collective: bool = True
    by_group: bool = False
    copy: bool = False
    crowding: bool = False
    exchange: bool = False


#: All forms, from few parameters to many.
FORMS = (
    Form("level", by_collective=False),
    Form("level + crowding", by_collective=False, crowding=True),
    Form("level + exchange", by_collective=False, exchange=True),
    Form("level + exchange + crowding", by_collective=False, crowding=True, exchange=True),
    Form("collective"),
    Form("collective + copy", copy=True),
    Form("collective + crowding", crowding=True),
    Form("collective + copy + crowding", copy=True, crowding=True),
    Form("group", by_group=True),
    Form("group + crowding", by_group=True, crowding=True),
)


def scopes(form: Form, points: Sequence[MeasuredPoint], is_fit: bool = True) -> list[Scope]:
    """The scopes of a form, which are fitted separately.

    Args:
        form: the form.
        points: the points.
        is_fit: whether to leave out linearly dependent columns; predictions need all columns.
    """
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


def _columns(form: Form, points: Sequence[MeasuredPoint]) -> list[tuple[str, np.ndarray]]:
    messages = np.array([point.messages for point in points])
    sent = np.array([point.sent_bytes for point in points])
    crowd = np.array([point.excess for point in points])
    columns = [("latency", messages), ("slowness", sent)]
    if form.copy:
        columns.append(("copy", np.array([float(point.num_bytes) for point in points])))
    if form.crowding:
        columns += [("crowded latency", messages * crowd), ("crowded slowness", sent * crowd)]
    if form.exchange:
        exchanged = np.array([is_exchange(point.collective, point.ranks) for point in points])
        columns += [("exchanged latency", messages * exchanged), ("exchanged slowness", sent * exchanged)]
    return columns


def _independent(columns: Sequence[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """The columns that are not linear combinations of earlier ones."""
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
