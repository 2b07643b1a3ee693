"""The program that looks for a selection of rows below a threshold, against all selections."""

from __future__ import annotations

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.pipelines.joint.row_states import Extensions
from autoddl.pipelines.joint.selection_program import Crossing, SelectionProgram, SharedSeconds

#: Stages, two on the first worker and one on the second; rows of each stage; bounds; layouts at the sides.
WORKERS, STAGES, NUM_ROWS, NUM_BOUNDS, NUM_LAYOUTS = ((0, 2), (1,)), 3, 5, 2, 2
#: Selections this close to a limit, relatively, may count as below it or not.
CLOSE = 1e-5


class Instance:
    """Random rows with crossings between layouts, and with a weight that the first and the last stage share."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.rows = [
            Extensions(
                stop=np.full(NUM_ROWS, stage + 1),
                row=np.arange(NUM_ROWS),
                costs=rng.uniform(1, 2, (NUM_ROWS, NUM_BOUNDS)),
                memory=rng.uniform(1, 4, NUM_ROWS),
                buffer=rng.uniform(0, 1, NUM_ROWS),
                shared=np.zeros((NUM_ROWS, 0)),
                entry=rng.integers(0, NUM_LAYOUTS, NUM_ROWS),
                exit=rng.integers(0, NUM_LAYOUTS, NUM_ROWS),
            )
            for stage in range(STAGES)
        ]
        self.extra = rng.uniform(0, 0.5, (STAGES - 1, NUM_LAYOUTS, NUM_LAYOUTS, NUM_BOUNDS))
        self.shared = SharedSeconds(
            {0: rng.uniform(0, 1, NUM_ROWS), 2: rng.uniform(0, 1, NUM_ROWS)}, rng.uniform(0, 1, NUM_BOUNDS)
        )
        self.limit = float(rng.uniform(5, 12))
        costs = [self.cost(selected) for selected in self.selections()]
        self.threshold = float(np.quantile(costs, rng.uniform(0, 1))) if costs else 10.0
        self.threshold += float(rng.uniform(-0.05, 0.05))

    def selections(self) -> list[tuple[int, ...]]:
        """All selections that fit."""
        every = product(range(NUM_ROWS), repeat=STAGES)
        return [selected for selected in every if self.nbytes(selected) <= self.limit]

    def nbytes(self, selected: tuple[int, ...]) -> float:
        """Bytes of the fullest worker: resident ones of all its stages, and the largest buffer."""
        return max(
            sum(self.rows[stage].memory[selected[stage]] for stage in held)
            + max(self.rows[stage].buffer[selected[stage]] for stage in held)
            for held in WORKERS
        )

    def cost(self, selected: tuple[int, ...]) -> float:
        """The largest of all bounds."""
        total = np.zeros(NUM_BOUNDS)
        for stage, row in enumerate(selected):
            total += self.rows[stage].costs[row]
            if stage:
                before = self.rows[stage - 1].exit[selected[stage - 1]]
                total += self.extra[stage - 1, before, self.rows[stage].entry[row]]
        total += self.shared.weights * max(of_rows[selected[stage]] for stage, of_rows in self.shared.of_rows.items())
        return float(total.max())

    def program(self) -> SelectionProgram:
        """The program of the instance."""
        crossings = [
            Crossing(stage, before, behind, self.extra[stage, before, behind])
            for stage, before, behind in product(range(STAGES - 1), range(NUM_LAYOUTS), range(NUM_LAYOUTS))
        ]
        # Every row of a worker with a single stage fits.
        crowded = [held for held in WORKERS if len(held) > 1]
        return SelectionProgram(self.rows, crowded, self.limit, self.threshold, crossings, [self.shared])


@given(st.integers(0, 10**6))
def test_a_selection_is_found_if_there_is_one(seed):
    instance = Instance(seed)
    costs = {selected: instance.cost(selected) for selected in instance.selections()}
    found = instance.program().find(60.0)
    if found is None:
        assert all(cost > instance.threshold * (1 - CLOSE) for cost in costs.values())
    else:
        assert instance.cost(tuple(found)) <= instance.threshold * (1 + CLOSE)
        assert instance.nbytes(tuple(found)) <= instance.limit * (1 + CLOSE)


@settings(max_examples=20)
@given(st.integers(0, 10**6))
def test_all_selections_are_found_if_each_is_excluded(seed):
    """Rows that another row of the same layouts beats in everything are left out, so that the best selection comes among them."""
    instance = Instance(seed)
    program, found = instance.program(), []
    while program.is_possible and (selected := program.find(60.0)) is not None:
        assert selected not in found
        found.append(selected)
        program.exclude(selected)
    clear = {
        selected: cost
        for selected in instance.selections()
        if (cost := instance.cost(selected)) < instance.threshold * (1 - CLOSE)
    }
    if clear:
        best = min(clear.values())
        assert min(instance.cost(tuple(selected)) for selected in found) <= best * (1 + CLOSE)
