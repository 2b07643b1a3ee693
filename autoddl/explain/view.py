"""The figures of a plan that `explain`, `diff` and `report` share.

The figures are those of the plan's evaluation.  The claims of the search (certificate, rivals, notes) are read from the plan's
document, which :func:`autoddl.planfile.load_plan` has checked.  A plan that was edited, or priced without a search, has no
certificate and no rivals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import counted
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.utilisation import hardware_flops, model_flops, peak_flops

from ..plandocument import UNCLAIMED
from ..planfile import PlanFile
from .devicememory import DeviceMemory, device_memory
from .groups import StageGroup, stage_groups
from .savings import Saving, savings_of
from .searched import Certificate, RivalFigures, StrategySpace, certificate_of, rivals_of, strategy_space_of
from .steptime import StepPart, step_parts

__all__ = ["PlanView", "batch_text", "peak_share", "plan_heading", "view_of"]


@dataclass(frozen=True)
class PlanView:
    """The figures of a plan.  Times are per training step [s]; memory is that of the fullest device, traffic that of the busiest.

    Attributes:
        plan: the plan.
        fields: the plan's document, to be read field by field.
        model: name of the model.
        method: name of the search or planner that found the plan.
        objective: what the search minimised, ``step`` or ``communication``.
        certificate: what the search proved; None for a plan that was edited or only priced.
        strategy_space: the strategies that the search could choose from; None for a plan that was edited or only priced.
        memory_limit_bytes: memory limit of each device.
        parts: the parts of the step, which add up to it.
        stage_groups: groups of equal stages, with groups of their equal layers.
        memory: use of memory of each group of devices.
        rivals: the plans of baselines or other families.
        notes: remarks of the planner for the user.
    """

    plan: PlanFile
    fields: Fields
    model: str
    method: str
    objective: str
    certificate: Certificate | None
    strategy_space: StrategySpace | None
    memory_limit_bytes: float
    parts: tuple[StepPart, ...]
    stage_groups: tuple[StageGroup, ...]
    memory: tuple[DeviceMemory, ...]
    rivals: tuple[RivalFigures, ...]
    notes: tuple[str, ...]

    @property
    def evaluation(self) -> Evaluation:
        """The evaluation of the plan: stages, schedule, timeline and figures."""
        return self.plan.evaluation

    @property
    def has_pipeline(self) -> bool:
        """Whether the plan has several stages, and so boundaries, bubbles and different workers."""
        return self.plan.has_pipeline

    @property
    def step_s(self) -> float:
        """Duration of a training step [s]."""
        return self.evaluation.step_s

    @property
    def compute_s(self) -> float:
        """Computation of the busiest worker [s]."""
        return self.evaluation.compute_s

    @property
    def communication_s(self) -> float:
        """Communication that the step waits for [s]: inside the stages of the busiest worker, and exposed between stages."""
        return self.evaluation.communication_s

    @property
    def bubble_s(self) -> float:
        """Idle time of the busiest worker [s]; 0 for a single stage."""
        return self.evaluation.bubble_s

    @property
    def memory_bytes(self) -> float:
        """Peak memory of the fullest device."""
        return self.evaluation.memory_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes that the busiest device sends."""
        return self.evaluation.sent_bytes

    @cached_property
    def cost_s(self) -> float:
        """The cost that the search minimised [s]: the step, or its communication."""
        return self.evaluation.cost(self.objective)

    @cached_property
    def savings(self) -> tuple[Saving, ...]:
        """What the choices besides splits save and cost."""
        return savings_of(self.plan, self.memory_limit_bytes)

    @property
    def verdict(self) -> str:
        """What the search proved, in a few words."""
        return UNCLAIMED[self.fields.text("status")][1] if self.certificate is None else self.certificate.verdict

    @property
    def heading(self) -> str:
        """Model, cluster, number of nodes and devices in one line."""
        return plan_heading(self.model, self.plan.cluster)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.plan.workload.batch / self.step_s if self.step_s else 0.0

    @property
    def utilisation(self) -> float:
        """Model FLOP/s as a part of the peak FLOP/s of all devices; recomputation does not count."""
        return peak_share(self.plan.graph, self.plan.cluster, self.plan.workload, self.rate)

    @property
    def hardware_utilisation(self) -> float:
        """FLOP/s that the devices compute, with recomputation, as a part of their peak FLOP/s."""
        flops = hardware_flops(self.evaluation) / self.step_s if self.step_s else 0.0
        return flops / peak_flops(self.plan.cluster, self.plan.workload.precision)

    @property
    def recomputation(self) -> str:
        """Recomputation of the stages: ``none``, ``layers``, ``stage``, or ``by stage`` if stages differ."""
        kinds = {stage.recompute for stage in self.evaluation.configuration.stages}
        return kinds.pop() if len(kinds) == 1 else "by stage"

    @property
    def fastest_rival(self) -> RivalFigures | None:
        """The feasible rival with the shortest step; None if there is none."""
        return min((r for r in self.rivals if not r.infeasible), key=lambda rival: rival.step_s, default=None)


