"""The program that selects the rows of all stages together, against all selections."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.pipelines.joint import row_program
from autoddl.pipelines.joint.row_program import select_rows

#: Stages, two on the first worker and one on the second, and rows of each.
WORKERS, NUM_ROWS = ((0, 2), (1,)), 4
STAGES = 3
#: Forward, backward, recomputation and all-reduce of all stages, then two transfers in each direction.
PARTS = [slice(STAGES * part, STAGES * (part + 1)) for part in range(4)]
NUM_TERMS = 4 * STAGES + 4


@pytest.fixture(scope="module", autouse=True)
def all_the_time_it_takes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_program, "_SECONDS", 60.0)
        patch.setattr(row_program, "_ALL_SECONDS", 60.0)
        yield


@given(st.integers(0, 10**6))
def test_selections_are_the_best_that_fit(seed):
    """A step is the longest of a few paths. Transfers depend on no rows here, so that the program is exact but for its gaps. The
    first and the last stage exchange gradients, which takes both as long as the slower one."""
    rng = np.random.default_rng(seed)
    most_exchange = rng.integers(0, 3)
    rows = [
        (
            rng.uniform(1, 2, (NUM_ROWS, 4)),
            rng.uniform(1, 4, NUM_ROWS),
            rng.uniform(0, 1, NUM_ROWS),
            rng.uniform(0, most_exchange, NUM_ROWS) * (stage in (0, STAGES - 1)),
        )
        for stage in range(STAGES)
    ]
    paths = rng.integers(0, 5, (6, NUM_TERMS)).astype(float)
    transfers = rng.uniform(0, 0.2, 4)

    def times_of(selected):
        own = np.array([rows[stage][0][row] for stage, row in enumerate(selected)])
        own[[0, -1], 3] += max(rows[stage][3][selected[stage]] for stage in (0, STAGES - 1))
        return np.concatenate([own.T.ravel(), transfers])

    def longest(times):
        steps = paths @ times
        return float(steps.max()), paths[int(steps.argmax())]

    def bytes_of(selected):
        return max(
            sum(rows[stage][1][selected[stage]] for stage in held)
            + max(rows[stage][2][selected[stage]] for stage in held)
            for held in WORKERS
        )

    every = list(product(range(NUM_ROWS), repeat=STAGES))
    limit = float(np.quantile([bytes_of(selected) for selected in every], rng.uniform(0.1, 1)))
    fitting = {
        selected: longest(times_of(selected))[0] for selected in every if bytes_of(selected) <= limit * (1 - 3e-6)
    }
    first = next(iter(fitting), None)
    if first is None:
        return
    known = list(paths[: rng.integers(0, 3)])
    found = tuple(select_rows(rows, WORKERS, limit, first, times_of, longest, PARTS, known))
    assert bytes_of(found) <= limit
    assert longest(times_of(found))[0] <= min(fitting.values()) * 1.005
