"""How far a plan can be trusted on a calibrated cluster: its rivals, and what the doubt about the parameters makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.calib.trust import Candidate, Trust, Usage, drawn_cluster, outside_notes, trust, usage_of
from autoddl.costmodel.assessment import assess
from autoddl.costmodel.calibration import Calibration
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search import solve
from autoddl.search.planner import Planned

__all__ = ["PlanTrust", "trust_document", "trust_of"]

#: Under how many draws of the parameters the best plan is searched for, to find rivals.
SEARCHES = 8


@dataclass(frozen=True)
class PlanTrust:
    """What is known of a plan's trustworthiness: the doubt, and where it lies outside of what was calibrated."""

    calibration: Calibration
    trust: Trust
    notes: tuple[str, ...]


def trust_of(planned: Planned, stop: Stop | None = None) -> PlanTrust | None:
    """How sure a plan is; None where its cluster was not calibrated, or where the ``stop`` was requested before it was known."""
    stop = stop or Stop()
    calibration = planned.cluster.calibration
    if calibration is None or not calibration.replicates:
        return None
    communication_only = planned.options.objective == "communication"
    candidates = list(_candidates(planned, stop))
    if stop.is_requested:  # without all rivals nothing is known
        return None
    found = trust(candidates, planned.cluster, communication_only)
    return PlanTrust(calibration, found, tuple(outside_notes(candidates[0].usage, planned.cluster)))


def _candidates(planned: Planned, stop: Stop) -> Iterator[Candidate]:
    """The plan; its baselines; and the best plans under some draws of the parameters, at the plan's micro-batch."""
    graph, cluster, workload = planned.graph, planned.cluster, planned.workload
    yield Candidate("this plan", _usage(graph, cluster, workload, planned.strategies))
    for figures in planned.baselines:
        if figures.workload is not None:
            yield Candidate(figures.name, _usage(graph, cluster, figures.workload, figures.strategies))
    seen = {tuple(planned.strategies.items())}
    number = 0
    for k in _spread(_num_draws(cluster), SEARCHES):
        if stop.is_requested:
            return
        book = PriceBook(graph, drawn_cluster(cluster, k), workload, planned.options.untied, planned.options.summa)
        problem = book.problem(workload.batch, workload.micro_batch, planned.options.objective)
        result = solve(problem.table, memory_limit=planned.memory_limit_bytes, time_limit=5.0, stop=stop)
        if result.choice is None or not math.isfinite(result.cost):
            continue
        strategies = problem.strategies(result.choice)
        if tuple(strategies.items()) not in seen:
            seen.add(tuple(strategies.items()))
            number += 1
            name = f"alternative {number} ({_difference(planned.strategies, strategies)})"
            yield Candidate(name, _usage(graph, cluster, workload, strategies))


def _num_draws(cluster: Cluster) -> int:
    assert cluster.calibration is not None
    return len(cluster.calibration.replicates[0].values)


def _spread(num: int, wanted: int) -> Sequence[int]:
    return sorted({round(i * (num - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _difference(chosen: Mapping[str, Strategy], other: Mapping[str, Strategy]) -> str:
    changed = [name for name in chosen if chosen[name] != other[name]]
    first = f"{changed[0]} at {other[changed[0]]}"
    return first if len(changed) == 1 else f"{first} and {len(changed) - 1} more"


def _usage(graph: LayerGraph, cluster: Cluster, workload: Workload, strategies: Mapping[str, Strategy]) -> Usage:
    return usage_of(assess(graph, cluster, workload, strategies), cluster, workload)


# ---- As programs read it -----------------------------------------------------------------------------------------------------


def trust_document(known: PlanTrust | None) -> dict[str, Any] | None:
    """The field of the plan's JSON."""
    if known is None:
        return None
    found, measurement = known.trust, known.trust.measurement
    return {
        "calibrated": known.calibration.date,
        "probability": found.probability,
        "expected_regret": found.expected_regret,
        "draws": found.num_draws,
        "rivals": [{"name": name, "probability": probability} for name, probability in found.rivals],
        "measurement": None
        if measurement is None
        else {
            "rival": measurement.rival,
            "collective": measurement.collective or "local work",
            "level": measurement.level or "device",
            "ranks": measurement.ranks,
            "bytes": measurement.num_bytes,
            "share": measurement.share,
        },
        "notes": list(known.notes),
    }
