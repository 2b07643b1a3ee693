"""A plan as its readers see it: the figures that `explain`, `diff` and `report` share, of plans with a pipeline and without.

Everything comes from the plan as :func:`autoddl.planfile.load_plan` has checked it.  What was claimed of a plan that was edited is
not there: it has no certificate and no rivals.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoddl.costmodel.assessment import LayerAssessment
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.units import format_ranges
from autoddl.costmodel.workload import OPTIMIZERS
from autoddl.pipelines.joint.evaluation import Evaluation, stage_workload

from ..plandocument import NOT_CLAIMED
from ..planfile import Plan, assessment_of, load_plan
from .resources import LOCAL, ResourceBook

__all__ = [
    "Certificate",
    "DeviceMemory",
    "LayerGroup",
    "Part",
    "PlanView",
    "Rival",
    "Section",
    "load_view",
    "pipeline_parts",
    "view_of",
]

#: Seconds that differences of sums may be below 0; the part of a sum that they may be off.
_ROUNDING_S = 1e-9
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Part:
    """A part of the step's time [s]: of ``compute``, ``communication`` or ``idle``."""

    name: str
    kind: str
    seconds: float


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers of a repeated block with one strategy, or a layer of its own.

    Attributes:
        name: of the block and role, or the layer's.
        layers: by name.
        strategy: of all of them.
        sbp: layouts of input, weight and output as text; a layer without weights has "" there.
        compute_s, communication_s, sent_bytes: per step, on each device (of one stage, where it stands for several).
        memory_bytes: of state and activations kept, on each device.
    """

    name: str
    layers: tuple[str, ...]
    strategy: Strategy
    sbp: Mapping[str, str]
    compute_s: float
    communication_s: float
    sent_bytes: float
    memory_bytes: float

    @property
    def seconds(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def label(self) -> str:
        """With the number of layers."""
        return f"{self.name} x {len(self.layers)}" if len(self.layers) > 1 else self.name


@dataclass(frozen=True)
class Section:
    """The whole model, or equal stages of a pipeline.

    Attributes:
        title: empty for a plan without stages.
        stages: their numbers.
        groups: the layers of the first of them.
    """

    title: str
    stages: tuple[int, ...]
    groups: tuple[LayerGroup, ...]


@dataclass(frozen=True)
class DeviceMemory:
    """What fills each of some devices [bytes]."""

    title: str
    num_devices: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffer


@dataclass(frozen=True)
class Rival:
    """A baseline's best plan, or why there is none (then there are no figures)."""

    name: str
    how: str
    infeasible: str = ""
    step_s: float = 0.0
    communication_s: float = 0.0
    bubble_s: float = 0.0
    memory_bytes: float = 0.0


@dataclass(frozen=True)
class Certificate:
    """What the search proved, and how.

    Attributes:
        optimal: whether no plan of the space is better.
        lower_bound_s: on what is minimised.
        gap: how much better another plan could be at most, relative to this one.
        search_s: what the search took.
        space_size: plans to choose from; 0 where nobody counted them, as those of a paper's planner.
    """

    optimal: bool
    lower_bound_s: float
    gap: float
    search_s: float
    space_size: int

    @property
    def verdict(self) -> str:
        """In a few words."""
        return "proven optimal" if self.optimal else f"gap at most {self.gap:.2%}"


