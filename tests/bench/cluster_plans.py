"""Experiment "plans": the plan of the joint search, the best plan of each family of pipelines, and plans without a pipeline.

Stages of pipelines sleep for the times that the plan expects, since the cores are fewer than the ranks; their messages, sums of
gradients and the order of both are real.  Plans without a pipeline compute (`cluster_job`).  Asynchronous plans are found by a
search of their own (``--allow-stale``), and run several steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cluster_job
from cluster_common import ClusterSize, EmulatedCluster, agreement, calibrated, show, started
from cluster_pipelines import slept
from cluster_ways import Case, measured, plan_of

import autoddl
from autoddl.costmodel.units import format_seconds
from autoddl.pipelines import Times
from autoddl.pipelines.joint import JointOptions
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate
from autoddl.pipelines.joint.job import job_of, no_report
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.rivals import RIVAL_FAMILIES
from autoddl.pipelines.joint.search import explore
from autoddl.pipelines.planners import Clock
from autoddl.pipelines.schedule import Schedule
from autoddl.search.planner import Options
from autoddl.zoo import Transformer
from autoddl.zoo.builtin import BuiltIn

__all__ = ["plans"]

MODEL = Transformer("gpt", layers=8, width=384, heads=6, sequence=64, vocabulary=256, tied=False)
CASE = Case("GPT of 8 blocks of width 384", BuiltIn("gpt", MODEL), 16)
HEADINGS = ("plan", "how", "computation", "predicted", "measured", "measured / predicted", "to AutoDDL")
#: Processor time of a search [s].
SEARCH_S = 60
#: Steps of an asynchronous schedule, which fills and drains the pipeline once.
STALE_STEPS = 6


@dataclass(frozen=True)
class Way:
    """A plan.

    Attributes:
        name: in tables.
        evaluation: the plan, with its figures.
    """

    name: str
    evaluation: Evaluation

    @property
    def how(self) -> str:
        """Schedule, stages and micro-batch."""
        configuration, stages = self.evaluation.configuration, len(self.evaluation.stages)
        schedule = f"{configuration.schedule.name}, {stages} stages" if stages > 1 else "no pipeline"
        return f"{schedule}, micro-batch {configuration.workload.micro_batch}"

    @property
    def times(self) -> Times:
        """Durations of the tasks, with the optimizer's step apart from the sums of gradients."""
        stages = self.evaluation.stages
        sums = tuple(stage.exposed_all_reduce_s for stage in stages)
        return replace(self.evaluation.times, all_reduce=sums, update=tuple(stage.update_s for stage in stages))

    @property
    def schedule(self) -> Schedule:
        """One step, or several of an asynchronous schedule."""
        configuration = self.evaluation.configuration
        recomputing = tuple(choice.recompute == "stage" for choice in configuration.stages)
        return configuration.schedule.schedule(configuration.widths, recomputing, STALE_STEPS)


def plans(size: ClusterSize, calibration: Path | None, budget_s: float, sizes: str, rounds: int, repeats: int) -> None:
    """Run the plan of the joint search and its rivals."""
    with started(size) as (cluster, folder):
        path = (calibration or calibrated(cluster, folder, budget_s, sizes)).resolve()
        joint, ways = _ways(path)
        joint.save(folder / "plan.json")
        found = {}
        for way in ways:
            if way.evaluation.has_pipeline:
                found[way.name] = _slept(cluster, way, folder, repeats)
        found.update(_computed(cluster, joint, [way for way in ways if way.name not in found], folder, rounds))
    own = found[ways[0].name][1]
    rows = []
    for way in ways:
        predicted, seconds = found[way.name]
        times = format_seconds(predicted), format_seconds(seconds)
        kind = "slept" if way.evaluation.has_pipeline else "real"
        rows.append((way.name, way.how, kind, *times, f"{seconds / predicted:.3f}", f"{seconds / own:.2f}x"))
    show(f"{CASE.name}, batch {CASE.batch}: {size.described()}", HEADINGS, rows, 3)
    print(agreement(list(found.values())))


def _slept(cluster: EmulatedCluster, way: Way, folder: Path, repeats: int) -> tuple[float, float]:
    """(Predicted, measured) duration of a step of a pipeline of single devices whose stages sleep [s]."""
    workload = way.evaluation.configuration.workload
    gradients = [
        round(sum(layer.work.gradient_bytes for layer in stage.assessment.layers)) // workload.itemsize
        for stage in way.evaluation.stages
    ]
    size = workload.micro_batch, MODEL.sequence * MODEL.width
    return slept(cluster, folder, way.schedule, way.times, *size, gradients, repeats)


def _computed(
    cluster: EmulatedCluster, joint: autoddl.Plan, ways: Sequence[Way], folder: Path, rounds: int
) -> dict[str, tuple[float, float]]:
    """(Predicted, measured) duration of a step of plans without a pipeline [s], by name."""
    own = []
    for way in ways:
        strategies = {layer.layer.name: layer.strategy for layer in way.evaluation.layers}
        own.append(cluster_job.Way(way.name, "autoddl", way.evaluation.configuration.workload, strategies))
    results = measured(cluster, CASE, joint, own, folder, rounds, steps=2)
    return {way.name: (way.evaluation.step_s, results[way.name].median_s) for way in ways}


def _ways(path: Path) -> tuple[autoddl.Plan, list[Way]]:
    """The plan of the joint search, and the ways: that plan first, then the rivals of both searches, no name twice."""
    found: dict[str, Way | None] = {}
    plans = [_joint_plan(path, is_stale) for is_stale in (False, True)]
    for name, plan in zip(("AutoDDL", "AutoDDL, --allow-stale"), plans):
        candidates = [(name, plan.search.configuration)]
        candidates += [(rival.name, rival.configuration) for rival in plan.search.rivals]
        for each, configuration in candidates:
            if configuration is not None and each not in found:
                way = Way(each, evaluate(chain_of(plan.graph), plan.cluster, configuration))
                is_wide = way.evaluation.has_pipeline and set(way.schedule.widths) != {1}
                found[each] = _narrow(way, plan) if is_wide else way
    return plans[0], [way for way in found.values() if way is not None]


def _narrow(way: Way, plan: autoddl.Plan) -> Way | None:
    """The best plan of a family, or of all, with workers of one rank: stages on several ranks communicate inside, and cannot
    sleep."""
    family = next((each for each in RIVAL_FAMILIES if each.title == way.name), None)
    is_stale = not way.evaluation.configuration.schedule.synchronous
    base = Options(CASE.batch, precision="float32", optimizer="sgd")
    job = job_of(plan.graph, plan.cluster, JointOptions(base, allow_stale=is_stale), no_report, None)
    explorer = job.explorer() if family is None else job.explorer(family.make_stages)

    def is_narrow(spec: PipelineSchedule) -> bool:
        return spec.num_workers == plan.cluster.num_devices and (family is None or family.allows(spec))

    settings = explorer.settings(None, is_stale, is_narrow, uneven=False)
    best = explore(explorer, settings, deadline=Clock(SEARCH_S / 4, job.stop)).best
    return None if best is None else Way(way.name, best)


def _joint_plan(path: Path, is_stale: bool) -> autoddl.Plan:
    """The plan of the joint search, among asynchronous schedules, too, if ``is_stale``."""
    options = {"pipeline": "auto", "allow_stale": is_stale, "time_limit_s": SEARCH_S}
    return plan_of(CASE, path, bucket_bytes=0, **options)
