"""Planners: which pipeline to run for a profiled model on a cluster with a global batch.

- :func:`plan_dapple`: stages, replicas and devices (DAPPLE's dynamic programme, ranked by simulation);
- :func:`plan_chimera`: depth, width and micro-batch of bidirectional pipelines (Chimera's performance model, and by simulation);
- :func:`plan_wpipe`: recomputation, depth, width, placement and accumulation of WPipe.

All take a :class:`Workload`, and a :class:`Clock` where they should stop after some time; what cannot be planned is a
:class:`PlannerError` of one line.
"""

from __future__ import annotations

from .chimera import ChimeraResult, plan_chimera
from .clock import Clock
from .dapple import DappleResult, evaluate, plan_dapple
from .dapple_search import Shape
from .workload import PlannerError, Workload
from .wpipe import WPipeResult, plan_wpipe

__all__ = [
    "ChimeraResult",
    "Clock",
    "DappleResult",
    "PlannerError",
    "Shape",
    "WPipeResult",
    "Workload",
    "evaluate",
    "plan_chimera",
    "plan_dapple",
    "plan_wpipe",
]
