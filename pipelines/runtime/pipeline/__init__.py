"""Schedules of pipelines executed on OneFlow ranks: one runtime for all of them, which knows no schedule by name.

- `lowering`: `lower(schedule, ...)` makes each rank's list of `actions`, by the passes in `slots` (rows and ranks), `holding` (what
  each rank has at the boundaries of stages), `local` (computations, weight versions), `order` (one total order of all
  communication) and `dryrun` (a proof that it gets through).
- `engine`: `execute`, the loop that carries out a rank's list. What computations are is `work`'s: `ModelWork`, the `passes` through
  a model's stages, with the versions of their `weights`; or `sleeping`'s, which takes given times. `transport` sends,
  `compression` makes it less, `inbox` keeps what has come.
- `chain`, `chain_stages`: models as chains of layers, and their cut in stages whose ranks share the rows.
- `stage_plans`: `StagePlan`, stages with SBP plans of their own; `planned_model`, `planned`: a model at such stages, with what the
  ranks keep of it and how they run it; `shared_weights`: those that several stages have; `stage_traffic`: all bytes, predicted.
- `trainer`: `PipelineTrainer`, one rank's part in training, of either kind of model; `data`: its micro-batches.
- `report`: what all ranks measured, as one `Timeline`. `checkpoint`: the files of a checkpoint; `saving`: how all
  ranks write and read one. `training`: `train` on a text.

`slots`, `holding`, `local`, `order`, `dryrun`, `lowering`, `stage_plans`, `stage_traffic`, `shared_weights`, `report`, `data`,
`compression`, `checkpoint`, `saving` and `training` do without OneFlow.
"""
