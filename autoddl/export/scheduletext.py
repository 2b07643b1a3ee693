"""The schedule of a pipeline as text of a file: its frame, what passes between stages, and what each worker does, in words.

**Instructions** are those that the runtime lowers the schedule to (:mod:`autoddl.pipelines.runtime.pipeline.lowering`), of whole
workers in place of ranks: a message between workers is one word, and each rank has its share of it
(:mod:`autoddl.pipelines.runtime.pipeline.words`).  So they stand in the total order of all communication, and the dry run has been
through them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.draw import to_text
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.runtime.layouts import Layout
from autoddl.pipelines.runtime.pipeline.holding import Holding, StageLayout, rows_over
from autoddl.pipelines.runtime.pipeline.lowering import lower_along
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan, entry_strategy
from autoddl.pipelines.runtime.pipeline.words import word_of
from autoddl.pipelines.schedule import Schedule

from .scene import layout_text
from .source import comment, plain_text, value_text

__all__ = ["boundaries_text", "frame_text", "instructions_text"]

#: Of a line of instructions, and of a picture of the schedule.
_WIDTH = 108
#: Workers of a picture.
_MAX_ROWS = 16
_LEGEND = {
    "F": "2F5    forward of micro-batch 5 through stage 2 (1:2F5 in pipeline 1, 2F4+5 of two, 2F5a of a half)",
    "B": "2B5    backward of it, gradients of input and weights",
    "I": "2I5    the part of the backward that yields the gradient of the input",
    "W": "2W5    the part that yields the gradients of the weights",
    "R": "2R5    forward once more, from the input that was kept",
    ">": "2F5>3  its output goes to worker 3; 2F5<1 on the other side: it comes from worker 1",
    "A": "2A0    gradients of update 0 of stage 2 are summed; 0&3A0 those of weights that stages 0 and 3 share",
    "U": "2U0    update 0 of stage 2: version 0 of its weights becomes version 1",
    "K": "2K0    the same, but version 0 is still needed",
    "D": "2D0    version 0 of stage 2's weights is needed no more",
}


def frame_text(schedule: Schedule) -> str:
    """A function that gives all of a schedule but its tasks."""
    remarks = {
        "placement": "of each pipeline that micro-batches go through the worker of every stage",
        "update_period": "micro-batches",
        "delays": "updates that the weights of each stage lag behind",
    }
    lines = [
        "def schedule() -> ScheduleFrame:",
        '    """Where the stages are, and which weights micro-batches use."""',
        "    return ScheduleFrame(",
    ]
    for name in ("num_stages", "num_micro_batches", "placement", "update_period", "delays"):
        remark = f"  {comment(remarks[name])}" if name in remarks else ""
        lines.append(f"        {name}={value_text(getattr(schedule, name))},{remark}")
    return "\n".join([*lines, "    )"])


def boundaries_text(graph: LayerGraph, stages: Sequence[StagePlan], columns: Sequence[int], priced: Evaluation) -> str:
    """A function that gives what passes between stages; ``columns`` are those of what leaves each of them."""
    lines = [
        "def boundaries() -> list[StageBoundary]:",
        '    """What passes from each stage to the next one, and how it lies on the ranks of both."""',
        "    return [",
    ]
    for number, boundary in enumerate(priced.boundaries):
        layer = stages[number].layers(graph)[-1]
        ends = stages[number].strategies[layer.name], entry_strategy(graph, stages, number + 1)
        leaving, arriving = (layout_text(Layout(*strategy.splits)) for strategy in ends)
        remark = (
            f"{plain_text(layer.name)}, a micro-batch: {format_bytes(boundary.nbytes)}, "
            f"forward {format_seconds(boundary.forward_s)}, backward {format_seconds(boundary.backward_s)}"
        )
        rows = layer.output_elements // columns[number]
        text = f"StageBoundary({rows}, {columns[number]}, leaving={leaving}, arriving={arriving}),"
        lines += [f"        {comment(remark)}", f"        {text}"]
    return "\n".join([*lines, "    ]"])


def instructions_text(priced: Evaluation, joint: Sequence[bool], tied: Collection[tuple[int, ...]]) -> str:
    """The words of all workers.

    Args:
        joint: of each stage whether its ranks communicate with each other while they compute.
        tied: the stages that share weights, group by group.
    """
    programs = _programs(priced, joint, tied)
    letters = {letter for words in programs for word in words for letter in word if letter in _LEGEND}
    lines = ["What each worker does, in this order; what they send and receive has one order on all of them:"]
    lines += [f"    {text}" for letter, text in _LEGEND.items() if letter in letters]
    texts = ["\n".join(map(comment, [*lines, *_picture(priced)])), "INSTRUCTIONS = ["]
    for worker, words in enumerate(programs):
        body = textwrap.wrap(" ".join(words), _WIDTH, break_long_words=False, break_on_hyphens=False)
        texts += [f"    {comment(f'worker {worker}')}", '    """', *(f"    {line}" for line in body), '    """,']
    return "\n".join([*texts, "]"])


def _picture(priced: Evaluation) -> list[str]:
    """The predicted timeline, where it is small enough to be seen."""
    if priced.schedule.num_workers > _MAX_ROWS:
        return []
    rows = to_text(priced.timeline, max_columns=_WIDTH // 2).splitlines()
    return ["The predicted timeline:", *(f"    {row}" for row in rows)] if max(map(len, rows)) <= _WIDTH else []


def _programs(priced: Evaluation, joint: Sequence[bool], tied: Collection[tuple[int, ...]]) -> list[list[str]]:
    """Of each worker its words, as if it were one rank."""
    alone = rows_over(1)
    schedule = replace(priced.schedule, widths=(1,) * priced.schedule.num_workers)
    holding = Holding(schedule, 1, tuple(StageLayout(alone, alone, 1, 1, is_joint) for is_joint in joint))
    lowered = lower_along(holding, priced.timeline, tied=tied)
    return [[word_of(action) for action in program] for program in lowered.programs]
