"""The vocabulary of plans (SBP states, layer graph, cluster) and what everything costs on a cluster.

- `sbp`, `distribution`: `Split`, `Broadcast`, `PartialSum`; how one tensor lies on a mesh of ranks, printed and parsed.
- `layer`: `Layer`; `kinds`: what is special to each kind of layer, one module each; `graph`: `LayerGraph`, `load_graph`.
- `cluster`: `Cluster`, `load_cluster`, `preset_names` (the files of `clusters/`).
- `collectives`, `redistribution`: `steps` between any two distributions, what they send and how long they take.
- `exchange`: the messages by which an evenly split tensor changes its mesh, where collectives along axes cannot bring it over.
- `crossing`: the messages that bring a tensor from one mesh of ranks to another one, between the stages of a pipeline.
- `strategy`: `Strategy`, `enumerate_strategies`; `layerwork`, `layoutprices`: what a layer and an edge do at their layouts.
- `workload`: `Workload`, the batch, precision and optimizer; `assessment`: `assess`, time and memory of a whole plan.
- `pricing`, `problem`, `table`: `PriceBook`, `Problem` and the `CostTable` that the searches work on.
- `calibration`: how well a cluster file's figures were measured; `documents`, `writing`, `units`, `errors`: JSON, files, units,
  `UserError`.
- `stopping`: `Stop` and `Deadline`, which end searches early.

It imports nothing else of the project, and nothing is imported here before it is asked for.
"""
