"""Plans pipelines of profiled models with the planners of DAPPLE, Chimera and WPipe."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.stopping import Stop
from autoddl.costmodel.suggestions import did_you_mean, unknown
from autoddl.costmodel.units import format_seconds
from autoddl.pipelines.planners import Clock, ProfiledWorkload, StageConstraints, plan_chimera, plan_dapple, plan_wpipe
from autoddl.pipelines.planners.document import Result as PlannerResult
from autoddl.pipelines.planners.document import document_of
from autoddl.pipelines.planners.transformer import transformer_profile
from autoddl.pipelines.profile import Profile, load_profile, profile_names

from .files import FilePath
from .inputs import ClusterLike, cluster_of
from .results import Result

if TYPE_CHECKING:
    from ..text.tables import Text

__all__ = ["PLANNERS", "PipelinePlan", "pipeline"]

#: Names of the planners.
PLANNERS = ("dapple", "chimera", "wpipe")


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """The pipeline that the planner of a paper chose.

    Attributes:
        result: The result of the planner.
        workload: The profile, the cluster and the batch that the pipeline was planned for.
        is_interrupted: Whether a stop was requested.  The pipeline is then the best one found before the stop.
    """

    result: PlannerResult
    workload: ProfiledWorkload
    is_interrupted: bool = False

    @property
    def document(self) -> dict[str, Any]:
        return document_of(self.result, self.workload, is_interrupted=self.is_interrupted)

    @property
    def text(self) -> Text:
        from ..text.pipelines import pipeline_plan_text

        return pipeline_plan_text(self.document)

    def __repr__(self) -> str:
        facts = self.document
        step = format_seconds(facts["simulated_s"])
        return f"<PipelinePlan {facts['plan']} of {facts['profile']} on {facts['cluster']}: {step} per step>"


def pipeline(
    profile: FilePath,
    *,
    cluster: ClusterLike,
    batch: int,
    planner: str = "dapple",
    nodes: int | None = None,
    devices_per_node: int | None = None,
    micro_batch: int | None = None,
    stages: int | None = None,
    widths: Sequence[int] | None = None,
    num_pipelines: int = 2,
    recompute: bool = False,
    memory_limit_bytes: float | None = None,
    state_factor: float = 4.0,
    profile_batch: int | None = None,
    stop: Stop | None = None,
) -> PipelinePlan:
    """Plan the stages, replicas and devices of a pipeline for a profiled model with the planner of a paper.

    Args:
        profile: A profile file (JSON of AutoDDL, or a PipeDream text graph), the name of a built-in profile, or
            ``transformer:LAYERSxHIDDENxSEQUENCE``, whose layers are priced for the device of the cluster.
        cluster, nodes, devices_per_node: As in :func:`autoddl.plan`.
        batch: Samples per training step over all devices.
        planner: ``dapple``, ``chimera`` or ``wpipe``.
        micro_batch: Samples per micro-batch; by default chosen by the planner.
        stages: Number of stages; by default chosen by the planner.
        widths: Number of devices of each stage, for ``dapple``; by default chosen by the planner.
        num_pipelines: Number of pipelines over both directions, for ``chimera``.
        recompute: Recompute activations.  ``chimera`` and ``wpipe`` try both unless this is True.
        memory_limit_bytes: Memory limit per device; by default the memory of the device.
        state_factor: Bytes of weights, gradients and optimizer state per byte of weights; 4 for Adam.
        profile_batch: Micro-batch that a PipeDream text graph was profiled with.
        stop: A `Stop`.  When it is requested, the search ends and returns the best pipeline so far.

    Raises:
        UserError: If a name is unknown, a file is malformed, or no pipeline satisfies the constraints.

    >>> import autoddl
    >>> autoddl.pipeline("bert-48", cluster="piz-daint", nodes=8, batch=64, planner="chimera")
    <PipelinePlan W=1 D=8 of bert-48 on piz-daint: 1.7 s per step>
    """
    if planner not in PLANNERS:
        raise unknown("planner", planner, PLANNERS)
    if widths is not None:
        shown = ":".join(map(str, widths))
        if planner != "dapple":
            raise UserError(f"widths {shown} is for the dapple planner; {planner} makes all its stages alike")
        if stages is not None and stages != len(widths):
            raise UserError(f"widths {shown} has {len(widths)} stages, should have {stages}")
    if planner == "wpipe" and stages is not None and stages % 2:
        raise UserError(f"stages {stages} for wpipe should be even: every worker has two")
    devices = cluster_of(cluster, nodes, devices_per_node)
    workload = ProfiledWorkload(
        _profile(os.fspath(profile), profile_batch, devices),
        devices,
        batch,
        recompute=recompute,
        state=state_factor,
        memory_bytes=memory_limit_bytes,
    )
    stop = stop or Stop()
    clock = Clock(stop=stop)
    result: PlannerResult
    if planner == "chimera":
        result = plan_chimera(workload, micro_batch, stages, num_pipelines, clock)
    elif planner == "wpipe":
        result = plan_wpipe(workload, micro_batch, None if stages is None else stages // 2, clock)
    else:
        result = plan_dapple(
            workload, micro_batch, StageConstraints(stages, None if widths is None else tuple(widths)), clock
        )
    return PipelinePlan(result, workload, stop.is_requested)


def _profile(text: str, micro_batch: int | None, cluster: Cluster) -> Profile:
    """Return a built-in profile, that of a file, or that of ``transformer:LAYERSxHIDDENxSEQUENCE`` on the cluster."""
    known = profile_names()
    is_transformer = text.startswith("transformer:")
    if micro_batch is not None and (is_transformer or text in known):
        raise UserError(f"profile_batch {micro_batch} does not apply to {text}; it is for text graphs")
    if not is_transformer:
        if text not in known and not os.path.exists(text):
            question = did_you_mean(text, known)
            hint = f"; {question}" if question else ""
            raise UserError(
                f"profile {quote(text)} is neither a file nor one of {', '.join(known)} nor "
                f"transformer:LAYERSxHIDDENxSEQUENCE, such as transformer:48x1024x128{hint}"
            )
        return load_profile(text, micro_batch)
    sizes = re.fullmatch(r"transformer:([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    if sizes is None:
        raise UserError(
            f"profile {quote(text)} should read transformer:LAYERSxHIDDENxSEQUENCE, such as transformer:48x1024x128"
        )
    layers, hidden, sequence = map(int, sizes.groups())
    return transformer_profile(cluster, layers, hidden, sequence, micro_batch=1 if micro_batch is None else micro_batch)
