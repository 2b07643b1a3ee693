"""Planners: which pipeline to run for a profiled model on a cluster with a global batch.

- :func:`plan_dapple`: stages, replicas and devices (DAPPLE's dynamic programme, ranked by simulation);
- :func:`plan_chimera`: depth, width and micro-batch of bidirectional pipelines (Chimera's performance model, and simulation);
- :func:`plan_wpipe`: recomputation, depth, width, placement and accumulation of WPipe.

All take a :class:`ProfiledWorkload`, and optionally a :class:`Clock` that limits their time. They raise :class:`PlannerError` if no
plan satisfies the constraints.
"""

from __future__ import annotations

from .chimera import ChimeraResult, plan_chimera
from .clock import Clock, Patience
from .dapple import DappleResult, evaluate, plan_dapple
from .dapple_search import StageConstraints
from .workload import PlannerError, ProfiledWorkload
from .wpipe import WPipeResult, plan_wpipe

__all__ = [
    "ChimeraResult",
    "Clock",
    "DappleResult",
    "Patience",
    "PlannerError",
    "ProfiledWorkload",
    "StageConstraints",
    "WPipeResult",
    "evaluate",
    "plan_chimera",
    "plan_dapple",
    "plan_wpipe",
]
