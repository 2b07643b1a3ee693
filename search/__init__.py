"""Search algorithms, which choose one option for every variable of a cost table, the planner, and the verifier of results.

``solve(table, method=...)`` runs any of :data:`METHODS`.  All return a :class:`Result` with a cost, a valid lower bound and a
status.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autoddl.costmodel.stopping import Deadline, Stop, StopRequestedError
from autoddl.costmodel.table import CostTable

from .branching import Bracket, bracket, lower_bound
from .exact import exact, smallest_memory
from .exhaustive import exhaustive
from .heuristics import coordinate_descent, metropolis_hastings, random_search
from .marginals import Forced, Marginals, marginals, nearest
from .progress import Progress, progress_bar, silent
from .result import Result, SearchError, Status
from .separable import separable_bound, separable_memory

__all__ = [
    "METHODS",
    "Bracket",
    "Deadline",
    "Forced",
    "Marginals",
    "Progress",
    "Result",
    "SearchError",
    "Status",
    "Stop",
    "StopRequestedError",
    "bracket",
    "coordinate_descent",
    "exact",
    "exhaustive",
    "lower_bound",
    "marginals",
    "metropolis_hastings",
    "nearest",
    "progress_bar",
    "random_search",
    "separable_bound",
    "separable_memory",
    "smallest_memory",
    "solve",
]

METHODS: Mapping[str, Callable[..., Result]] = {
    "exact": exact,
    "exhaustive": exhaustive,
    "coordinate-descent": coordinate_descent,
    "metropolis-hastings": metropolis_hastings,
    "random": random_search,
}
_SEEDED = ("coordinate-descent", "metropolis-hastings", "random")


def solve(
    table: CostTable,
    *,
    method: str = "exact",
    memory_limit: float | None = None,
    evaluations: int | None = None,
    time_limit: float | None = None,
    seed: int = 0,
    temperature: float | None = None,
    cutoff: float = math.inf,
    progress: Progress = silent,
    known: Bracket | None = None,
    stop: Stop | None = None,
) -> Result:
    """Minimise the cost of a table under a limit on peak memory.

    Args:
        table: the cost table.
        method: one of :data:`METHODS`.
        memory_limit: bytes per device; None for no limit.
        evaluations: budget of evaluations; ignored by ``exact``.
        time_limit: budget in seconds.
        seed: of the random methods.
        temperature: constant temperature [s] of Metropolis-Hastings; None for annealing.
        cutoff: ``exact`` does not search for choices that cost this much [s] or more.
        progress: called with the state of the search from time to time.
        known: result of :func:`bracket` for this table and limit, from which ``exact`` continues.
        stop: when it is requested, the search ends with its best choice, a valid bound and the status INTERRUPTED.  Without it,
            Ctrl-C raises `KeyboardInterrupt` as usual.

    Raises:
        SearchError: the method is unknown, a limit is not positive, or the method has no temperature.

    >>> import numpy as np
    >>> from autoddl.costmodel.table import Edge
    >>> options = np.array([1.0, 2.0]), np.array([2.0, 1.0])
    >>> edge = Edge(0, 1, np.array([[0.0, 3.0], [3.0, 0.0]]))
    >>> result = solve(CostTable(("a", "b"), options, options, options, (edge,)))
    >>> result.choice, result.cost, result.lower_bound, str(result.status)
    ((0, 0), 3.0, 3.0, 'optimal')
    """
    if method not in METHODS:
        raise SearchError(f"method {method!r} is not one of {', '.join(METHODS)}")
    options: dict[str, Any] = {
        "memory_limit": memory_limit,
        "time_limit": time_limit,
        "progress": progress,
        "stop": stop,
    }
    if temperature is not None:
        if method != "metropolis-hastings":
            raise SearchError(f"temperature {temperature:g} is for metropolis-hastings; {method} has none")
        options["temperature"] = temperature
    if method == "exact":
        options["cutoff"] = cutoff
        options["known"] = known
    else:
        options["evaluations"] = evaluations
    if method in _SEEDED:
        options["seed"] = seed
    return METHODS[method](table, **options)
