"""The section on the pipeline of a plan with several stages: schedule, timeline and figures of each stage."""

from __future__ import annotations

from autoddl.costmodel.units import format_ranges, format_seconds
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.schedule import Kind

from ..explain import PlanView
from .charts import timeline_pictures
from .markup import Markup, element
from .sections import Section, collapsed, facts, nbytes, number, paragraph, scrolling, seconds, swatch, table

__all__ = ["pipeline_section"]

#: The table of stages is collapsed if it has more rows.
MAX_STAGES = 8
#: Entries of the legend: kinds of tasks, style, name.
_LEGEND = (
    ((Kind.FORWARD,), "forward", "forward"),
    ((Kind.BACKWARD, Kind.BACKWARD_INPUT), "backward", "backward"),
    ((Kind.BACKWARD_WEIGHT,), "weight", "weight gradients"),
    ((Kind.RECOMPUTE,), "again", "recomputation"),
    ((Kind.ALL_REDUCE, Kind.UPDATE), "reduce", "gradient all-reduce, update"),
)


def pipeline_section(view: PlanView) -> Section:
    """Return the section on stages, workers and their timeline."""
    evaluation = view.evaluation
    configuration, schedule, timeline = evaluation.configuration, evaluation.schedule, evaluation.timeline
    spec, mesh = configuration.schedule, configuration.mesh
    waiting_share = view.bubble_s / view.step_s if view.step_s else 0.0
    finding = f"{spec.num_stages} stages under {spec.label}: the busiest worker waits {waiting_share:.1%} of the step"
    synchronous = "yes" if spec.synchronous else "no: weights are delayed"
    kinds = {task.kind for tasks in schedule.workers for task in tasks}
    entries = [(style, name) for task_kinds, style, name in _LEGEND if kinds.intersection(task_kinds)]
    if schedule.num_pipelines > 1:
        styles = [style for style, _ in entries if style in ("forward", "backward", "weight")]
        entries += [(f"{style} other", f"{style}, other direction") for style in styles]
    legend = [element("li", swatch(style), name) for style, name in entries]
    content = [
        facts(
            [
                ("Workers", f"{spec.num_workers} of {mesh} devices"),
                (
                    "Micro-batches",
                    f"{spec.num_micro_batches} of {configuration.workload.micro_batch} {view.plan.graph.sample}s",
                ),
                ("Pipelines at once", f"{spec.num_pipelines}"),
                ("Synchronous", synchronous),
                ("Bubbles, mean of workers", f"{timeline.bubble_ratio:.1%}"),
                ("Exposed transfers", format_seconds(evaluation.exposed_transfer_s)),
                ("Exposed all-reduce", format_seconds(evaluation.exposed_all_reduce_s)),
            ]
        ),
        element("ul", *legend, class_="legend"),
    ]
    for caption, picture in timeline_pictures(timeline):
        if caption:
            content.append(paragraph(caption[0].upper() + caption[1:], class_="kicker"))
        content.append(scrolling(picture, "pipeline timeline"))
    stages = scrolling(_stage_table(evaluation), "stages")
    content.append(stages if spec.num_stages <= MAX_STAGES else collapsed(f"{spec.num_stages} stages", stages))
    return Section("pipeline", "Pipeline", finding, tuple(content))


def _stage_table(evaluation: Evaluation) -> Markup:
    rows = []
    for stage, (figures, choice) in enumerate(zip(evaluation.stages, evaluation.configuration.stages)):
        workers = [replica.worker for replica in evaluation.schedule.replicas_of(stage)]
        # The communication time is a difference of sums: a rest that is due to rounding is shown as 0.
        communication_s = figures.communication_s if figures.communication_s > 1e-12 * figures.busy_s else 0.0
        in_flight = max(evaluation.in_flight[stage])
        rows.append(
            (
                number(f"{stage}", stage),
                format_ranges(sorted(workers)),
                number(f"{len(figures.graph.layers)}", len(figures.graph.layers)),
                choice.recompute,
                seconds(figures.forward_s),
                seconds(figures.backward_s),
                seconds(communication_s),
                seconds(figures.all_reduce_s),
                number(f"{in_flight:g}", in_flight),
                nbytes(evaluation.boundaries[stage - 1].nbytes) if stage else "data",
                nbytes(max(evaluation.worker_memory_bytes[worker] for worker in workers)),
            )
        )
    head = (
        "Stage",
        "Workers",
        "Layers",
        "Recompute",
        "Forward",
        "Backward",
        "Communication",
        "All-reduce",
        "In flight",
        "Input",
        "Memory",
    )
    caption = "Per stage; forward, backward and communication of one micro-batch, all-reduce per step"
    return table(head, rows, numbers=(2, 4, 5, 6, 7, 8, 9, 10), caption=caption)
