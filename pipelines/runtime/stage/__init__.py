"""One stage of a model at its plan, on a rank: parameters, forward pass, backward pass, gradients.

The engine of `..pipeline` runs the stages of every plan; a plan without a pipeline has one stage. `..applied` wraps this stage as
a module, for users who call ``backward`` and the optimizer themselves.

- `plan`: `StagePlan`, the strategies of consecutive layers of a graph. Needs no OneFlow.
- `model`: `PlannedModel`, a user's model divided into stages, and `StageWeights`, the weights that the ranks of a stage store.
- `stage`: `Stage`, the layers of one stage, ready to run.
- `global_weights`: `GlobalWeights`, the weights of a stage as OneFlow global tensors.
- `output`: the output of a model without a loss, gathered on every rank of the last stage.
- `tracing`: `StageTracer`, a forward and backward pass divided into sections that can be measured.
"""
