"""Trust in a plan for a calibrated cluster: collects the rivals of the plan and compares their costs.

:mod:`autoddl.calib.trust` computes the probability that the plan is the best of these plans, given the uncertainty of the cluster's
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.calib.stageusage import usage_of_all, usage_of_step
from autoddl.calib.trust import RivalPlan, Trust, drawn_cluster, outside_notes, trust
from autoddl.costmodel.calibration import Calibration
from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.graph_meshes import family_of
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate, evaluate_unpipelined
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.result import PlanResult
from autoddl.search import solve

__all__ = ["PlanTrust", "trust_document", "trust_notes", "trust_of"]

#: Draws of the parameters for each of which the best plan is searched, as a rival.
NUM_SEARCHED_DRAWS = 8
#: Seconds that each of these searches may take.
MAX_SEARCH_S = 5.0


@dataclass(frozen=True)
class PlanTrust:
    """The trust in a plan.

    Attributes:
        calibration: Calibration of the plan's cluster.
        trust: Probability that the plan is the best one, its rivals, and the measurement that would reduce the uncertainty.
        notes: Where the plan uses the cluster outside of the range of the calibration's measurements.
    """

    calibration: Calibration
    trust: Trust
    notes: tuple[str, ...]


def trust_of(result: PlanResult, stop: Stop | None = None) -> PlanTrust | None:
    """Return the trust in the plan of a search, or None if its cluster is not calibrated.

    Args:
        result: Result of the search for the plan.
        stop: Ends the search for rivals when it is requested.
    """
    calibration, objective = result.cluster.calibration, result.options.base.objective
    if calibration is None or not calibration.replicates:
        return None
    candidates = [
        RivalPlan(name, usage_of_step(evaluation, objective))
        for name, evaluation in _candidates(result, stop or Stop())
    ]
    computed = trust(candidates, result.cluster, objective == "communication")
    return PlanTrust(calibration, computed, trust_notes(result.evaluation))


def trust_notes(evaluation: Evaluation) -> tuple[str, ...]:
    """Return notes on where a plan uses its cluster outside of the range of the calibration's measurements."""
    return tuple(outside_notes(usage_of_all(evaluation), evaluation.cluster))


def _candidates(result: PlanResult, stop: Stop) -> Iterator[tuple[str, Evaluation]]:
    """Yield the plan and its rivals with their names.

    For a search without pipelines, the rivals include the best plans for some draws of the parameters, with the plan's micro-batch.
    """
    chain = chain_of(result.graph)
    yield "this plan", result.evaluation
    for rival in result.rivals:
        if rival.configuration is not None:
            yield rival.name, evaluate(chain, result.cluster, rival.configuration)
    if result.options.pipeline is None:
        for number, strategies in enumerate(_best_for_draws(result, stop), 1):
            name = f"alternative {number} ({_difference(result.strategies, strategies)})"
            yield name, evaluate_unpipelined(chain, result.cluster, result.workload, strategies)


def _best_for_draws(result: PlanResult, stop: Stop) -> Iterator[Mapping[str, Strategy]]:
    """Yield the strategies of the best plans for some draws of the parameters; each plan differs from all previous ones."""
    options, workload = result.options.base, result.workload
    known = {tuple(result.strategies.items())}
    executor = family_of(options.executor, result.strategies.values(), result.cluster.num_devices)
    for draw in _evenly_spaced(_num_draws(result.cluster), NUM_SEARCHED_DRAWS):
        if stop.is_requested:
            return
        cluster = drawn_cluster(result.cluster, draw)
        book = PriceBook(
            result.graph, cluster, workload, options.untied, options.summa, executor=executor, choices=options.choices
        )
        problem = book.problem(workload.batch, workload.micro_batch, options.objective)
        best = solve(problem.table, memory_limit=result.memory_limit_bytes, time_limit=MAX_SEARCH_S, stop=stop)
        if best.choice is None or not math.isfinite(best.cost):
            continue
        strategies = problem.strategies(best.choice)
        if tuple(strategies.items()) not in known:
            known.add(tuple(strategies.items()))
            yield strategies


def _num_draws(cluster: Cluster) -> int:
    assert cluster.calibration is not None
    return len(cluster.calibration.replicates[0].values)


def _evenly_spaced(num: int, num_chosen: int) -> Sequence[int]:
    """Return up to ``num_chosen`` evenly spaced numbers from 0 to ``num - 1``, in ascending order."""
    return sorted({round(i * (num - 1) / max(num_chosen - 1, 1)) for i in range(num_chosen)})


def _difference(chosen: Mapping[str, Strategy], other: Mapping[str, Strategy]) -> str:
    """Return a short text that names the first layer with another strategy, and the number of the other such layers."""
    changed = [name for name in chosen if chosen[name] != other[name]]
    first = f"{changed[0]} at {other[changed[0]]}"
    return first if len(changed) == 1 else f"{first} and {len(changed) - 1} more"


# ---- JSON --------------------------------------------------------------------------------------------------------------------


def trust_document(plan_trust: PlanTrust | None) -> dict[str, Any] | None:
    """Return the field ``trust`` of a plan's JSON document; None for a cluster that is not calibrated."""
    if plan_trust is None:
        return None
    computed, measurement = plan_trust.trust, plan_trust.trust.measurement
    return {
        "calibrated": plan_trust.calibration.date,
        "probability": computed.probability,
        "expected_regret": computed.expected_regret,
        "draws": computed.num_draws,
        "rivals": [{"name": name, "probability": probability} for name, probability in computed.rivals],
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
        "notes": list(plan_trust.notes),
    }
