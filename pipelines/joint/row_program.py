"""The best selection of one row for every stage of a cut: an integer program with cutting planes.

Stage s has candidate rows, each with its seconds t(s, i) per term and its bytes.  The first and the last stage may exchange
gradients, which takes both as long as the one with the longer seconds e(s, i).  The variable x(s, i) is 1 if row i is selected.
With the paths P of the schedule's graph that are known so far (:mod:`.setting_search`), n(P, s) the number of times that a path
passes each term of stage s, and n(P) that of the all-reduces of the first and the last stage, the program is

    minimise  theta  subject to
        theta  >=  sum over s, i of (n(P, s) . t(s, i)) x(s, i)  +  n(P) g  +  transfers(P)      for every known path P
        g      >=  sum over i of e(s, i) x(s, i)                                                 for the first and the last stage
        the constraints of :mod:`.row_constraints`

The longest path at the solution is the next known path, until it is one already or theta reaches the best step so far.  Transfers
depend on the rows at both ends; they are those of the selection that a path was found at.  So the result is a heuristic's: a
selection that fits, whose step is that of the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from autoddl.costmodel.stopping import Deadline

from .row_constraints import RowConstraints

__all__ = ["Longest", "select_rows"]

#: Returns the step at the seconds of all terms, shape (terms,), and the counts of its longest path, shape (terms,).
Longest = Callable[[np.ndarray], "tuple[float, np.ndarray]"]

#: Seconds of processor time after which no further program is solved, and the seconds and relative gap of each.
_ALL_SECONDS, _SECONDS, _GAP = 1.2, 0.4, 2e-3
#: The solver keeps to limits up to a little less than this part of them.
_TOLERANCE = 2e-6
#: A selection has to be better by this relative amount to be searched for.
_LEAST_GAIN = 5e-4


def select_rows(
    rows: Sequence[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]],
    workers: Sequence[Sequence[int]],
    limit_bytes: float,
    selected: Sequence[int],
    times_of: Callable[[Sequence[int]], np.ndarray],
    longest: Longest,
    parts: Sequence[slice],
    known_paths: Sequence[np.ndarray] = (),
) -> list[int]:
    """Return a selection of rows with a short step that fits; the given one if none is shorter.

    Args:
        rows: Per stage the seconds of its terms without the exchange, shape (rows, 4), the resident bytes, the buffer bytes, and
            the seconds of the exchange, each of shape (rows,).
        workers: The stages of each worker.
        limit_bytes: Memory per device.
        selected: A selection that fits: the row of every stage.
        times_of: Returns the seconds of all terms of a selection, shape (terms,), with transfers.
        longest: Returns the step at such times, and its longest path.
        parts: The terms of the stages, in the order of the columns of seconds.
        known_paths: Paths that are likely to be long, each of shape (terms,).
    """
    # Imported here because loading SciPy's optimizers takes longer than most searches.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    useful = [_undominated(*of_stage) for of_stage in rows]
    kept = [tuple(figures[own] for figures in of_stage) for of_stage, own in zip(rows, useful)]
    memory, buffers = ([of_stage[column] / limit_bytes for of_stage in kept] for column in (1, 2))
    best, times = list(selected), times_of(selected)
    best_s, path = longest(times)
    # Costs are scaled so that theta is 1 at the step of the given selection.
    scale_s = best_s
    fixed = RowConstraints(memory, buffers, workers, 1.0 - _TOLERANCE, num_others=2)
    exchange, size = fixed.others[0], fixed.size
    for stage in (0, len(rows) - 1):
        fixed.put(-np.inf, 0.0, [(exchange, -1.0), (fixed.spans[stage], kept[stage][3] / scale_s)])
    paths = list(known_paths)
    deadline = Deadline(_ALL_SECONDS, timer=time.process_time)
    is_new = True  # whether the last selection has a longest path that was not known
    while is_new and not deadline.is_over:
        if not _is_among(path, paths):
            paths.append(path)
        bounds = np.array([_bound(known, kept, parts, size) for known in paths]) / scale_s
        bounds[:, exchange] = [[known[parts[3]][[0, -1]].sum()] for known in paths]
        bounds[:, -1] = -1.0
        transfers = np.array([_transfers(known, times, parts) for known in paths]) / scale_s
        solution = milp(
            np.append(np.zeros(size - 1), 1.0),
            constraints=[
                fixed.constraint,
                LinearConstraint(csr_matrix(bounds), -np.inf, -transfers),
            ],
            integrality=fixed.integrality,
            bounds=Bounds(np.zeros(size), np.append(np.ones(size - 2), [np.inf, np.inf])),
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
        if solution.x is None or solution.x[-1] * scale_s > best_s * (1 - _LEAST_GAIN):
            break
        chosen = [int(own[np.argmax(solution.x[span])]) for own, span in zip(useful, fixed.spans)]
        times = times_of(chosen)
        step, path = longest(times)
        is_new = not _is_among(path, paths)
        if step < best_s:
            best, best_s = chosen, step
    return best


def _is_among(path: np.ndarray, paths: Sequence[np.ndarray]) -> bool:
    return any(np.array_equal(path, known) for known in paths)


def _bound(path: np.ndarray, rows: Sequence[Sequence[np.ndarray]], parts: Sequence[slice], size: int) -> np.ndarray:
    """The seconds of every row along a path, followed by zeros."""
    counts = np.column_stack([path[part] for part in parts])
    seconds = np.concatenate([of_stage[0] @ own for of_stage, own in zip(rows, counts)])
    return np.append(seconds, np.zeros(size - len(seconds)))


def _transfers(path: np.ndarray, times: np.ndarray, parts: Sequence[slice]) -> float:
    """The seconds of a path in terms that belong to no stage."""
    of_stages = sum(float(path[part] @ times[part]) for part in parts)
    return float(path @ times) - of_stages


def _undominated(times: np.ndarray, *others: np.ndarray) -> np.ndarray:
    """The indices of the rows that no other row is at least as good as in everything."""
    vectors = np.column_stack([times, *others])
    order = np.lexsort(vectors.T[::-1])
    kept: list[int] = []
    for row in order.tolist():
        if not kept or not (vectors[kept] <= vectors[row]).all(axis=1).any():
            kept.append(row)
    return np.array(kept)
