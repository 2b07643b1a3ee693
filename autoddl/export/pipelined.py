"""A plan with a pipeline as one readable Python file that needs OneFlow alone.

    heading             what it is, what it is predicted to cost, how to run it
    ranks               the workers, the stages on them, mesh axes, the figures of the schedule
    model               a class for each repeated block and one for each stage: parameters with their SBP, every step with its price
    schedule            what each worker does, and what it sends when: words, in one order for all of them
    library             the loop that carries them out; passes, layers, layouts and collectives, in the runtime's own words
    main                trains some steps

**Instructions** are those that the runtime lowers the schedule to (:mod:`autoddl.pipelines.runtime.pipeline.lowering`), of whole
workers in place of ranks: a message between workers is one word, and each rank has its share of it.  So they stand in the total
order of all communication, and the dry run has been through them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import Layer
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.pipelines.draw import to_text
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.partition import ENTRY
from autoddl.pipelines.runtime.layouts import Layout, layout_of, product_order
from autoddl.pipelines.runtime.pipeline.actions import Action, Drop, Receive, Reduce, Run, Send, Update
from autoddl.pipelines.runtime.pipeline.dryrun import check_programs
from autoddl.pipelines.runtime.pipeline.holding import Holding, StageLayout, hold, rows_over
from autoddl.pipelines.runtime.pipeline.local import local_actions
from autoddl.pipelines.runtime.pipeline.order import Entry, communication, members, rank_program
from autoddl.pipelines.runtime.pipeline.slots import RankMap, slots_per_micro_batch
from autoddl.pipelines.runtime.pipeline.stage_plans import entry_strategy, stage_layouts
from autoddl.pipelines.schedule import Schedule

from ..staging import stage_plans
from ..zoo.builtin import BuiltIn, recognise
from . import templates
from .assembling import RESERVED, SBP_NAMES, Draft, assembled, axis_lines, check_graph
from .classes import ClassOfLayers, class_texts
from .scene import Scene, layout_text
from .source import Names, comment, literal, value_text

if TYPE_CHECKING:
    from ..planfile import Plan

__all__ = ["pipeline_text"]

#: What a file uses while it is loaded.
_FIRST = ("Axis", "Ranks")
#: Of a line of instructions, and of a picture of the schedule.
_WIDTH = 108
#: Workers of a picture.
_MOST_ROWS = 16
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


def pipeline_text(plan: Plan, model: str = "") -> str:
    """The file.

    Args:
        model: of users' models; refused.

    Raises:
        UserError: the plan has a layer or a schedule that cannot be written, or its model is not built in; it is named.
    """
    built_in = None if model else recognise(plan.graph)
    if built_in is None:
        raise UserError(
            f"the plan is a pipeline of {plan.num_stages} stages of {model or plan.graph.name}, which is none that can be built in "
            "the file; --to oneflow writes pipelines of built-in models, a script can train it: autoddl.staging.planned_model"
        )
    assert plan.pipeline is not None
    check_graph(plan.graph)
    return assembled(_Writer(plan, plan.pipeline, built_in).draft())


class _Writer:
    """One file in the making."""

    def __init__(self, plan: Plan, pipeline: Evaluation, built_in: BuiltIn):
        self.plan, self.pipeline, self.built_in = plan, pipeline, built_in
        self.schedule: Schedule = pipeline.schedule
        self.stages = stage_plans(plan)
        self.layouts = stage_layouts(plan.graph, self.stages)
        self.ranks = RankMap(self.schedule.widths)
        hold(self.schedule, plan.workload.micro_batch, self.layouts)  # refuses what does not divide
        if self.schedule.num_micro_batches % self.schedule.update_period:
            raise UserError(
                f"schedule {self.schedule.name} ends in an update of fewer micro-batches than the others, which --to oneflow "
                "cannot write"
            )
        self.owners = {parameter: owner for owner, *others in self._shared() for parameter in (owner, *others)}
        self.axes: dict[Axis, str] = {}
        self.names = Names(RESERVED)
        self.scenes = [self._scene(number) for number in range(plan.num_stages)]

    def draft(self) -> Draft:
        """All parts of the file that are its own."""
        classes = class_texts([self._class(number, scene) for number, scene in enumerate(self.scenes)])
        shared = self._shared_text()
        after = [self._boundaries(), *([shared] if shared else []), self._instructions()]
        names = [f"Stage{number}" for number in range(self.plan.num_stages)]
        num_updates = self.schedule.num_updates
        return Draft(
            heading=self._heading(),
            num_ranks=self.ranks.num_ranks,
            ranks=self._workers(),
            first=_FIRST,
            sections=(("", (self._constants(),)), ("The model", tuple(classes)), ("The schedule", tuple(after))),
            main=templates.pipeline_main(self.scenes[0], names, num_updates, bool(shared)),
        )

    # ---- Stages ------------------------------------------------------------------------------------------------------

    def _scene(self, number: int) -> Scene:
        """A stage, on the devices of one worker."""
        figures, choice = self.pipeline.stages[number], self.pipeline.configuration.stages[number]
        strategies = dict(choice.strategies)
        if number:
            strategies[ENTRY] = entry_strategy(self.plan.graph, self.stages, number)
        copies = {}
        for layer in figures.graph.layers:
            for parameter in self.plan.graph[layer.name].parameters:
                owner = self.owners.get(parameter.name, parameter.name)
                if owner != parameter.name:
                    copies[parameter.name] = owner
        workload = replace(self.plan.workload, recompute=choice.recompute == "layers")
        return Scene(
            graph=figures.graph.graph,
            cluster=self.pipeline.configuration.mesh_of(number).devices(self.plan.cluster),
            workload=workload,
            strategies=strategies,
            assessed={found.layer.name: found for found in figures.assessment.layers},
            built_in=self.built_in,
            names=self.names,
            axes=self.axes,
            is_stage=True,
            copies=copies,
        )

    def _class(self, number: int, scene: Scene) -> ClassOfLayers:
        figures = self.pipeline.stages[number]
        layers = figures.graph.layers
        again = f", run again {format_seconds(figures.recompute_s)}" if figures.recompute_s else ""
        result = "the mean loss" if number == self.plan.num_stages - 1 else "what the next stage takes"
        what = (
            f"{_plain(layers[0].name)} to {_plain(layers[-1].name)}: {result}.\n\n"
            f"    A micro-batch: forward {format_seconds(figures.forward_s)}, backward {format_seconds(figures.backward_s)}"
            f"{again}; a step: sums of gradients {format_seconds(figures.all_reduce_s)}.\n    "
        )
        return ClassOfLayers(scene, f"Stage{number}", what, {ENTRY: "entering"} if number else {})

    # ---- Ranks and figures -------------------------------------------------------------------------------------------

    def _heading(self) -> str:
        plan, pipeline, cluster, workload = self.plan, self.pipeline, self.plan.cluster, self.plan.workload
        spec = pipeline.configuration.schedule
        precision = (
            ""
            if workload.precision == "float32"
            else f" (of {workload.precision} precision; this file runs in float32)"
        )
        lines = [
            f"Model    {plan.graph.name} ({self.built_in.family}): {plan.graph.num_parameters:,} parameters",
            f"Cluster  {cluster.name}: {cluster.num_nodes} x {cluster.devices_per_node} {cluster.device.name}",
            f"Pipeline {spec.label}: {plan.num_stages} stages on {self.schedule.num_workers} workers",
            f"Step     {workload.batch} {plan.graph.sample}s in {workload.num_micro_batches} x {workload.micro_batch}",
            f"Price    {format_seconds(pipeline.step_s)} a step{precision}; of the busiest worker "
            f"{format_seconds(pipeline.compute_s)} compute,",
            f"         {format_seconds(pipeline.inner_communication_s)} communication inside its stages, "
            f"{format_seconds(pipeline.exposed_communication_s)} exposed between them, {format_seconds(pipeline.bubble_s)} bubble;",
            f"         each rank sends up to {format_bytes(pipeline.sent_bytes)} and needs up to "
            f"{format_bytes(pipeline.memory_bytes)}",
            *self._note_on_replicas(),
            f"Plan     graph {plan.graph.hash}",
            f"         cluster {cluster.hash}",
            *(f"Note     {note}" for note in plan.graph.notes),
        ]
        return "\n".join([templates.PIPELINE_DOCSTRING, *map(comment, lines)])

    def _note_on_replicas(self) -> list[str]:
        count = self.schedule.num_pipelines
        if count == 1:
            return []
        return [
            f"Prices   of a step are below those of all its micro-batches; each of the {count} pipelines has a share of these"
        ]

    def _workers(self) -> str:
        """The placements."""
        mesh, cluster = self.pipeline.configuration.mesh, self.plan.cluster
        devices = [mesh.ranks(cluster, worker) for worker in range(self.schedule.num_workers)]
        lines = [comment("The ranks of each worker: the placement of the parameters of its stages.")]
        if any(list(self.ranks.ranks_of(worker)) != list(own) for worker, own in enumerate(devices)):
            lines.append(
                comment(
                    "The plan has them on the devices in brackets, counted node by node; `autoddl launch` puts them there."
                )
            )
        lines.append("WORKERS = [")
        for worker, own in enumerate(devices):
            ranks = self.ranks.ranks_of(worker)
            there = "" if list(ranks) == list(own) else f" [{' '.join(map(str, own))}]"
            stages = ", ".join(
                f"{stage}{f' of pipeline {pipeline}' if self.schedule.num_pipelines > 1 else ''}"
                for pipeline, stage in self.schedule.stages_on(worker)
            )
            needs = format_bytes(self.pipeline.memory[worker])
            remark = comment(f"worker {worker}{there}: stage {stages}; {needs} a rank")
            start = f"{ranks.start}, " if ranks.start else ""
            lines.append(f"    range({start}{ranks.stop}),  {remark}")
        lines += [
            "]",
            "JOB_RANK = flow.env.get_rank()",
            "WORKER = next(worker for worker, ranks in enumerate(WORKERS) if JOB_RANK in ranks)",
            comment("The ranks of this one's worker, counted from 0."),
            "RANKS = Ranks(len(WORKERS[WORKER]), WORKERS[WORKER][0])",
        ]
        return "\n".join([*lines, SBP_NAMES])

    def _constants(self) -> str:
        schedule, joint = self.schedule, [s for s, layout in enumerate(self.layouts) if layout.is_joint]
        lines = [
            comment("The worker of each stage, for every pipeline that the micro-batches go through."),
            f"PIPELINES = {value_text([list(workers) for workers in schedule.placement])}",
        ]
        if self.axes:
            lines.append(comment("The axes of a worker's ranks that collectives run along."))
            lines += axis_lines(self.axes.items(), max(schedule.widths))
        halves = slots_per_micro_batch(schedule)
        lines += [
            comment(
                "Samples of a micro-batch, micro-batches of an update, updates until the pipeline is empty, and in how many"
            ),
            comment("parts a micro-batch is worked on."),
            "MICRO_BATCH, UPDATE_PERIOD, NUM_UPDATES, PARTS_PER_MICRO_BATCH = "
            f"{self.plan.workload.micro_batch}, {schedule.update_period}, {schedule.num_updates}, {halves}",
            comment("By how many updates the weights of each stage lag behind."),
            f"DELAYS = {value_text(list(schedule.delays))}",
            comment("Stages whose ranks communicate with each other while they compute."),
            f"JOINT_STAGES: set[int] = {'{' + ', '.join(map(str, joint)) + '}' if joint else 'set()'}",
        ]
        return "\n".join(lines)

    # ---- Schedule ----------------------------------------------------------------------------------------------------

    def _boundaries(self) -> str:
        lines = [
            "def boundaries() -> list[Boundary]:",
            '    """What passes from each stage to the next one, and how it lies on the ranks of both."""',
            "    return [",
        ]
        for number, priced in enumerate(self.pipeline.boundaries):
            layer = self.stages[number].layers(self.plan.graph)[-1]
            columns = self.layouts[number].columns
            ends = (
                self.stages[number].strategies[layer.name],
                entry_strategy(self.plan.graph, self.stages, number + 1),
            )
            leaving, arriving = (layout_text(Layout(*strategy.splits)) for strategy in ends)
            remark = (
                f"{_plain(layer.name)}, a micro-batch: {format_bytes(priced.nbytes)}, forward {format_seconds(priced.forward_s)}, "
                f"backward {format_seconds(priced.backward_s)}"
            )
            text = f"Boundary({layer.output_elements // columns}, {columns}, leaving={leaving}, arriving={arriving}),"
            lines += [f"        {comment(remark)}", f"        {text}"]
        return "\n".join([*lines, "    ]"])

    def _shared(self) -> list[tuple[str, ...]]:
        """Weights that several stages have: of each the owner's name and then the others'."""
        graph = self.plan.graph
        stage_of = {name: number for number, stage in enumerate(self.stages) for name in stage.strategies}
        found: dict[str, list[str]] = {}
        for layer in graph.layers:
            for parameter in layer.parameters:
                if parameter.tied_to is not None and stage_of[layer.name] != stage_of[parameter.tied_to]:
                    (owner,) = (p for p in graph[parameter.tied_to].parameters if p.shape == parameter.shape)
                    found.setdefault(owner.name, []).append(parameter.name)
        return [(owner, *others) for owner, others in found.items()]

    def _shared_text(self) -> str:
        """A function that says how stages hold the weights that they share; empty where there are none."""
        lines = []
        for owner, *others in self._shared():
            lines.append(f"        SharedWeight({literal(owner)}, {{")
            for number, stage in enumerate(self.stages):
                layers = self._having(number, (owner, *others))
                if len(layers) > 1:
                    raise UserError(
                        f"{layers[1].describe()}: it shares {owner} with {layers[0].name!r} of its stage and with other "
                        "stages, which --to oneflow cannot write"
                    )
                lines += [
                    f"            {number}: {self._held(owner, one, stage.strategies[one.name])}," for one in layers
                ]
            lines.append("        }),")
        if not lines:
            return ""
        what = "Weights that several stages have, each in its own layout; their gradients are summed over all of these."
        head = ["def shared_weights() -> list[SharedWeight]:", f'    """{what}"""', "    return ["]
        return "\n".join([*head, *lines, "    ]"])

    def _held(self, name: str, layer: Layer, strategy: Strategy) -> str:
        attributes, layout = layer.attributes, layout_text(layout_of(layer, strategy))
        if layer.kind == "embedding":
            return f"table_layouts({literal(name)}, {attributes['vocabulary']}, {attributes['features']}, {layout})[0]"
        if layer.kind != "linear" or strategy.summa or product_order(self.plan.graph, layer).num_groups > 1:
            raise UserError(
                f"{layer.describe()}: it shares a weight with another stage in a way that --to oneflow cannot write"
            )
        weights = f"{{{literal(name)}: {attributes['out_features']}}}"
        return f"linear_layouts({weights}, {{}}, {attributes['in_features']}, {layout})[0]"

    def _instructions(self) -> str:
        programs = self._programs()
        letters = {letter for words in programs for word in words for letter in word if letter in _LEGEND}
        lines = ["What each worker does, in this order; what they send and receive has one order on all of them:"]
        lines += [f"    {text}" for letter, text in _LEGEND.items() if letter in letters]
        texts = ["\n".join(map(comment, [*lines, *self._picture()])), "INSTRUCTIONS = ["]
        for worker, words in enumerate(programs):
            body = textwrap.wrap(" ".join(words), _WIDTH, break_long_words=False, break_on_hyphens=False)
            texts += [f"    {comment(f'worker {worker}')}", '    """', *(f"    {line}" for line in body), '    """,']
        return "\n".join([*texts, "]"])

    def _picture(self) -> list[str]:
        """The predicted timeline, where it is small enough to be seen."""
        if self.schedule.num_workers > _MOST_ROWS:
            return []
        rows = to_text(self.pipeline.timeline, max_columns=_WIDTH // 2).splitlines()
        return ["The predicted timeline:", *(f"    {row}" for row in rows)] if max(map(len, rows)) <= _WIDTH else []

    def _programs(self) -> list[list[str]]:
        """Of each worker its instructions as words: the passes of the lowering, as if every worker were one rank."""
        alone = rows_over(1)
        schedule = replace(self.schedule, widths=(1,) * self.schedule.num_workers)
        holding = Holding(schedule, 1, tuple(StageLayout(alone, alone, 1, 1, one.is_joint) for one in self.layouts))
        actions = local_actions(schedule, holding)
        shares: list[list[Entry]] = [[] for _ in actions]
        for entry in communication(holding, self.pipeline.timeline, actions, self._ties()):
            for worker in members(entry):
                shares[worker].append(entry)
        programs = [rank_program(worker, own, shares[worker]) for worker, own in enumerate(actions)]
        check_programs(holding, programs)
        return [[_word(action) for action in program] for program in programs]

    def _ties(self) -> set[tuple[int, ...]]:
        """The stages that share weights, group by group."""
        found = set()
        for names in self._shared():
            found.add(tuple(number for number, stage in enumerate(self.stages) if self._having(number, names)))
        return found

    def _having(self, number: int, names: Sequence[str]) -> list[Layer]:
        """The layers of a stage that have one of these weights."""
        layers = self.stages[number].layers(self.plan.graph)
        return [layer for layer in layers if any(p.name in names for p in layer.parameters)]


def _word(action: Action) -> str:
    if isinstance(action, Run):
        return str(action.task)
    if isinstance(action, Send):
        return f"{action.message.task}>{action.message.destination}"
    if isinstance(action, Receive):
        return f"{action.message.task}<{action.message.source}"
    if isinstance(action, Reduce):
        return f"{'&'.join(map(str, action.stages))}A{action.update}"
    if isinstance(action, Update):
        text = str(action.task)
        return text.replace("U", "K") if action.keeps else text
    assert isinstance(action, Drop), action
    prefix = f"{action.pipeline}:" if action.pipeline else ""
    return f"{prefix}{action.stage}D{action.version}"


def _plain(text: str) -> str:
    """A document's text for a docstring or a comment."""
    return comment(text)[2:].replace("\\", "/").replace('"', "'")
