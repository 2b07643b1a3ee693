"""AutoDDL's face: extract a model's layer graph, plan it, apply the plan, verify it; and the command line.

- `apply(module, plan)`: a OneFlow model that trains at a plan's layouts; `load_plan(path)` reads the plan;
  `launched()`: the job that a script was started in by ``autoddl launch``.
- `planner`: `make_plan` from a layer graph and a cluster (`joint.glance`: `plan_alone`, the same with a note where a pipeline is
  faster; `joint.planner`: `plan_jointly`, with pipelines); `models`: built-in layer graphs; `extract`: those of OneFlow modules.
- `export`: a plan as an annotated OneFlow file, a graph or a trace.

Nothing is imported before it is asked for: OneFlow only where something runs on it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # what type checkers take for true; `typing` itself is not imported before Ctrl-C can be taken
if TYPE_CHECKING:
    from typing import Any

    from .applying import apply
    from .launching.context import launched
    from .planfile import load_plan

__all__ = ["apply", "launched", "load_plan"]

_HOMES = {"apply": "applying", "launched": "launching.context", "load_plan": "planfile"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
