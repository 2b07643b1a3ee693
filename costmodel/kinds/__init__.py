"""The kinds of layers, one module each: how a layer may be split, what it does at a split, and what it keeps.

- `kind`: `LayerKind`, what every kind answers; `Frame` and `Body`, what a layer's work is computed from, and what it is.
- `registry`: `register` and `kind_of`.  A kind from outside of the package is registered in the same way as those here.
- `builtin`: registers `linear`, `embedding`, `position`, `attention`, `norm`, `add`, `conv2d`, `loss` and `opaque`.

To add a kind, write a module with a subclass of `LayerKind` and a function that builds such a layer with its FLOPs.
"""
