"""The statements of each kind of layer on a rank, one module each: the counterparts of :mod:`autoddl.costmodel.kinds`.

`registry` has them by name; ``register`` adds kinds defined outside of the package. Needs no OneFlow.
"""
