"""Rankings: strategies are chosen, run on local ranks, and compared with their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.workload import Workload

from .campaign import STALL_S, progress
from .candidates import RankedStrategy, spread_strategies
from .pictures import saved
from .ranking import Score, fastest, score

__all__ = ["MeasuredRanking", "RankSettings", "draw_ranking", "rank_locally", "ranking_document"]


@dataclass(frozen=True)
class RankSettings:
    """Options of a ranking.

    Attributes:
        count: number of strategies to run.
        rounds: number of visits of each strategy.
        repetitions: number of repetitions of a visit.
        budget_s: time after which no round begins; None for no limit.
        with_steps: whether to run whole training steps besides communication.
        seed: of the choice, the order and the data.
        quiet: show no progress bar.
        device: the type of device to run on.
    """

    count: int = 40
    rounds: int = 6
    repetitions: int = 3
    budget_s: float | None = None
    with_steps: bool = True
    seed: int = 0
    quiet: bool = True
    device: str = CPU

    def __post_init__(self) -> None:
        for name in ("rounds", "repetitions"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} should be at least 1")
        if self.budget_s is not None and not self.budget_s > 0:
            raise UserError(f"budget {self.budget_s:g} s should be more than 0 seconds")


@dataclass(frozen=True)
class MeasuredRanking:
    """Predicted and measured times of strategies.

    Attributes:
        graph, cluster, workload: the model, and what its strategies were priced for.
        strategies: the strategies that ran, with their predictions.
        communication, step: measured seconds, shape (strategies, rounds); ``step`` is None if steps did not run.
        disturbed: fraction of visits in which other processes used more than a twentieth of the cores.
        refused: (name, reason) of strategies that the runtime cannot run.
        peak_memory_bytes: peak memory of the rank that needed most for any strategy; None if unknown.
    """

    graph: LayerGraph
    cluster: Cluster
    workload: Workload
    strategies: tuple[RankedStrategy, ...]
    communication: np.ndarray
    step: np.ndarray | None
    disturbed: float
    refused: tuple[tuple[str, str], ...]
    peak_memory_bytes: int | None = None

    @property
    def scores(self) -> dict[str, Score]:
        """The scores of ``communication``, and of ``step`` if steps ran."""
        found = {"communication": score([s.communication_s for s in self.strategies], self.communication)}
        if self.step is not None:
            found["step"] = score([s.step_s for s in self.strategies], self.step)
        return found


def rank_locally(graph: LayerGraph, cluster: Cluster, workload: Workload, settings: RankSettings) -> MeasuredRanking:
    """Run strategies on as many local ranks as the cluster has devices.

    Raises:
        UserError: ranks cannot be started, or fewer than two strategies can be run.
        RankError: a rank failed.
    """
    from autoddl.pipelines.runtime.ranks.launcher import RankPool
    from autoddl.pipelines.runtime.ranks.network import namespace_available

    from .measure import DISTURBED
    from .replay import ReplayOptions, Visit, rank_job

    if cluster.num_devices < 2:
        raise UserError(f"ranks {cluster.num_devices} should be at least 2: one rank has nothing to communicate")
    strategies = spread_strategies(graph, cluster, workload, settings.count, settings.seed)
    options = ReplayOptions(
        graph,
        cluster,
        workload,
        tuple(strategy.strategies for strategy in strategies),
        settings.rounds,
        settings.repetitions,
        settings.budget_s,
        settings.with_steps,
        settings.seed,
        settings.device,
    )
    visits: list[Visit] = []
    with progress(f"{cluster.num_devices} ranks", settings.rounds * len(strategies), settings.quiet, "visit") as bar:

        def keep(rank: int, visit: Visit) -> None:
            visits.append(visit)
            bar.update()

        is_private = bool(namespace_available())  # if possible, keep others from OneFlow's ports
        with RankPool(cluster.num_devices, private_network=is_private, stall_timeout_s=STALL_S) as pool:
            pool.run(rank_job, options, on_report=keep)
    refused = {visit.candidate: visit.refused for visit in visits if visit.refused is not None}
    ran = [i for i in range(len(strategies)) if i not in refused]
    if len(ran) < 2:
        raise UserError(
            f"only {len(ran)} of {len(strategies)} strategies of {graph.name} can be run: {next(iter(refused.values()))}"
        )
    of = {(visit.candidate, visit.round): visit for visit in visits}
    rounds = sorted({visit.round for visit in visits if visit.refused is None})
    table = [[of[i, number] for number in rounds] for i in ran]
    step = None
    if settings.with_steps:
        step = np.array([[visit.step_s for visit in row] for row in table], dtype=float)
    return MeasuredRanking(
        graph,
        cluster,
        workload,
        tuple(strategies[i] for i in ran),
        np.array([[visit.communication_s for visit in row] for row in table]),
        step,
        float(np.mean([visit.foreign > DISTURBED for row in table for visit in row])),
        tuple((strategies[i].name, reason) for i, reason in refused.items()),
        max(
            (visit.peak_memory_bytes for row in table for visit in row if visit.peak_memory_bytes is not None),
            default=None,
        ),
    )


def ranking_document(ranking: MeasuredRanking) -> dict[str, Any]:
    """The ranking as a JSON document; times are in seconds, one per round."""
    return {
        "format": "autoddl-ranking",
        "version": 1,
        "model": ranking.graph.name,
        "ranks": ranking.cluster.num_devices,
        "workload": ranking.workload.document(),
        "scores": {name: _finite(asdict(own)) for name, own in ranking.scores.items()},
        "disturbed": ranking.disturbed,
        "peak_memory_bytes": ranking.peak_memory_bytes,
        "strategies": [
            {
                "name": own.name,
                "predicted_communication_s": own.communication_s,
                "predicted_step_s": own.step_s,
                "communication_s": ranking.communication[i].tolist(),
                "step_s": None if ranking.step is None else ranking.step[i].tolist(),
                "layers": {name: str(strategy) for name, strategy in own.strategies.items()},
            }
            for i, own in enumerate(ranking.strategies)
        ],
        "refused": [{"name": name, "reason": reason} for name, reason in ranking.refused],
    }


def _finite(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: None if isinstance(value, float) and np.isnan(value) else value for name, value in fields.items()}


def draw_ranking(rankings: Sequence[MeasuredRanking], path: str) -> None:
    """Plot predicted against measured times, with a row of panels for each ranking.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    with saved(path, len(rankings), 2) as axes:
        for row, ranking in zip(axes, rankings):
            measured = {"communication": ranking.communication, "step": ranking.step}
            for axis, (name, times) in zip(row, measured.items()):
                if times is None:
                    axis.set_visible(False)
                    continue
                predicted = [getattr(own, f"{name}_s") for own in ranking.strategies]
                best = fastest(times)
                spread = [np.zeros_like(best), np.median(times, axis=1) - best]
                axis.errorbar(predicted, best, yerr=spread, fmt="o", markersize=4, linewidth=1)
                ends = [max(1e-6, min(*predicted, *best)), max(*predicted, *best)]
                axis.plot(ends, ends, "k--", linewidth=0.8)
                own = ranking.scores[name]
                axis.set(xscale="log", yscale="log", xlabel="predicted [s]", ylabel="measured [s]")
                axis.set_title(
                    f"{ranking.graph.name}, {ranking.cluster.num_devices} ranks: {name} ({own.spearman:.2f})",
                    fontsize=9,
                )
                axis.grid(alpha=0.3)
