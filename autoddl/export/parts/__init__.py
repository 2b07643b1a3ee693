"""The text of exported files: what their models call, as real code that linters and type checkers see.

These modules are read, not imported: :mod:`autoddl.export.helpers` takes from them the definitions that a file needs.  They
import nothing but OneFlow, numpy and the standard library, and one another.  What they do is what the runtime does
(:mod:`autoddl.pipelines.runtime`), which explains it; tests hold the two together, loss for loss and byte for byte.
"""
