"""Linear constraints on selections of one row for each stage of a cut.

The variable x(s, i) is 1 if row i of stage s is selected, and buffer(w) is the largest buffer of worker w.  Bytes are in units of
the memory limit.

    sum over i of x(s, i)  =  1                                                      for every stage s
    sum over w's stages s and i of bytes(s, i) x(s, i)  +  buffer(w)  <=  most       for every worker w
    buffer(w)  >=  sum over i of buffer(s, i) x(s, i)                                for every stage s of w
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint

__all__ = ["RowConstraints"]


class RowConstraints:
    """The constraints of one cut; others can be added.  The variables are those of all rows, of buffers, and further ones.

    Args:
        memory, buffers: Per stage the resident bytes and the buffer bytes of its rows, in units of the limit.
        workers: The stages of each worker whose memory is limited.
        most: Largest memory of a worker, in units of the limit.
        num_others: Number of further variables.

    Attributes:
        spans: Per stage the variables of its rows.
        others: The further variables.
        num_choices: Number of the variables of all rows.
        size: Number of all variables.
    """

    def __init__(
        self,
        memory: Sequence[np.ndarray],
        buffers: Sequence[np.ndarray],
        workers: Sequence[Sequence[int]],
        most: float,
        num_others: int,
    ) -> None:
        ends = np.cumsum([len(of_stage) for of_stage in memory]).tolist()
        self.spans = [slice(end - len(of_stage), end) for end, of_stage in zip(ends, memory)]
        self.num_choices: int = ends[-1]
        self.size = self.num_choices + len(workers) + num_others
        behind = [slice(number, number + 1) for number in range(self.num_choices, self.size)]
        self.others = behind[len(workers) :]
        self._rows: list[np.ndarray] = []
        self._low: list[float] = []
        self._high: list[float] = []
        for span in self.spans:
            self.put(1.0, 1.0, [(span, 1.0)])
        for buffer, held in zip(behind, workers):
            self.put(-np.inf, most, [(buffer, 1.0), *((self.spans[stage], memory[stage]) for stage in held)])
            for stage in held:
                self.put(-np.inf, 0.0, [(buffer, -1.0), (self.spans[stage], buffers[stage])])

    def put(self, low: float, high: float, parts: Sequence[tuple[slice, np.ndarray | float]]) -> None:
        """Add a constraint: its least and largest value, and its coefficients by parts of the variables."""
        coefficients = np.zeros(self.size)
        for span, values in parts:
            coefficients[span] = values
        self._rows.append(coefficients)
        self._low.append(low)
        self._high.append(high)

    @property
    def constraint(self) -> LinearConstraint:
        """All constraints for SciPy's `milp`."""
        # Imported here because loading SciPy's optimizers takes longer than most searches.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_matrix

        return LinearConstraint(csr_matrix(np.array(self._rows)), self._low, self._high)

    @property
    def integrality(self) -> np.ndarray:
        """1 for the variables of rows, 0 for others."""
        return np.append(np.ones(self.num_choices), np.zeros(self.size - self.num_choices))
