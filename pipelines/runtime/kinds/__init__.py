"""What ranks do for each kind of layer, one module each: the counterparts of :mod:`autoddl.costmodel.kinds`.

A module has a function `program`, and some have `layouts` (how ranks store parameters) and `plain_module`. `registry` finds them by
the name of the kind; its function `register` adds users' kinds. Only `plain_module` needs OneFlow.
"""
