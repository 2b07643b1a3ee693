"""Pipelines as data: schedules, what they cost in time and memory, and the planners that choose among them.

- :mod:`.schedule`: ``Task``, ``Schedule`` (per worker an ordered list of tasks, with all that a runtime needs to know);
  :mod:`.grid`: the same as CSV.
- :mod:`.generators`: ``generate(name, num_stages=, num_micro_batches=, ...)`` for every family, through :mod:`.validate`.
- :mod:`.simulator`: ``simulate(schedule, times)`` gives a ``Timeline``; :mod:`.times`: what tasks cost;
  :mod:`.critical`: the critical path; :mod:`.memory`: activations and weight versions; :mod:`.communication`: transfers,
  collectives and one order for all of them; :mod:`.draw`: text, SVG, Chrome trace.
- :mod:`.planners`: how to cut a model for a cluster. :mod:`.runtime`: all that runs on OneFlow ranks.
"""

from .critical import CriticalPath, critical_path
from .generators import GeneratorError, families, generate
from .grid import from_csv, to_csv
from .schedule import Kind, Part, Replica, Schedule, ScheduleTextError, Task, parse_task
from .simulator import simulate
from .timeline import SteadyState, Timeline, free_regions, steady_state
from .times import Times, TimesError, replicate
from .validate import InvalidScheduleError

__all__ = [
    "CriticalPath",
    "GeneratorError",
    "InvalidScheduleError",
    "Kind",
    "Part",
    "Replica",
    "Schedule",
    "ScheduleTextError",
    "SteadyState",
    "Task",
    "Timeline",
    "Times",
    "TimesError",
    "critical_path",
    "families",
    "free_regions",
    "from_csv",
    "generate",
    "parse_task",
    "replicate",
    "simulate",
    "steady_state",
    "to_csv",
]