@dataclass(frozen=True)
class PlanView:
    """A plan's figures; seconds are per training step, bytes those of the fullest (busiest) device.

    Attributes:
        certificate: None of a plan that was edited.
    """

    plan: Plan
    model: str
    method: str
    objective: str
    certificate: Certificate | None
    step_s: float
    compute_s: float
    communication_s: float
    memory_bytes: float
    memory_limit_bytes: float
    sent_bytes: float
    parts: tuple[Part, ...]
    sections: tuple[Section, ...]
    memory: tuple[DeviceMemory, ...]
    rivals: tuple[Rival, ...]
    notes: tuple[str, ...]

    @property
    def fields(self) -> Fields:
        """The document, to be read field by field."""
        return Fields(self.plan.document, "the plan")

    @property
    def cost_s(self) -> float:
        """What was minimised."""
        return self.communication_s if self.objective == "communication" else self.step_s

    @property
    def verdict(self) -> str:
        """What is proven, in a few words."""
        return NOT_CLAIMED if self.certificate is None else self.certificate.verdict

    @property
    def heading(self) -> str:
        """Model, cluster and size."""
        cluster = self.plan.cluster
        nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
        return f"{self.model} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}"

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.plan.workload.batch / self.step_s if self.step_s else 0.0

    @property
    def utilisation(self) -> float:
        """Of the peak FLOP/s of all devices; recomputation does not count as work."""
        cluster, workload = self.plan.cluster, self.plan.workload
        peak = cluster.num_devices * cluster.device.peak_flops[workload.precision]
        return 3 * self.plan.graph.flops * self.rate / peak

    @property
    def recomputation(self) -> str:
        """What is recomputed: none, layers, stage (all of it), or other things in other stages."""
        if self.plan.pipeline is None:
            return "layers" if self.plan.workload.recompute else "none"
        kinds = {stage.recompute for stage in self.plan.pipeline.configuration.stages}
        return kinds.pop() if len(kinds) == 1 else "by stage"

    @property
    def fastest_rival(self) -> Rival | None:
        """The feasible one of least step time."""
        return min((r for r in self.rivals if not r.infeasible), key=lambda rival: rival.step_s, default=None)


def load_view(path: str | os.PathLike[str], edited: bool = False) -> PlanView:
    """Read a plan, as :func:`autoddl.planfile.load_plan` does.

    Raises:
        UserError: as :func:`autoddl.planfile.load_plan`.
    """
    return view_of(load_plan(path, edited), os.fspath(path))


def view_of(plan: Plan, where: str = "the plan") -> PlanView:
    """The figures of a plan.

    Raises:
        UserError: a field of its document is missing or malformed.
    """
    fields = Fields(plan.document, where)
    return PlanView(
        plan=plan,
        model=fields.text("model"),
        method=fields.text("method"),
        objective=fields.text("objective"),
        certificate=_certificate(fields) if plan.is_claimed else None,
        step_s=fields.number("step_s"),
        compute_s=fields.number("compute_s"),
        communication_s=fields.number("communication_s"),
        memory_bytes=fields.number("memory_bytes"),
        memory_limit_bytes=fields.number("memory_limit_bytes"),
        sent_bytes=fields.number("sent_bytes"),
        parts=_parts(plan),
        sections=_sections(plan),
        memory=_memory(plan),
        rivals=tuple(_rivals(fields)),
        notes=fields.texts("notes"),
    )


def _certificate(fields: Fields) -> Certificate:
    return Certificate(
        optimal=fields.boolean("optimal"),
        lower_bound_s=fields.number("lower_bound_s"),
        gap=fields.number("gap"),
        search_s=fields.number("search_s"),
        space_size=fields.get("space_size"),  # of any size: spaces have hundreds of digits
    )


# ------------------------------------------------------------------------------------------------------------ where time goes


def _parts(plan: Plan) -> tuple[Part, ...]:
    """The step's time by resource; of a pipeline that of its busiest worker, with what it waits for."""
    pipeline = plan.pipeline
    if pipeline is None:
        book = ResourceBook(plan.graph, plan.cluster, plan.workload)
        return _named(book.names, book.total(plan.strategies))
    return pipeline_parts(pipeline)


def pipeline_parts(pipeline: Evaluation) -> tuple[Part, ...]:
    """The step of a pipeline: what its busiest worker does in its stages, and what it waits for."""
    return _kept(
        *_busy_parts(pipeline, pipeline.busiest),
        Part("transfers between stages", "communication", pipeline.exposed_transfer_s),
        Part("gradient all-reduce", "communication", pipeline.exposed_all_reduce_s),
        Part("pipeline bubble", "idle", pipeline.bubble_s),
    )


