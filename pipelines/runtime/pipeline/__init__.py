"""Schedules of pipelines executed on OneFlow ranks: one runtime for all of them, which knows no schedule by name.

- `lowering`: `lower(schedule, ...)` makes each rank's list of `actions`, by the passes in `slots` (rows and ranks), `local`
  (computations, weight versions), `order` (one total order of all communication) and `dryrun` (a proof that it gets through).
- `engine`: `execute`, the loop that carries out a rank's list. What computations are is `work`'s: `ModelWork`, a model's stages,
  with the versions of their `weights`; or `sleeping`'s, which takes given times. `transport` sends, `compression` makes it less,
  `inbox` keeps what has come.
- `chain`: models as chains of layers, and their cut in stages. `trainer`: `PipelineTrainer`, one rank's part in training.
- `report`: what all ranks measured, as one `Timeline`. `checkpoint`: saving and going on. `training`: `train` on a text.

`slots`, `local`, `order`, `dryrun`, `lowering`, `report`, `compression`, `checkpoint` and `training` do without OneFlow.
"""
