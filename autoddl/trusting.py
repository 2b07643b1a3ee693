"""How far a plan can be trusted on a calibrated cluster: its rivals, and what the doubt about the parameters makes of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.calib.stageusage import usage_of_all, usage_of_step
from autoddl.calib.trust import RivalPlan, Trust, drawn_cluster, outside_notes, trust
from autoddl.costmodel.calibration import Calibration
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate, evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import PlanResult
from autoddl.search import solve

__all__ = ["PlanTrust", "trust_document", "trust_notes", "trust_of"]

#: Under how many draws of the parameters the best plan is searched for, to find rivals.
SEARCHES = 8


@dataclass(frozen=True)
class PlanTrust:
    """What is known of a plan's trustworthiness: the doubt, and where it lies outside of what was calibrated."""

    calibration: Calibration
    trust: Trust
    notes: tuple[str, ...]


def trust_of(found: PlanResult, stop: Stop | None = None) -> PlanTrust | None:
    """How sure a plan is; None where its cluster was not calibrated.

    Args:
        stop: where it is requested, no more rivals are searched for.
    """
    calibration, objective = found.cluster.calibration, found.options.base.objective
    if calibration is None or not calibration.replicates:
        return None
    candidates = [
        RivalPlan(name, usage_of_step(evaluation, objective)) for name, evaluation in _candidates(found, stop or Stop())
    ]
    known = trust(candidates, found.cluster, objective == "communication")
    return PlanTrust(calibration, known, trust_notes(found.evaluation))


def trust_notes(evaluation: Evaluation) -> tuple[str, ...]:
    """Where a plan lies outside of what its cluster was calibrated for."""
    return tuple(outside_notes(usage_of_all(evaluation), evaluation.cluster))


def _candidates(found: PlanResult, stop: Stop) -> Iterator[tuple[str, Evaluation]]:
    """The plan; its rivals; and without a pipeline the best plans under some draws of the parameters, at the plan's micro-batch."""
    graph, cluster, options, workload = found.graph, found.cluster, found.options.base, found.workload
    chain = chain_of(graph)
    yield "this plan", found.evaluation
    for rival in found.rivals:
        if rival.configuration is not None:
            yield rival.name, evaluate(chain, cluster, rival.configuration)
    if found.options.pipeline is not None:
        return
    seen = {tuple(found.strategies.items())}
    number = 0
    for k in _spread(_num_draws(cluster), SEARCHES):
        if stop.is_requested:
            return
        book = PriceBook(graph, drawn_cluster(cluster, k), workload, options.untied, options.summa)
        problem = book.problem(workload.batch, workload.micro_batch, options.objective)
        result = solve(problem.table, memory_limit=found.memory_limit_bytes, time_limit=5.0, stop=stop)
        if result.choice is None or not math.isfinite(result.cost):
            continue
        strategies = problem.strategies(result.choice)
        if tuple(strategies.items()) not in seen:
            seen.add(tuple(strategies.items()))
            number += 1
            name = f"alternative {number} ({_difference(found.strategies, strategies)})"
            yield name, evaluate_unpipelined(chain, cluster, workload, strategies)


def _num_draws(cluster: Cluster) -> int:
    assert cluster.calibration is not None
    return len(cluster.calibration.replicates[0].values)


def _spread(num: int, wanted: int) -> Sequence[int]:
    return sorted({round(i * (num - 1) / max(wanted - 1, 1)) for i in range(wanted)})


def _difference(chosen: Mapping[str, Strategy], other: Mapping[str, Strategy]) -> str:
    changed = [name for name in chosen if chosen[name] != other[name]]
    first = f"{changed[0]} at {other[changed[0]]}"
    return first if len(changed) == 1 else f"{first} and {len(changed) - 1} more"


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