def _busy_parts(pipeline: Evaluation, worker: int) -> tuple[Part, ...]:
    """The time that a worker of a pipeline is busy in its stages, by resource."""
    configuration = pipeline.configuration
    devices = configuration.mesh.mesh_of(worker).devices(pipeline.cluster)
    names: tuple[str, ...] = ()
    total: np.ndarray | float = 0.0
    for direction, stage in pipeline.schedule.stages_on(worker):
        figures, choice = pipeline.stages[stage], configuration.stages[stage]
        book = ResourceBook(figures.graph.graph, devices, stage_workload(configuration.workload, choice.recompute))
        passes = book.passes(choice.strategies)
        num = pipeline.micro_batches_of(worker, stage, direction)
        again = num if figures.recompute_s else 0.0
        names = book.names
        weights = np.array([num + again, num * figures.backward_passes, 0.0])
        total = total + weights @ np.sum([passes[layer.name] for layer in figures.graph.layers], axis=0)
    return _named(names, np.asarray(total))


def _named(names: Sequence[str], seconds: np.ndarray) -> tuple[Part, ...]:
    return _kept(*(Part(n, "compute" if n in LOCAL else "communication", float(s)) for n, s in zip(names, seconds)))


def _kept(*parts: Part) -> tuple[Part, ...]:
    """Those that are more than what rounding leaves of a difference."""
    whole = sum(part.seconds for part in parts)
    return tuple(part for part in parts if part.seconds > _ROUNDING * whole)


# ------------------------------------------------------------------------------------------------------------ layers


def _sections(plan: Plan) -> tuple[Section, ...]:
    pipeline = plan.pipeline
    if pipeline is None:
        return (Section("", (0,), _groups(assessment_of(plan).layers)),)
    if len(pipeline.stages) == 1:
        return (Section("", (0,), _groups(pipeline.stages[0].assessment.layers)),)
    alike: dict[object, list[int]] = {}
    for number in range(len(pipeline.stages)):
        alike.setdefault(_likeness(pipeline, number), []).append(number)
    sections = []
    for numbers in alike.values():
        recompute = pipeline.configuration.stages[numbers[0]].recompute
        kept = {"none": "", "layers": ", layers recomputed", "stage": ", recomputed"}[recompute]
        title = f"{'stage' if len(numbers) == 1 else 'stages'} {format_ranges(numbers)}{kept}"
        sections.append(Section(title, tuple(numbers), _groups(pipeline.stages[numbers[0]].assessment.layers)))
    return tuple(sections)


def _likeness(pipeline: Evaluation, stage: int) -> object:
    """What equal stages have in common: layers and their inputs, by place, and what was chosen for them."""
    graph, choice = pipeline.stages[stage].graph.graph, pipeline.configuration.stages[stage]
    place = {layer.name: i for i, layer in enumerate(graph.layers)}
    rows = tuple(
        (
            layer.signature(),
            layer.role,
            tuple(place[name] for name in graph.inputs(layer.name)),
            choice.strategies[layer.name],
        )
        for layer in graph.layers
    )
    return rows, choice.recompute


def _groups(layers: Sequence[LayerAssessment]) -> tuple[LayerGroup, ...]:
    groups: dict[object, tuple[str, list[LayerAssessment]]] = {}
    for assessed in layers:
        layer = assessed.layer
        key = (layer.block, layer.role, assessed.strategy) if layer.block else layer.name
        name = f"{layer.block}.*.{layer.role}" if layer.block else layer.name
        groups.setdefault(key, (name, []))[1].append(assessed)
    return tuple(
        _group(name if len(members) > 1 else members[0].layer.name, members) for name, members in groups.values()
    )


def _group(name: str, members: Sequence[LayerAssessment]) -> LayerGroup:
    first = members[0]
    layouts = first.strategy.sbp(first.layer)
    return LayerGroup(
        name=name,
        layers=tuple(member.layer.name for member in members),
        strategy=first.strategy,
        sbp={what: str(layout.without_unit_axes()) if layout else "" for what, layout in layouts.items()},
        compute_s=sum(member.compute_s for member in members),
        communication_s=sum(member.communication_s for member in members),
        sent_bytes=sum(member.sent_bytes for member in members),
        memory_bytes=sum(member.work.state_bytes + member.work.kept_bytes for member in members),
    )


# ------------------------------------------------------------------------------------------------------------ memory


