"""Joint planning of pipelines and SBP strategies.

A *configuration* divides the model's layers into stages and the devices into workers, and chooses for every stage the strategies of
its layers, a way of recomputation and a place in a schedule.  The modules, from the ground up:

- The space: `partition` (the model as a chain of units), `meshes` (the devices of workers), `configuration`, and `space` (the
  configurations that are searched).
- Figures: `evaluation` (time and memory of a configuration, by ``evaluate``), `stage_figures` (those of one stage), `boundary`
  (communication between stages) and `executed` (the step as AutoDDL's runtime executes it).
- Stages: `stage_cost` (cost tables), `stage_search` (the best strategies of a stage) and `memory_demand` (micro-batches in flight).
- Lower bounds: `bounds`, `bottleneck_bound`, `unit_bounds` and `shared_weights`; `cut_graph` (bounds of all cuts of a setting).
- A setting (devices, schedule, micro-batch): `first_bounds` bounds and estimates it; `setting_search` finds its best plan, by
  `setting_bounds` (`relaxation`), `cut_program`, `row_search` and `cut_regions`; `cut_trials` and `fitting` find good ones.
- Rows of a cut, one for each stage: `selection_program` and `row_program`, with the constraints of `row_constraints`.
- All settings: `explorer` (the data that settings share), `search` (best-first search) and `least_memory` (the least memory of any
  plan).
- Planners: `planner` (``plan_jointly``), `rivals` (the best plan of each family of schedules), `paper_planners` (the planners of
  papers), `megatron_trials` (Megatron's rule) and `recipe_trials` (`recipe_estimates`); `job` (their input) and `result` (their
  output).
"""

from __future__ import annotations

from .configuration import Configuration, PipelineSchedule, StageChoice
from .evaluation import Evaluation, evaluate
from .meshes import Division, StageMesh
from .partition import ENTRY, Chain, StageGraph, chain_of
from .result import JointOptions, PlanResult

__all__ = [
    "ENTRY",
    "Chain",
    "Configuration",
    "Division",
    "Evaluation",
    "JointOptions",
    "PipelineSchedule",
    "PlanResult",
    "StageChoice",
    "StageGraph",
    "StageMesh",
    "chain_of",
    "evaluate",
]
