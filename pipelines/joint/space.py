"""The space of joint plans: divisions of the devices, schedules, micro-batches and cuts.

======================  ==========================================================================================================
what                    values
======================  ==========================================================================================================
devices of the workers  every rectangle of nodes x devices that tiles the cluster, all workers equal; and the divisions in unequal
                        rectangles of :mod:`.meshes`; D = the number of workers
schedule                every family of the generators with every policy; bidirectional ones with 2 or 4 pipelines and every way to
                        string units together; 2 or 4 groups of stages per worker; asynchronous ones where they are asked for.
                        Bidirectional ones for equal workers alone: each holds the stages of another one too
micro-batch             every divisor of the batch
cut in S stages         every cut of the chain of units
recomputation           per stage: none, layer by layer, or of the whole stage
======================  ==========================================================================================================

One worker (D = 1) is a plan without a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator

from .configuration import PipelineSchedule

__all__ = ["MAX_PASSES", "schedules"]

_PIPELINES = (2, 4)
_GROUPS = (2, 4)
#: Passes of a micro-batch through a stage beyond which a schedule is not worth its simulation (the generators' own limit).
MAX_PASSES = 2**17


def schedules(
    num_workers: int, num_micro_batches: int, num_units: int, stale: bool, equal: bool = True
) -> Iterator[PipelineSchedule]:
    """Every schedule of so many workers and micro-batches for a model of so many units.

    Args:
        stale: asynchronous ones too.
        equal: whether all workers have as many devices.
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
    yield PipelineSchedule("gpipe", depth, count)
    for policy in ("A", "B"):
        yield PipelineSchedule("1f1b", depth, count, (("policy", policy),))
    for policy in ("H1", "H2"):
        yield PipelineSchedule("zero-bubble", depth, count, (("policy", policy),))
    for groups in _GROUPS:
        yield PipelineSchedule("grouped-gpipe", depth, count, (("groups", groups),), groups)
        if count % depth == 0:
            yield PipelineSchedule("interleaved-1f1b", depth, count, (("groups", groups),), groups)
    if depth % 2 == 0 and count > 1:
        yield PipelineSchedule("gems", depth, count, num_pipelines=2)
        yield from _chimera(depth, count)
    if stale:
        yield PipelineSchedule("pipedream", depth, count, synchronous=False)
        if count >= depth:
            yield PipelineSchedule("pipedream-2bw", depth, count, synchronous=False)
            yield PipelineSchedule("wpipe", depth, count, groups=2, synchronous=False)


def _chimera(depth: int, count: int) -> Iterator[PipelineSchedule]:
    for pipelines in _PIPELINES:
        if depth % pipelines or count < pipelines:
            continue
        for concatenation in ("direct", "doubling", "halving"):
            if concatenation == "doubling" and count < 2 * depth:
                continue
            if concatenation == "halving" and count <= depth:
                continue
            options = (("concatenation", concatenation), ("num_pipelines", pipelines))
            yield PipelineSchedule("chimera", depth, count, options, num_pipelines=pipelines)
