"""The kinds of layers, one module each: their strategies, work and memory.

- `kind`: `LayerKind`, the base class of all kinds; `LayerQuantities` and `Body`, argument and result of `LayerKind.work`.
- `registry`: `register` and `kind_of`.  Users register their own kinds in the same way.
- `builtin`: registers `linear`, `embedding`, `position`, `attention`, `norm`, `add`, `conv2d`, `batch_norm`,
  `pool`, `experts`, `token_gate`, `latent_attention`, `loss` and `opaque`.

To add a kind, write a module with a subclass of `LayerKind`, and a function that makes such a layer with its FLOPs.
"""
