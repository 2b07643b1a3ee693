"""Everything that runs on OneFlow ranks.

Folders:

- `ranks`: the processes of ranks: starts, watches and ends them, and counts the bytes that they send.
- `comm`: mesh axes, collectives, the layouts of tensors on ranks, and redistributions.
- `kinds`: the statements of each kind of layer.
- `stage`: one stage at its plan: parameters, forward pass, backward pass, gradients.  A plan without a pipeline is one stage.
- `pipeline`: the execution of schedules, whose stages are those of `stage`.

What a rank does for a layer is written once, and runs here or is printed in an exported file (:mod:`autoddl.export.library`):

- `statements`: the program of a layer; `layers` executes it, with the context in `setting`.
- `operations`, `attending`, `losses`, `rows`, `dropouts`: the functions that programs call.
- `stepping`: the ranks of a model or a stage, and the collectives between them.
- `facts`: what the user's modules say and a layer graph does not.

Models:

- `applied`: `AppliedModule`, a plan without a pipeline as a module that users hold (`autoddl.apply` makes it); `comparing`: whether
  it computes what the user's module computes.
- `parameters`: global tensors and the sums of their gradients; `userparameters`: the parameters of the user's module; `feeding`:
  which input each layer reads.
- `models`: the built-in families as plain modules, with `model_constants`; `samples`: data to train on.
- `train_steps`: a training step of a plan without a pipeline, and the optimizers that plans name.

`load` imports OneFlow with its CUDA libraries, and says whether it is available (`availability`).  `memory_files` has files in
memory.  `statements`, `feeding`, `samples` and `model_constants` do without OneFlow; the other modules of this folder need it when
they are imported.  Nothing is imported here, so that processes without OneFlow never load it.
"""
