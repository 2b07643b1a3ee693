"""The vocabulary of plans (SBP states, layer graph, cluster) and the cost model.

- `sbp`, `distribution`: `Split`, `Broadcast`, `PartialSum`; the distribution of a tensor over a mesh of ranks, printed and parsed.
- `layer`: `Layer`; `kinds`: one module per kind of layer; `graph`: `LayerGraph`, `load_graph`.
- `cluster`: `Cluster`, `load_cluster`, `preset_names` (the files of `clusters/`).
- `collectives`, `redistribution`: the communication `steps` between any two distributions, their bytes and their time.
- `exchange`: point-to-point messages between two even splits whose meshes have no common refinement.
- `crossing`: the messages between two meshes of different ranks (cross-mesh resharding), used between pipeline stages.
- `strategy`: `Strategy`, `enumerate_strategies`; `layerwork`, `layoutprices`: the cost of a layer and of an edge.
- `workload`: `Workload`, the batch, precision and optimizer; `assessment`: `assess`, time and memory of a whole plan.
- `pricing`, `problem`, `table`: `PriceBook`, `Problem` and the `CostTable` that the searches work on.
- `calibration`: the calibration record of a cluster file; `documents`, `reading`, `writing`, `units`, `errors`: JSON, files,
  units, `UserError`.
- `limits`, `nearest`, `suggestions`: bounds on user input, and the hints in error messages.
- `stopping`: `Stop` and `Deadline`, which end searches early.

The folder imports nothing else of the project.  This module imports nothing eagerly.
"""
