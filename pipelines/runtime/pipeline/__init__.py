"""Schedules of pipelines executed on OneFlow ranks: one runtime for all of them, which knows no schedule by name.

- `lowering`: `lower(schedule, ...)` makes each rank's list of `actions`, by the passes in `slots` (rows and ranks), `holding` (what
  each rank has at the boundaries of stages), `local` (computations, weight versions), `order` (one total order of all
  communication) and `dryrun` (a proof that it gets through).
- `words`: actions of whole workers as words, ``2F5 2F5>3``, and back: the form in which exported files have a schedule.
- `engine`: `execute`, the loop that carries out a rank's `Program`, here and in exported files. What computations are is `work`'s:
  `ModelWork`, the `passes` through a model's stages, with the versions of their `weights`, whose `gradients` are summed over ranks
  and stages; or `sleeping`'s, which takes given times. `transport` sends, `compression` makes it less, `inbox` keeps what has come.
- `chain`, `chain_stages`: models as chains of layers, and their cut in stages whose ranks share the rows.
- `planned`: the stages of `..stage` on this rank, for the engine; `stage_plans`: how their ranks hold what crosses the boundaries;
  `shared_weights`: weights that several stages have; `stage_traffic`: all bytes, predicted.
- `trainer`: `PipelineTrainer`, one rank's part in training, of either kind of model; `data`: its micro-batches.
- `report`: what all ranks measured, as one `Timeline`. `checkpoint`: the files of a checkpoint; `saving`: how all
  ranks write and read one. `training`: `train` on a text.

`slots`, `holding`, `local`, `order`, `dryrun`, `lowering`, `words`, `stage_plans`, `stage_traffic`, `shared_weights`, `report`,
`data`, `compression`, `checkpoint`, `saving` and `training` do without OneFlow.
"""
