"""A plan as its readers see it: the figures that `explain`, `diff` and `report` share.

Figures come from the plan's evaluation, and what the search says of it from its document, as :func:`autoddl.planfile.load_plan` has
checked it.  What was claimed of a plan that was edited is not there: it has no certificate and no rivals.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from autoddl.costmodel.documents import Fields
from autoddl.pipelines.joint.evaluation import Evaluation

from ..plandocument import NOT_CLAIMED
from ..planfile import PlanFile
from .devicememory import DeviceMemory, device_memory
from .groups import StageGroup, stage_groups
from .searched import Certificate, RivalFigures, certificate_of, rivals_of
from .steptime import StepPart, step_parts

__all__ = ["PlanView", "view_of"]


@dataclass(frozen=True)
class PlanView:
    """A plan's figures; seconds are per training step, bytes those of the fullest (busiest) device.

    Attributes:
        plan: what is seen.
        fields: its document, to be read field by field.
        model, method, objective: its name, how it was found, and what was minimised.
        certificate: None of a plan that was edited.
        memory_limit_bytes: of each device.
        parts: where the time of the step goes.
        stage_groups: equal stages, with their layers.
        memory: what fills the devices.
        rivals: what the plan was compared with.
        notes: what its readers should know.
    """

    plan: PlanFile
    fields: Fields
    model: str
    method: str
    objective: str
    certificate: Certificate | None
    memory_limit_bytes: float
    parts: tuple[StepPart, ...]
    stage_groups: tuple[StageGroup, ...]
    memory: tuple[DeviceMemory, ...]
    rivals: tuple[RivalFigures, ...]
    notes: tuple[str, ...]

    @property
    def evaluation(self) -> Evaluation:
        """Stages, schedule and timeline."""
        return self.plan.evaluation

    @property
    def has_pipeline(self) -> bool:
        """Whether there are several stages: only then are there boundaries, bubbles and workers to tell apart."""
        return self.plan.num_stages > 1

    @property
    def step_s(self) -> float:
        return self.evaluation.step_s

    @property
    def compute_s(self) -> float:
        return self.evaluation.compute_s

    @property
    def communication_s(self) -> float:
        """What the step waits for: inside the stages of the busiest worker, and exposed between them."""
        return self.evaluation.communication_s

    @property
    def bubble_s(self) -> float:
        """What the busiest worker idles; 0 where there is one stage."""
        return self.evaluation.bubble_s if self.has_pipeline else 0.0

    @property
    def memory_bytes(self) -> float:
        return self.evaluation.memory_bytes

    @property
    def sent_bytes(self) -> float:
        return self.evaluation.sent_bytes

    @cached_property
    def cost_s(self) -> float:
        """What was minimised."""
        return self.evaluation.cost(self.objective)

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
        kinds = {stage.recompute for stage in self.evaluation.configuration.stages}
        return kinds.pop() if len(kinds) == 1 else "by stage"

    @property
    def fastest_rival(self) -> RivalFigures | None:
        """The feasible one of least step time."""
        return min((r for r in self.rivals if not r.infeasible), key=lambda rival: rival.step_s, default=None)


def view_of(plan: PlanFile, where: str = "the plan") -> PlanView:
    """The figures of a plan.

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
        memory_limit_bytes=fields.number("memory_limit_bytes"),
        parts=step_parts(plan.evaluation),
        stage_groups=stage_groups(plan.evaluation),
        memory=device_memory(plan.evaluation),
        rivals=tuple(rivals_of(fields)),
        notes=fields.texts("notes"),
    )
