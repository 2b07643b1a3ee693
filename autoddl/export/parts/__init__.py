"""Definitions of exported files that AutoDDL's runtime does not have: parameters, pipelines, plain models, data.

These modules are not imported. :mod:`autoddl.export.library` reads them as text and copies the definitions that a file needs. They
import only OneFlow, numpy, the standard library and modules that :data:`autoddl.export.library.LIBRARY` lists.
"""
