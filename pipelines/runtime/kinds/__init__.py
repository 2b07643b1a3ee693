"""What each kind of layer does on a rank, one module each: the twins of :mod:`autoddl.costmodel.kinds`.

`registry` has them by name; ``register`` adds those of kinds from outside of the package.  Needs no OneFlow.
"""
