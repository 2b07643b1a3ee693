"""Estimates of recipes, which decide the order in which they are evaluated (:mod:`.recipe_trials`).  They are no bounds.

Each different unit of the model is assessed once, by itself.  With F(w) and B(w) the seconds of all units of worker w for one
micro-batch, forward and backward, a step of N micro-batches on p workers with v chunks each takes about

    N max over w of (F(w) + B(w))  +  the sum of F(w) + B(w) over the other workers / v  +  the longest reduction and update

Worker w keeps the activations of min(p - w, N) micro-batches.  If chunks are interleaved, it keeps those of
2 (p - w - 1) + (v - 1) p + 1 passes through one of its chunks, or of all N v.

With Chimera's f pipelines a worker has f stages, and runs those of each pipeline for its share of the micro-batches.  It waits for
about p / f - 1 passes through a mean stage, forward and backward (Li and Hoefler, SC'21, Table 2 for f = 2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import divided

from .bounds import micro_batches_per_pipeline
from .configuration import PipelineSchedule
from .job import PlanningJob
from .memory_demand import approximate_demand_of
from .uniform import UniformLayout, uniform_cut, uniform_strategies

__all__ = ["Estimate", "RecipeEstimates", "with_choices"]


@dataclass(frozen=True)
class Estimate:
    """About what a recipe needs.

    Attributes:
        step_s: Seconds of a step.
        memory_bytes: Bytes of the fullest device.
    """

    step_s: float
    memory_bytes: float


class RecipeEstimates:
    """Estimates of the recipes of one job.

    Args:
        job: The planning job.
    """

    def __init__(self, job: PlanningJob) -> None:
        self.job = job
        shapes = [job.chain.shape(unit, unit + 1) for unit in range(job.chain.num_units)]
        #: Per unit the first one of equal shape.
        self._equal = [shapes.index(shape) for shape in shapes]
        self._known: dict[object, np.ndarray] = {}

    def estimate(
        self, layout: UniformLayout, workload: Workload, regathers: bool, chimera: PipelineSchedule | None = None
    ) -> Estimate:
        """Return the estimate of a recipe.

        Args:
            layout: Its degrees.
            workload: Its batch, micro-batch, and way of recomputation.
            regathers: Whether inputs of products are gathered again.
            chimera: One of Chimera's schedules for the recipe, which then has one chunk per stage; None for that of the layout.

        Raises:
            UserError: A degree does not fit the model or the cluster.
        """
        depth, chunks, count = layout.num_stages, layout.interleave, workload.num_micro_batches
        units = {unit: self._of_unit(unit, layout, workload, regathers) for unit in dict.fromkeys(self._equal)}
        of_units = np.array([units[unit] for unit in self._equal])
        begins = np.cumsum([0, *uniform_cut(len(of_units), depth * chunks)[:-1]])
        of_chunks = np.add.reduceat(of_units, begins, axis=0)
        if chimera is not None:
            return _estimate_of_chimera(chimera, of_chunks, float(of_units[:, 4].max()))
        # Chunk c is on worker c mod p.
        of_workers = of_chunks.reshape(chunks, depth, -1).sum(axis=0)
        load_s, end_s, state, kept, _ = of_workers.T
        longest_s = float(load_s.max())
        step_s = count * longest_s + (float(load_s.sum()) - longest_s) / chunks + float(end_s.max())
        behind = np.arange(depth)[::-1]
        in_flight = np.minimum(behind + 1, count)
        if chunks > 1:
            in_flight = np.minimum(2 * behind + (chunks - 1) * depth + 1, count * chunks) / chunks
        return Estimate(step_s, float((state + in_flight * kept).max() + of_units[:, 4].max()))

    def _of_unit(self, unit: int, layout: UniformLayout, workload: Workload, regathers: bool) -> np.ndarray:
        """Return the figures of a unit on one device: seconds of a micro-batch, seconds of reduction and update, bytes of state,
        bytes that a micro-batch keeps, and bytes that are needed for a while."""
        mesh, degrees = layout.mesh(self.job.cluster), layout.degrees(self.job.cluster)
        key = unit, mesh, degrees, layout.expert_parallel, workload.micro_batch, workload.recompute, regathers
        if key not in self._known:
            graph = self.job.chain.stage(unit, unit + 1)
            strategies = with_choices(
                self.job, graph.graph, uniform_strategies(graph.graph, layout, degrees), regathers
            )
            layers = assess(graph.graph, mesh.devices(self.job.cluster), workload, strategies).layers
            layers = layers[1:] if graph.has_entry else layers
            self._known[key] = np.array(
                [
                    sum(one.forward_compute_s + one.forward_communication_s for one in layers)
                    + sum(one.backward_compute_s + one.backward_communication_s for one in layers),
                    sum(one.gradient_communication_s + one.update_s for one in layers),
                    sum(one.work.state_bytes for one in layers),
                    sum(one.work.kept_bytes for one in layers),
                    sum(one.work.recomputed_bytes for one in layers) + max(one.work.buffer_bytes for one in layers),
                ]
            )
        return self._known[key]


def _estimate_of_chimera(spec: PipelineSchedule, of_stages: np.ndarray, buffer_bytes: float) -> Estimate:
    """Return the estimate of a recipe with one of Chimera's schedules.

    Args:
        spec: The schedule.
        of_stages: The figures of each stage as of :meth:`RecipeEstimates._of_unit`; shape (stages, 5).
        buffer_bytes: Bytes that a device needs for a while.
    """
    demand = approximate_demand_of(spec)
    counts = micro_batches_per_pipeline(spec.num_workers, spec.num_micro_batches, spec.num_pipelines)
    load_s, end_s, state, kept, _ = of_stages.T
    most = np.zeros(3)
    for held in demand.homes:
        stages = [stage for _, stage in held]
        work_s = sum(counts[pipeline] * load_s[stage] for pipeline, stage in held)
        nbytes = sum(state[stage] + demand.in_flight[stage] * kept[stage] for stage in stages)
        most = np.maximum(most, [work_s, end_s[stages].sum(), nbytes])
    idle_s = (spec.num_workers / spec.num_pipelines - 1) * float(load_s.mean())
    return Estimate(float(most[0] + most[1]) + idle_s, float(most[2]) + buffer_bytes)


def with_choices(
    job: PlanningJob, graph: LayerGraph, strategies: dict[str, Strategy], regathers: bool
) -> dict[str, Strategy]:
    """Return strategies with optimizer states divided among replicas, if that is on offer, and inputs that are gathered again.

    Args:
        job: The planning job.
        graph: The layers.
        strategies: Their strategies by name.
        regathers: Whether inputs of products are gathered again.
    """
    chosen = divided(graph, strategies, 1) if 1 in job.pricing.choices.shardings else strategies
    if not regathers:
        return chosen

    def gathers(name: str) -> bool:
        return chosen[name].p1 > 1 and kind_of(graph[name].kind).gathers_inputs

    return {name: replace(one, regathers=True) if gathers(name) else one for name, one in chosen.items()}
