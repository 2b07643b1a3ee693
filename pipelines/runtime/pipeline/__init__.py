"""The runtime that executes a pipeline schedule on OneFlow ranks. It contains no code specific to any schedule.

From a schedule to the programs of the ranks (needs no OneFlow):

- `actions`: the instructions of a rank (compute, send, receive, reduce, update, drop) and its `Program`.
- `lowering`: `lower(schedule, ...)` compiles a schedule into one program per rank, by the passes in `slots` (which ranks and rows),
  `holding` (which block of a boundary tensor each rank holds), `local` (computations and weight versions), `order` (one total
  order of all communication) and `dryrun` (a check that the programs neither deadlock nor miss an input).
- `words`: the actions of a whole worker as text, such as ``2F5 2F5>3``, and the parser. Exported files contain schedules as words.
- `stage_plans`: how the ranks of planned stages hold the boundary tensors. `stage_traffic`: the predicted bytes of a run.

Execution of a program:

- `engine`: `execute`, the loop that executes a `Program`, here and in exported files.
- `work`: the computations that the engine calls. `ModelWork` runs the stages of a model with the forward and backward `passes`, the
  versions of their `weights` and the sums of their `gradients`. `sleeping` runs tasks of given durations instead.
- `transport`: sends, receives and sums tensors. `compression`: half-precision messages. `inbox`: received tensors.
- `shared_weights`: the elements of a weight that stages exchange if several of them share it.

Stages:

- `chain`, `chain_stages`: a model as a chain of layers, cut into stages whose ranks share the rows of a micro-batch.
- `planned`: stages whose layers are split by an SBP plan (`..stage`). `slot_stages`: what they share with stages of exported files.

Training:

- `trainer`: `PipelineTrainer`, one rank's part in training. `data`: micro-batches and losses.
- `training`: `train`, training on ranks of this machine. `training_job`: its function on each rank. `problems`: models and data.
- `checkpoint`: the files of a checkpoint. `saving`: how the ranks write and read them together.
- `report`: the measurements of all ranks as one `Timeline`.

Modules that do not import OneFlow: `slots`, `holding`, `local`, `order`, `dryrun`, `lowering`, `words`, `actions`, `stage_plans`,
`stage_traffic`, `shared_weights`, `report`, `data`, `compression`, `checkpoint`, `saving`, `problems` and `training`.
"""
