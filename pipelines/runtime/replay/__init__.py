"""Replays traced programs (:mod:`autoddl.costmodel.program`): parts of a user's model that are no layers of a known kind.

- `operators`: the call that computes each type of operator. Extraction reads it to refuse operators that ranks cannot run.
- `statements`: a program as the statements of a layer. Needs no OneFlow.
- `functions`: the functions that these statements call on ranks; exported files contain them.
"""
