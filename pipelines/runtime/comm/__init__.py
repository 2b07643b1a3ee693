"""Communication of ranks inside a stage, and the layouts of tensors on ranks.

- `mesh`: `RankAxis`, an axis of a mesh of ranks, and the groups along it.
- `collectives`: differentiable collectives along one mesh axis; `handshake`: what two ranks do before.
- `layouts`: which elements of weights and activations each rank holds; `parameter_layouts`: how it stores parameters.
- `moves`: redistributions as statements; `moving` executes them, and `exchanging` executes exchanges.

`layouts`, `parameter_layouts`, `mesh`, `handshake` and `moves` need no OneFlow. The other modules import it.
"""
