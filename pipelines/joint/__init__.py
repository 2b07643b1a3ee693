"""Pipelines and SBP strategies planned together.

A configuration divides the model's layers into stages and the devices into workers, and gives every stage strategies, a way of
recomputation and a place in a schedule.  From the ground up:

- `partition`: the model as a chain of units; `meshes`: the devices of workers; `configuration`; `space`: which ones are searched.
- `evaluation`: ``evaluate``, the figures of a configuration; `boundary`: what passes between its stages.
- `stage_cost`, `stage_search`: the best strategies of a stage; `memory_demand`: what schedules ask of its memory.
- `bounds`, `levels`, `unit_bounds`: what no plan is faster than; `cut_graph`: bounds of all cuts of a setting.
- `setting_search`: the best plan of a setting (devices, schedule, micro-batch), by `relaxation`, `cut_program`, `row_search`,
  `cut_regions` and `fitting`.
- `explorer`: what settings share; `search`: best first over all settings; `least_memory`: what would fit at least.
- `families`: the best plan of each family of schedules, with `paper_planners`; `megatron_trials`: Megatron's rule,
  and a note where a pipeline would be faster; `planner`: ``plan_jointly``; `job`, `result`.
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