def plan_heading(model: str, cluster: Cluster) -> str:
    """Return model, cluster, number of nodes and devices in one line.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> plan_heading("gpt2", load_cluster("dgx-a100").resized(2, 8))
    'gpt2 on dgx-a100: 2 nodes of 8 x NVIDIA A100 SXM4 80 GB'
    """
    nodes = "1 node" if cluster.num_nodes == 1 else f"{cluster.num_nodes} nodes"
    return f"{model} on {cluster.name}: {nodes} of {cluster.devices_per_node} x {cluster.device.name}"


def batch_text(graph: LayerGraph, batch: int) -> str:
    """Return the samples of a training step in words; for sequences also their length and the number of tokens.

    Rows of sequences that are not looked up in tables, such as frames of speech, are called rows.

    >>> from autoddl.zoo import resolve_model
    >>> batch_text(resolve_model("gpt2"), 512)
    '512 sequences of 1,024 tokens per step (524,288 tokens)'
    >>> batch_text(resolve_model("vgg13"), 4096)
    '4,096 images per step'
    """
    samples, length = counted(batch, graph.sample), graph.sequence_length
    if length is None:
        return f"{samples} per step"
    row = "token" if graph.reads_tokens else "row"
    return f"{samples} of {counted(length, row)} per step ({counted(batch * length, row)})"


def peak_share(graph: LayerGraph, cluster: Cluster, workload: Workload, rate: float) -> float:
    """Return the model FLOP/s at a rate [samples/s] as a part of the peak FLOP/s of all devices.

    The formula is that of :mod:`autoddl.pipelines.joint.utilisation`; recomputation does not count.
    """
    return model_flops(graph, 1) * rate / peak_flops(cluster, workload.precision)


def view_of(plan: PlanFile, where: str = "the plan") -> PlanView:
    """Compute the figures of a plan.

    Args:
        plan: a plan with a document (:func:`autoddl.planfile.load_plan`).
        where: what to call the document in errors, such as its path.

    Raises:
        UserError: a field of its document is missing or malformed.

    >>> import autoddl
    >>> view = view_of(autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64))
    >>> max(view.parts, key=lambda part: part.seconds).name, [layers.name for layers in view.stage_groups[0].layers]
    ('kernel launches', ['fc1', 'fc2'])
    """
    fields = Fields(plan.document, where)
    return PlanView(
        plan=plan,
        fields=fields,
        model=fields.text("model"),
        method=fields.text("method"),
        objective=fields.text("objective"),
        certificate=certificate_of(fields) if plan.is_claimed else None,
        strategy_space=strategy_space_of(fields),
        memory_limit_bytes=fields.number("memory_limit_bytes"),
        parts=step_parts(plan.evaluation),
        stage_groups=stage_groups(plan.evaluation),
        memory=device_memory(plan.evaluation),
        rivals=tuple(rivals_of(fields)),
        notes=fields.texts("notes"),
    )
