"""Algorithms that pick one option for every variable of a cost table, and the verifier of their answers.

``solve(table, method=...)`` runs any of :data:`METHODS`; all return a :class:`Result`: a cost, a valid lower bound and a status.
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
    """The best choice that ``method`` finds within the limit on peak memory [bytes].

    ``evaluations`` and ``time_limit`` [s] are budgets (exact knows the latter alone), ``seed`` is for the random methods, a
    constant ``temperature`` [s] for Metropolis-Hastings, and with a ``cutoff`` [s] exact does not look for choices that cost as
    much or more; from what is ``known`` of the table within the limit (:func:`bracket`) it goes on.  When a ``stop`` is requested
    it ends as at its time limit: with its best choice, a valid bound, and the status INTERRUPTED.  Without one, Ctrl-C is a
    `KeyboardInterrupt` as everywhere in Python.

    Raises: SearchError, for an unknown method, a limit that is not positive, or a temperature of another method.
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
