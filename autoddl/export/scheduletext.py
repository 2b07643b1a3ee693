"""Writes the schedule of a pipeline: placement of the stages, tensors between stages, and the instructions of each worker.

**Instructions** are the actions that the runtime lowers the schedule to (:mod:`autoddl.pipelines.runtime.pipeline.lowering`), for
whole workers instead of single ranks. A message between two workers is one instruction; the file derives the messages between their
ranks from it (:mod:`autoddl.pipelines.runtime.pipeline.words`). The lowering puts all communication into one order that is the same
for all workers, and checks in a dry run that no deadlock occurs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import replace

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.draw import to_text
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.runtime.comm.layouts import Layout
from autoddl.pipelines.runtime.pipeline.holding import Holding, StageLayout, rows_over
from autoddl.pipelines.runtime.pipeline.lowering import lower_with_timeline
from autoddl.pipelines.runtime.pipeline.stage_plans import StagePlan, entry_strategy
from autoddl.pipelines.runtime.pipeline.words import word_of
from autoddl.pipelines.schedule import Schedule

from .scene import layout_text
from .source import comment, plain_text, value_text

__all__ = ["boundaries_text", "frame_text", "instructions_text"]

#: Most characters of a line of instructions, and of a line of the timeline.
_MAX_LINE_CHARACTERS = 108
#: The timeline of more workers is left out.
_MAX_TIMELINE_WORKERS = 16
#: Explanations of instructions, by the letter that marks them.
_LEGEND = {
    "F": "2F5    forward pass of micro-batch 5 in stage 2 (1:2F5: in pipeline 1; 2F4+5: of two micro-batches; 2F5a: of a half)",
    "B": "2B5    its backward pass: gradients of the input and of the weights",
    "I": "2I5    the part of its backward pass that computes the gradient of the input",
    "W": "2W5    the part of its backward pass that computes the gradients of the weights",
    "R": "2R5    recomputation: its forward pass again, from the kept input",
    ">": "2F5>3  send the result of 2F5 to worker 3; 2F5<1: receive it from worker 1",
    "A": "2A0    sum the gradients of stage 2 for update 0 over ranks; 0&3A0: of the weights that stages 0 and 3 share",
    "V": "V0     agree with all workers whether update 0 is skipped, since gradients are infinite; 2V0: with the worker's ranks",
    "U": "2U0    update 0 of stage 2: version 0 of its weights becomes version 1",
    "K": "2K0    the same update, but version 0 is kept for later tasks",
    "D": "2D0    free version 0 of the weights of stage 2",
}


def frame_text(schedule: Schedule) -> str:
    """Return the function ``schedule`` of the file: the properties of a schedule except its tasks."""
    remarks = {
        "placement": "per pipeline, the worker of each stage",
        "update_period": "micro-batches per update",
        "delays": "per stage, the number of updates by which its weights are delayed",
    }
    lines = [
        "def schedule() -> ScheduleFrame:",
        '    """Return the placement of the stages and the timing of updates; the tasks are in INSTRUCTIONS."""',
        "    return ScheduleFrame(",
    ]
    for name in ("num_stages", "num_micro_batches", "placement", "update_period", "delays"):
        remark = f"  {comment(remarks[name])}" if name in remarks else ""
        lines.append(f"        {name}={value_text(getattr(schedule, name))},{remark}")
    return "\n".join([*lines, "    )"])


def boundaries_text(
    graph: LayerGraph, stages: Sequence[StagePlan], holding: Sequence[StageLayout], priced: Evaluation
) -> str:
    """Return the function ``boundaries`` of the file: the tensors between consecutive stages.

    Args:
        graph: layer graph of the whole model.
        stages: the plan of each stage.
        holding: for each stage, how its ranks hold its input and output.
        priced: the evaluated plan.
    """
    lines = [
        "def boundaries() -> list[StageBoundary]:",
        '    """Return the tensors between consecutive stages, with their layouts on the ranks of both."""',
        "    return [",
    ]
    for number, boundary in enumerate(priced.boundaries):
        layer = stages[number].layers(graph)[-1]
        producer_strategy = stages[number].strategies[layer.name]
        producer_layout = layout_text(Layout(*producer_strategy.splits))
        consumer_layout = layout_text(Layout(*entry_strategy(graph, stages, number + 1).splits))
        remark = (
            f"Output of {plain_text(layer.name)}; per micro-batch {format_bytes(boundary.nbytes)}, "
            f"forward {format_seconds(boundary.forward_s)}, backward {format_seconds(boundary.backward_s)}"
        )
        rows = layer.output_elements // holding[number].columns
        layouts = f"producer_layout={producer_layout}, consumer_layout={consumer_layout}"
        if holding[number].rows_per_sample > 1:
            layouts += ", shares_samples=True" + (", is_image=True" if layer.is_image else "")
        lines += [f"        {comment(remark)}", f"        StageBoundary({rows}, {holding[number].columns}, {layouts}),"]
    return "\n".join([*lines, "    ]"])


def instructions_text(
    priced: Evaluation, is_joint: Sequence[bool], sharing_stages: Collection[tuple[int, ...]], agrees: bool
) -> str:
    """Return the list ``INSTRUCTIONS`` of the file, with a legend and the predicted timeline.

    Args:
        priced: the evaluated plan.
        is_joint: for each stage, whether its ranks communicate with each other while they compute.
        sharing_stages: groups of stages that share a weight.
        agrees: whether workers agree on each update whether it is skipped, since gradients are not finite.
    """
    programs = _programs(priced, is_joint, sharing_stages, agrees)
    letters = {letter for program in programs for word in program for letter in word if letter in _LEGEND}
    lines = [
        "The instructions of each worker, in order. Messages have the same order on all workers, so no deadlock occurs."
    ]
    lines += [f"    {text}" for letter, text in _LEGEND.items() if letter in letters]
    texts = ["\n".join(map(comment, [*lines, *_timeline(priced)])), "INSTRUCTIONS = ["]
    for worker, program in enumerate(programs):
        body = textwrap.wrap(" ".join(program), _MAX_LINE_CHARACTERS, break_long_words=False, break_on_hyphens=False)
        texts += [f"    {comment(f'worker {worker}')}", '    """', *(f"    {line}" for line in body), '    """,']
    return "\n".join([*texts, "]"])


def _timeline(priced: Evaluation) -> list[str]:
    """Return the predicted timeline as text; nothing if it has too many workers or too long lines."""
    if priced.schedule.num_workers > _MAX_TIMELINE_WORKERS:
        return []
    rows = to_text(priced.timeline, max_columns=_MAX_LINE_CHARACTERS // 2).splitlines()
    if max(map(len, rows)) > _MAX_LINE_CHARACTERS:
        return []
    title = (
        "The predicted timeline, a row for each worker; dots are waiting, equals signs continue the task before them:"
    )
    return [title, *(f"    {row}" for row in rows)]


def _programs(
    priced: Evaluation, is_joint: Sequence[bool], sharing_stages: Collection[tuple[int, ...]], agrees: bool
) -> list[list[str]]:
    """Return the instructions of each worker: the actions of the same schedule on workers of one rank each."""
    one_rank = rows_over(1)
    schedule = replace(priced.schedule, widths=(1,) * priced.schedule.num_workers)
    layouts = tuple(StageLayout(one_rank, one_rank, 1, 1, joint) for joint in is_joint)
    lowered = lower_with_timeline(Holding(schedule, 1, layouts), priced.timeline, tied=sharing_stages, agrees=agrees)
    return [[word_of(action) for action in program] for program in lowered.programs]
