"""The text of exported files that the runtime does not have: modules for parameters and stages, plain values, and training.

These modules are read, not imported: :mod:`autoddl.export.library` takes from them and from the runtime the definitions that a file
needs.  They import nothing but OneFlow, numpy, the standard library, and what is of the same library.
"""
