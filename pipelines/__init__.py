"""Pipeline schedules as data: generation, simulation of time and memory, and the planners that choose among them.

- :mod:`.schedule`: ``Task`` and ``Schedule`` (an ordered list of tasks per worker); :mod:`.grid`: schedules as CSV.
- :mod:`.generators`: ``generate(name, num_stages=, num_micro_batches=, ...)`` returns a schedule of any family, checked by
  :mod:`.validate`; :mod:`.single_stage`: the schedule of a single stage, for any number of micro-batches.
- :mod:`.simulator`: ``simulate(schedule, times)`` returns a ``Timeline``; :mod:`.one_stream`: the same where a worker communicates
  one after the other, as AutoDDL's runtime does; :mod:`.times`: durations of tasks and transfers;
  :mod:`.critical`: the critical path; :mod:`.memory`: activations and weight versions; :mod:`.communication`: transfers and
  collectives in one total order; :mod:`.draw`: text, SVG, Chrome trace.
- :mod:`.planners`: planners that cut a model for a cluster. :mod:`.runtime`: execution on OneFlow ranks.

>>> schedule = generate("1f1b", num_stages=2, num_micro_batches=4)
>>> simulate(schedule, Times.of(2, forward=1, backward=2)).makespan
15.0
"""

from .critical import CriticalPath, critical_path
from .generators import GeneratorError, families, generate
from .grid import from_csv, to_csv
from .one_stream import simulate_one_stream
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
    "simulate_one_stream",
    "steady_state",
    "to_csv",
]
