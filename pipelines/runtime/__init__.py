"""The runtime: everything that runs on OneFlow ranks.

Folders:

- `ranks`: starts, watches and ends the processes of ranks, and counts the bytes that they send.
- `comm`: mesh axes, collectives, the layouts of tensors on ranks, and redistributions.
- `kinds`: the statements of each kind of layer.
- `stage`: one stage with its plan: parameters, forward pass, backward pass, gradients. A plan without a pipeline has one stage.
- `pipeline`: executes schedules. Its stages are those of `stage`.
- `graph`: executes plans without a pipeline inside OneFlow's ``nn.Graph``.

Devices and types:

- `backend`: `Backend`, where tensors lie and in which types ranks compute. It is passed down to whatever makes tensors.
- `loss_scaling`, `updates`: the scale of the loss, and optimizer steps on the master weights of mixed precision.
- `timing`, `peakmemory`: measured times and peak memory of ranks.

The program of a layer is defined once. The runtime executes it, and exported files contain it (:mod:`autoddl.export.library`):

- `statements`: the program of a layer; `layers` executes it, with the context in `setting`.
- `operations`, `attending`, `norms`, `losses`, `rows`, `dropouts`: the functions that programs call.
- `stepping`: the ranks of a model or a stage, and the collectives between them.
- `facts`: properties of the user's modules that a layer graph does not contain.

Models:

- `applied`: `AppliedModule`, a plan without a pipeline as a OneFlow module, which `autoddl.apply` returns; `comparing`: checks that
  it computes the same function as the user's module.
- `parameters`: global tensors and the sums of their gradients; `userparameters`: the parameters of the user's module; `feeding`:
  the model input that each input layer reads.
- `models`: the built-in families as plain modules, with `model_constants`; `samples`: training data.
- `train_steps`: a training step of a plan without a pipeline, and the optimizers that plans name.

`load` imports OneFlow with its CUDA libraries, and checks whether it is available (`availability`). `memory_files` has files in
memory. `statements`, `feeding`, `samples`, `loss_scaling` and `model_constants` need no OneFlow. Most of the other modules of
this folder import it. This file imports nothing, so that processes without OneFlow never load it.
"""
