"""Communication of ranks inside a stage, and where tensors are.

- `mesh`: ranks as a mesh, `RankAxis` and the groups along it.
- `collectives`: differentiable collectives along one mesh axis.
- `layouts`: which elements of parameters and activations each rank holds.
- `moves`: redistributions as statements; `moving` executes them, `exchanging` those that are exchanges.

`layouts` and `moves` do without OneFlow; the others need it when they are imported.
"""
