"""Schedules of pipelines executed on OneFlow ranks.

- `lowering`: `lower(schedule, ...)` makes each rank's list of `actions`, by the passes in `slots`, `local`, `order` and
  `dryrun`. Needs no OneFlow.
"""
