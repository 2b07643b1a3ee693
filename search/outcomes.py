"""Validation of limits, and results that several methods share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from autoddl.costmodel.stopping import Deadline, Stop, StopRequestedError
from autoddl.costmodel.table import CostTable

from .result import Result, SearchError, Status

__all__ = ["check_limits", "impossible", "infeasible", "unless_stopped", "unproven"]


def check_limits(
    *, memory_limit: float | None = None, time_limit: float | None = None, evaluations: int | None = None
) -> None:
    """Validate limits on memory [bytes], time [s] and evaluations.

    Raises:
        SearchError: a limit is not positive.
    """
    if memory_limit is not None and not memory_limit > 0:
        raise SearchError(f"memory limit {memory_limit!r} should be a positive number of bytes, or None")
    if time_limit is not None and not time_limit > 0:
        raise SearchError(f"time limit {time_limit!r} should be a positive number of seconds, or None")
    if evaluations is not None and not (isinstance(evaluations, int) and evaluations >= 1):
        raise SearchError(f"limit on evaluations {evaluations!r} should be a whole number of at least 1")


def impossible(table: CostTable, method: str, start: float, memory_limit: float | None) -> Result:
    """The result if no choice has finite cost at any memory limit."""
    return infeasible(table, method, start, memory_limit, math.inf)


def infeasible(
    table: CostTable,
    method: str,
    start: float,
    memory_limit: float | None,
    smallest_memory: float | None,
    statistics: Mapping[str, float] | None = None,
    evaluations: int = 0,
) -> Result:
    """The result if nothing fits.

    Args:
        table, method, memory_limit, statistics, evaluations: of the result.
        start: begin of the search on the clock ``time.perf_counter``.
        smallest_memory: the smallest limit that some choice fits [bytes]; None if a stop was requested before it was known.
    """
    return Result(
        method=method,
        status=Status.INTERRUPTED if smallest_memory is None else Status.INFEASIBLE,
        choice=None,
        cost=math.inf,
        lower_bound=math.inf,
        memory_bytes=math.nan,
        space_size=table.space_size,
        evaluations=evaluations,
        seconds=time.perf_counter() - start,
        memory_limit_bytes=memory_limit,
        smallest_memory_bytes=smallest_memory,
        statistics=statistics or {},
    )


def unproven(deadline: Deadline) -> Status:
    """The status of a search that ends without a proof."""
    return Status.INTERRUPTED if deadline.stop.is_requested else Status.LIMIT_REACHED


def unless_stopped(find: Callable[[Stop], float], stop: Stop) -> float | None:
    """The result of ``find``; None if it raised `StopRequestedError`."""
    try:
        return find(stop)
    except StopRequestedError:
        return None
