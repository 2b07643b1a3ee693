"""One stage of a model at its plan, on a rank: parameters, forward pass, backward pass, gradients.

A plan without a pipeline is one stage, which `..applied` gives to users as a module; a pipeline's stages are driven by the engine
of `..pipeline`.

- `plan`: `StagePlan`, strategies for consecutive layers of a graph. Does without OneFlow.
- `model`: `PlannedModel`, a user's model cut in stages, and `StageWeights`, which weights the ranks of each stage store.
- `stage`: `Stage`, the layers of a stage ready to run.
- `global_weights`: `GlobalWeights`, the weights of a stage as OneFlow global tensors.
- `tracing`: a forward and backward pass in sections that can be measured.
"""
