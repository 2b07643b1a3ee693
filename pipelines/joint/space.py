"""The space of joint plans: divisions of the devices, schedules, micro-batches and cuts.

======================  ==========================================================================================================
dimension               values
======================  ==========================================================================================================
devices of the workers  all divisions of the cluster into equal rectangles of nodes x devices, and the divisions into unequal
                        rectangles of :mod:`.meshes`; D = number of workers
schedule                every family of the generators with every policy; bidirectional schedules with 2 or 4 pipelines and every
                        way to concatenate their basic units; 2 or 4 groups of stages per worker; asynchronous schedules if they are
                        allowed.  Bidirectional schedules need equal workers, because each worker also holds the stages of another
micro-batch             every divisor of the batch
cut into S stages       every cut of the chain of units
recomputation           per stage: none, of attention, layer by layer, block by block, of its first K blocks alone
                        (:data:`SOME_BLOCKS` stands for all K), or of the whole stage (but for the last stage: its backward pass
                        directly follows its forward pass, so that the loss would be computed twice)
======================  ==========================================================================================================

One worker (D = 1) is a plan without a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoddl.costmodel.recomputation import block_limit

from .configuration import PipelineSchedule

__all__ = [
    "MAX_PASSES",
    "SOME_BLOCKS",
    "recomputations_of_stage",
    "schedules",
    "ways_of_arcs",
    "ways_of_units",
]

#: Stands for the ways ``blocks:K`` with every number K, less than all, of a stage's blocks.
SOME_BLOCKS = "blocks:K"

#: Numbers of pipelines of bidirectional schedules.
_NUM_PIPELINES = (2, 4)
#: Numbers of groups of stages per worker.
NUM_GROUPS = (2, 4)
#: Largest number of passes of micro-batches through stages of a schedule, which limits the time of its simulation (the generators
#: have the same limit).
MAX_PASSES = 2**17


def recomputations_of_stage(recomputations: Sequence[str], stage: int, num_stages: int) -> tuple[str, ...]:
    """Return the ways of recomputation on offer for one of the stages.

    Args:
        recomputations: The ways of recomputation that are allowed at all.
        stage: The stage.
        num_stages: Number of stages.

    >>> recomputations_of_stage(("none", "blocks", "stage"), 3, 4)
    ('none', 'blocks')
    """
    return tuple(way for way in recomputations if way != "stage" or stage < num_stages - 1)


def ways_of_units(recomputations: Sequence[str]) -> tuple[str, ...]:
    """Return the ways of recomputation that a unit of a stage may have: in ``blocks:K`` a block is recomputed or not.

    >>> ways_of_units(("layers", "blocks", SOME_BLOCKS))
    ('layers', 'blocks', 'none')
    """
    ways = dict.fromkeys(way for way in recomputations if not _is_of_some_blocks(way))
    if len(ways) < len(recomputations):
        ways.update(dict.fromkeys(("none", "blocks")))
    return tuple(ways)


def ways_of_arcs(recomputations: Sequence[str]) -> tuple[str, ...]:
    """Return the ways of recomputation by which bounds of whole stages differ.

    A bound of :data:`SOME_BLOCKS` takes for every unit the less of ``none`` and ``blocks``, and so holds for these as well.

    >>> ways_of_arcs(("none", "layers", "blocks", SOME_BLOCKS)), ways_of_arcs(("none", "blocks"))
    (('layers', 'blocks:K'), ('none', 'blocks'))
    """
    ways = tuple(way for way in recomputations if not _is_of_some_blocks(way))
    if len(ways) == len(recomputations):
        return ways
    return (*(way for way in ways if way not in ("none", "blocks")), SOME_BLOCKS)


def _is_of_some_blocks(way: str) -> bool:
    return way == SOME_BLOCKS or block_limit(way) is not None


def schedules(
    num_workers: int, num_micro_batches: int, num_units: int, stale: bool, equal: bool = True
) -> Iterator[PipelineSchedule]:
    """Iterate over the schedules of the space.

    Args:
        num_workers: Number of workers.
        num_micro_batches: Number of micro-batches per step.
        num_units: Number of units of the model: a schedule has at most as many stages.
        stale: Whether to include asynchronous schedules.
        equal: Whether all workers have the same number of devices.

    >>> sorted({spec.name for spec in schedules(2, 1, num_units=4, stale=False)})
    ['1f1b', 'gpipe', 'grouped-gpipe', 'zero-bubble']
    """
    if num_workers == 1:
        yield PipelineSchedule("1f1b", 1, num_micro_batches)
        return
    for spec in _schedules(num_workers, num_micro_batches, stale):
        if spec.num_pipelines > 1 and not equal:
            continue
        if spec.num_stages <= num_units and spec.num_stages * num_micro_batches <= MAX_PASSES:
            yield spec


def _schedules(depth: int, count: int, stale: bool) -> Iterator[PipelineSchedule]:
    """The schedules of ``depth`` workers and ``count`` micro-batches for models of any size."""
    yield PipelineSchedule("gpipe", depth, count)
    for policy in ("A", "B"):
        yield PipelineSchedule("1f1b", depth, count, (("policy", policy),))
    for policy in ("H1", "H2"):
        yield PipelineSchedule("zero-bubble", depth, count, (("policy", policy),))
    for groups in NUM_GROUPS:
        yield PipelineSchedule("grouped-gpipe", depth, count, (("groups", groups),), groups)
        if count % depth == 0:
            yield PipelineSchedule("interleaved-1f1b", depth, count, (("groups", groups),), groups)
    if depth % 2 == 0 and count > 1:
        yield PipelineSchedule("gems", depth, count, num_pipelines=2)
        yield from chimera_schedules(depth, count)
    if stale:
        yield PipelineSchedule("pipedream", depth, count, synchronous=False)
        if count >= depth:
            yield PipelineSchedule("pipedream-2bw", depth, count, synchronous=False)
            yield PipelineSchedule("wpipe", depth, count, groups=2, synchronous=False)


def chimera_schedules(depth: int, count: int) -> Iterator[PipelineSchedule]:
    """Iterate over Chimera's schedules of ``depth`` workers and ``count`` micro-batches; none if the workers are odd in number."""
    for num_pipelines in _NUM_PIPELINES:
        if depth % num_pipelines or count < num_pipelines:
            continue
        for concatenation in ("direct", "doubling", "halving"):
            if concatenation == "doubling" and count < 2 * depth:
                continue
            if concatenation == "halving" and count <= depth:
                continue
            options = (("concatenation", concatenation), ("num_pipelines", num_pipelines))
            yield PipelineSchedule("chimera", depth, count, options, num_pipelines=num_pipelines)