def _memory(plan: Plan) -> tuple[DeviceMemory, ...]:
    if plan.pipeline is None:
        layers = assessment_of(plan).layers
        state = sum(layer.work.state_bytes for layer in layers)
        kept = sum(layer.work.kept_bytes for layer in layers)
        buffer = max(layer.work.buffer_bytes for layer in layers)
        return (_divided(plan, "each device", plan.cluster.num_devices, state, kept, buffer),)
    found: dict[object, list[int]] = {}
    filled = [_of_worker(plan.pipeline, worker) for worker in range(plan.pipeline.schedule.num_workers)]
    for worker, figures in enumerate(filled):
        stages = tuple(sorted({stage for _, stage in plan.pipeline.schedule.stages_on(worker)}))
        found.setdefault((stages, figures), []).append(worker)
    widths = plan.pipeline.schedule.widths
    rows = []
    for (stages, figures), workers in found.items():  # type: ignore[misc]
        what = "stage" if len(stages) == 1 else "stages"
        title = f"{what} {format_ranges(stages)}"
        rows.append(_divided(plan, title, sum(widths[worker] for worker in workers), *figures))
    return tuple(rows)


def _of_worker(pipeline: Evaluation, worker: int) -> tuple[float, float, float]:
    """State, activations and buffer [bytes] of a device of one worker; extra versions of weights count as state."""
    on_worker = pipeline.schedule.stages_on(worker)
    state = sum(pipeline.stages[stage].state_bytes for _, stage in on_worker)
    buffer = max(pipeline.stages[stage].buffer_bytes for _, stage in on_worker)
    activations = 0.0
    for direction, stage in on_worker:
        figures = pipeline.stages[stage]
        places = [(replica.pipeline, replica.worker) for replica in pipeline.schedule.replicas_of(stage)]
        count = pipeline.in_flight[stage][places.index((direction, worker))]
        activations += (
            count * figures.input_bytes + figures.kept_bytes if figures.recompute_s else count * figures.kept_bytes
        )
    versions = max(0.0, pipeline.memory[worker] - state - activations - buffer)
    return state + versions, activations, buffer


def _divided(plan: Plan, title: str, num_devices: int, state: float, kept: float, buffer: float) -> DeviceMemory:
    """State into parameters (working copies and masters), gradients and optimizer."""
    workload = plan.workload
    per_element = workload.bytes_per_parameter
    gradients = state * workload.itemsize / per_element
    optimizer = state * OPTIMIZERS[workload.optimizer] / per_element
    return DeviceMemory(title, num_devices, state - gradients - optimizer, gradients, optimizer, kept, buffer)


# ------------------------------------------------------------------------------------------------------------ rivals


def _rivals(fields: Fields) -> Sequence[Rival]:
    if "pipeline" in fields:
        return [_family(entry) for entry in fields.object("pipeline").objects("families")]
    table = fields.object("baselines")
    # Names are shown, so they are checked like the text of any field.
    names = [Fields({"name": name}, table.where).text("name") for name in table.value]
    return [_baseline(name, table.object(name)) for name in names]


def _baseline(name: str, entry: Fields) -> Rival:
    if "infeasible" in entry:
        return Rival(name, "", entry.text("infeasible"))
    again = ", recomputed" if entry.boolean("recompute") else ""
    return Rival(
        name,
        f"{entry.text('mesh')}, micro-batch {entry.integer('micro_batch')}{again}",
        step_s=entry.number("step_s"),
        communication_s=entry.number("communication_s"),
        memory_bytes=entry.number("memory_bytes"),
    )


def _family(entry: Fields) -> Rival:
    if "infeasible" in entry:
        return Rival(entry.text("name"), "", entry.text("infeasible"))
    return Rival(
        entry.text("name"),
        entry.text("description"),
        step_s=entry.number("step_s", exclusive=True),
        # Inside stages and exposed between them, as the plan's own; of differences of large sums rounding may leave less
        # than nothing.
        communication_s=sum(
            max(0.0, entry.number(name, -_ROUNDING_S)) for name in ("communication_s", "exposed_communication_s")
        ),
        bubble_s=max(0.0, entry.number("bubble_s", -_ROUNDING_S)),
        memory_bytes=entry.number("memory_bytes"),
    )
