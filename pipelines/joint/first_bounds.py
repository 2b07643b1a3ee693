"""What a search knows of a setting before it attempts it: lower bounds over all its cuts, and estimates of its best step.

**Lower bounds**, from cheap to dear:

-   by the balance of the work (:mod:`.bounds`), without memory, transfers and all-reduces;
-   by links: all micro-batches cross the slowest boundary; and by whole units (:mod:`.bottleneck_bound`, :mod:`.capacity_bound`),
    without memory;
-   by balance and by whole units with prices on memory.

**Estimates** are no bounds.  They assume equally loaded workers, and become more precise: from the first bound, with memory, and by
simulating the schedule.
"""

from __future__ import annotations

import math

import numpy as np

from autoddl.costmodel.stopping import Deadline

from ..generators import GeneratorError
from ..stepgraph import Terms
from .bottleneck_bound import bottleneck_bound
from .bounds import Bound, balance_weights, estimated_step_weights, least_over_cuts
from .capacity_bound import capacity_bound
from .configuration import PipelineSchedule, recomputed_inside
from .cut_graph import MEMORY_PRICES, CutGraph
from .explorer import Explorer, Setting
from .memory_demand import approximate_demand_of
from .meshes import StageMesh
from .setting_search import SettingSearch, UnsettledError
from .space import SOME_BLOCKS, ways_of_units
from .stage_cost import COMPONENTS, Replicas

__all__ = [
    "ROUNDING",
    "bound_by_balance",
    "bound_with_memory",
    "estimate_by_simulation",
    "estimate_with_memory",
    "first_estimate",
    "num_condensed_passes",
    "ways_of_balance",
]

#: Micro-batches for each worker in a condensed schedule, about.
_MICRO_BATCHES_IF_CONDENSED = 4
#: Part of the largest weight by which other weights may differ because of rounding errors.
_ROUNDING_STEP = 1e-12
#: Factor on bounds, so that rounding errors do not lift a bound above the optimum.
ROUNDING = 1 - 1e-9


# ---- Lower bounds --------------------------------------------------------------------------------------------------


def ways_of_balance(explorer: Explorer) -> tuple[str, ...]:
    """The ways of recomputation of the bound by balance: recomputation never lowers it, because memory costs nothing in it."""
    ways = ways_of_units(explorer.recomputations)
    return ("none",) if "none" in ways else ways


def bound_by_balance(explorer: Explorer, setting: Setting) -> float:
    """The bound by balance, without memory, transfers and all-reduces; inf if some layer has no strategy."""
    terms = Terms(setting.schedule.num_stages)
    weights = balance_weights(setting.schedule, setting.widths)
    # Weights that differ by rounding errors are made equal by lowering them, which lowers the bound by as little.
    unit = float(weights.max()) * _ROUNDING_STEP
    weights = np.floor(weights / unit) * unit
    forward, backward, recompute = (weights[part] for part in (terms.forward, terms.backward, terms.recompute))
    zero = np.zeros_like(forward)
    best = np.full((terms.num_stages, explorer.chain.num_units), np.inf)
    stages_of: dict[StageMesh, list[int]] = {}
    for stage, mesh in enumerate(setting.meshes):
        stages_of.setdefault(mesh, []).append(stage)
    for recomputation in ways_of_balance(explorer):
        vectors = np.column_stack(
            [forward + (recompute if recomputation == "stage" else 0.0), backward, *(zero,) * (len(COMPONENTS) - 2)]
        )
        for mesh, stages in stages_of.items():
            units, own = explorer.stage_search(mesh).unit_bounds, vectors[stages]
            least = units.least(
                recomputed_inside(recomputation),
                Replicas(),
                setting.micro_batch,
                setting.smallest_pass,
                own[:1] if (own == own[0]).all() else own,
            )
            if least is None:
                return math.inf
            best[stages] = np.minimum(best[stages], least)
    if (best == best[0]).all():
        return float(best[0].sum())  # a unit adds the same to every stage
    return float(least_over_cuts(best, np.zeros((terms.num_stages - 1, best.shape[1] + 1))))


