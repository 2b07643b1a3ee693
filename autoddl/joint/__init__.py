"""Pipelines and SBP planned together: stages, schedule, micro-batch, recomputation and every layer's strategy at once.

- :mod:`.cutting`: a model as a chain of units, and a stage as a layer graph; :mod:`.meshes`: how workers share the devices.
- :mod:`.configuration`: one plan; :mod:`.evaluation`: what it costs (``evaluate``), with what passes :mod:`.between` workers;
  :mod:`.document`: as JSON.
- :mod:`.space`: all plans; :mod:`.stages`: the ways to run a stage, on :mod:`.stagetables`; :mod:`.needs`: what schedules ask of
  its memory.
- :mod:`.units`, :mod:`.bounds`, :mod:`.relaxation`: what no plan is faster than; :mod:`.settle`: the best plan of a setting, on its
  :mod:`.terrain`, in :mod:`.regions` of its cuts, by :mod:`.ways`; :mod:`.explorer`: what settings share; :mod:`.search`: best
  first over the space.
- :mod:`.planner`: ``plan_jointly`` for a :mod:`.job`, with the best of all :mod:`.families` (:mod:`.papers`); :mod:`.leastmemory`:
  where nothing fits; :mod:`.result`: what it returns.
- :mod:`.glance`: ``plan_alone``, the best plan without a pipeline, with a note where a pipeline is faster.
"""

from __future__ import annotations

from .configuration import Configuration, PipelineSchedule, StageChoice
from .cutting import ENTRY, Chain, StageGraph, chain_of
from .evaluation import Evaluation, evaluate
from .meshes import Division, StageMesh
from .result import JointOptions, JointPlan

__all__ = [
    "ENTRY",
    "Chain",
    "Configuration",
    "Division",
    "Evaluation",
    "JointOptions",
    "JointPlan",
    "PipelineSchedule",
    "StageChoice",
    "StageGraph",
    "StageMesh",
    "chain_of",
    "evaluate",
]
