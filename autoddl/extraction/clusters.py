"""Joins operators that are no layers of a known kind into programs.

Every such operator begins as a draft of its own. A draft whose results only one other program reads becomes part of this program.
So a program has one result, and what a block of operators computes between two layers is one layer. Programs do not reach over the
borders of repeated modules, so that blocks stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .drafts import LayerDraft

__all__ = ["cluster"]


def cluster(
    drafts: Sequence[LayerDraft],
    reads: Callable[[LayerDraft], Sequence[str]],
    owners: Mapping[str, LayerDraft],
    returned: Sequence[str],
    scope: Callable[[str], str],
) -> list[LayerDraft]:
    """Return the drafts with programs joined.

    Args:
        drafts: All drafts, in topological order.
        reads: The tensors of other drafts that a draft reads.
        owners: The draft that computes each tensor.
        returned: Tensors that the model returns.
        scope: The repeated module that a path lies in.
    """
    readers: dict[int, list[LayerDraft]] = {id(draft): [] for draft in drafts}
    for draft in drafts:
        for tensor in reads(draft):
            readers[id(owners[tensor])].append(draft)
    held = {id(owners[tensor]) for tensor in returned if tensor in owners}
    joined: dict[int, LayerDraft] = {}

    def final(draft: LayerDraft) -> LayerDraft:
        while id(draft) in joined:
            draft = joined[id(draft)]
        return draft

    for draft in reversed(drafts):
        if not draft.is_program or id(draft) in held:
            continue
        targets = {id(reader): reader for reader in map(final, readers[id(draft)])}
        if len(targets) != 1:
            continue
        (target,) = targets.values()
        if target.is_program and (target.is_output or scope(draft.path) == scope(target.path)):
            joined[id(draft)] = target
            target.operators = [*draft.operators, *target.operators]
            target.kinds = [*draft.kinds, *target.kinds]
            target.mixes_samples |= draft.mixes_samples
    return [draft for draft in drafts if id(draft) not in joined]