def _bound_by_links(explorer: Explorer, setting: Setting) -> float:
    """The time for all micro-batches to cross the slowest boundary, at its cheapest place; 0 for schedules with several pipelines
    or without a longest path."""
    spec = setting.schedule
    transfers = explorer.least_transfers(setting)
    if spec.num_pipelines > 1 or not spec.synchronous or not len(transfers):
        return 0.0
    rest = explorer.chain.num_units - spec.num_stages
    least = [float(line[b + 1 : b + rest + 2].min()) for b, line in enumerate(transfers)]
    return spec.num_micro_batches * max(least)


def bound_with_memory(explorer: Explorer, setting: Setting, best_s: float, tries_free: bool) -> tuple[float, bool]:
    """The best of the bounds by links, by whole units, and by balance and whole units with prices on memory.

    Bounds that cannot matter once another one has reached the incumbent are skipped.

    Args:
        explorer: The tables and prices of the model on the cluster.
        setting: The setting.
        best_s: Cost of the incumbent.
        tries_free: Whether the bound by whole units without memory comes first.  It is cheaper, but excludes less.

    Returns:
        The bound, infinite if the schedule does not exist; and whether it reaches the incumbent without memory.
    """
    demand = explorer.memory_demand(setting.schedule)
    if demand is None:
        return math.inf, False
    if not math.isfinite(best_s):
        return 0.0, False
    cut_graph = CutGraph(explorer, setting, explorer.recomputations, demand)
    of_whole_units = bottleneck_bound if cut_graph.has_one_stage_per_worker else capacity_bound
    bound_s = _bound_by_links(explorer, setting)
    if tries_free:
        bound_s = max(bound_s, of_whole_units(cut_graph, best_s, is_memory_free=True))
        if bound_s >= best_s:
            return bound_s * ROUNDING, True
    for recomputation in ways_of_units(explorer.recomputations):
        explorer.price_units(recomputed_inside(recomputation), setting.schedule.runs_whole_passes)
    balance = Bound(balance_weights(setting.schedule, setting.widths))
    bound_s = max(bound_s, cut_graph.least_over_all_cuts(balance, best_s, MEMORY_PRICES))
    if bound_s < best_s:
        bound_s = max(bound_s, of_whole_units(cut_graph, best_s))
    return bound_s * ROUNDING, False


# ---- Estimates -----------------------------------------------------------------------------------------------------


def num_condensed_passes(spec: PipelineSchedule) -> int:
    """About the number of passes of micro-batches through stages in a schedule, condensed if it is long."""
    return spec.num_stages * min(spec.num_micro_batches, _MICRO_BATCHES_IF_CONDENSED * spec.num_workers)


def first_estimate(setting: Setting, bound_s: float) -> float:
    """Estimate the step of a plan with equally loaded workers from the bound of its setting by balance."""
    spec, widths = setting.schedule, setting.widths
    forward = Terms(spec.num_stages).forward
    return bound_s * float(
        estimated_step_weights(spec, widths)[forward].sum() / balance_weights(spec, widths)[forward].sum()
    )


def estimate_with_memory(explorer: Explorer, setting: Setting, step_s: float) -> float:
    """Refine the estimate ``step_s`` of the step of a plan with equally loaded workers by memory and all-reduces."""
    try:
        demand = approximate_demand_of(setting.schedule)
    except GeneratorError:
        return math.inf
    # Recomputing layers or blocks takes about as long as recomputing stages, but needs tables of its own: skip it.
    skipped = ("layers", "blocks", SOME_BLOCKS) if "stage" in explorer.recomputations else ()
    recomputations = [name for name in explorer.recomputations if name not in skipped]
    cut_graph = CutGraph(explorer, setting, recomputations, demand)
    return cut_graph.least_over_all_cuts(
        Bound(estimated_step_weights(setting.schedule, setting.widths)), step_s, (0.0, *MEMORY_PRICES)
    )


def estimate_by_simulation(explorer: Explorer, setting: Setting, step_s: float, best_s: float) -> float:
    """The step of a plan with equally loaded workers on the schedule itself, without redistributions; infinite if no plan is better
    than the incumbent, of cost ``best_s``; ``step_s`` if that cannot be computed."""
    if not setting.schedule.synchronous:
        return step_s
    try:
        return SettingSearch(explorer, setting, best_s, Deadline(stop=explorer.stop)).estimated_step_s()
    except UnsettledError:
        return step_s
