"""The planners of DAPPLE, Chimera and WPipe, for profiled models."""

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
from autoddl.pipelines.planners.document import Result as Found
from autoddl.pipelines.planners.document import document_of
from autoddl.pipelines.planners.transformer import transformer_profile
from autoddl.pipelines.profile import Profile, load_profile, profile_names

from .inputs import ClusterLike, cluster_of
from .results import Result

if TYPE_CHECKING:
    from ..text.tables import Text

__all__ = ["PLANNERS", "PipelinePlan", "pipeline"]

PLANNERS = ("dapple", "chimera", "wpipe")


@dataclass(frozen=True, repr=False)
class PipelinePlan(Result):
    """The pipeline that a paper's planner chooses.

    Attributes:
        found: the planner's own result.
        workload: what it was made for.
        is_interrupted: whether a stop was requested, so that it is the best until then.
    """

    found: Found
    workload: ProfiledWorkload
    is_interrupted: bool = False

    @property
    def document(self) -> dict[str, Any]:
        return document_of(self.found, self.workload, is_interrupted=self.is_interrupted)

    @property
    def text(self) -> Text:
        from ..text.pipelines import pipeline_plan_text

        return pipeline_plan_text(self.document)

    def __repr__(self) -> str:
        facts = self.document
        step = format_seconds(facts["simulated_s"])
        return f"<PipelinePlan {facts['plan']} of {facts['profile']} on {facts['cluster']}: {step} per step>"


def pipeline(
    profile: str | os.PathLike[str],
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
    """The stages, replicas and devices of a pipeline for a profiled model, by the planner of a paper.

    Args:
        profile: a file (our JSON, or a PipeDream text graph), the name of a built-in profile, or
            ``transformer:LAYERSxHIDDENxSEQUENCE``, priced by the cluster's device.
        cluster, nodes, devices_per_node: as of :func:`autoddl.plan`.
        batch: samples per iteration over all devices.
        planner: ``dapple``, ``chimera`` or ``wpipe``.
        micro_batch, stages: chosen by default.
        widths: devices of each stage, for dapple; chosen by default.
        num_pipelines: in both directions, for chimera.
        recompute: recompute activations (chimera and wpipe try both).
        memory_limit_bytes: for each device; the device's memory by default.
        state_factor: bytes of weights, gradients and optimizer state per byte of weights; 4 for Adam.
        profile_batch: the micro-batch of a text graph.
        stop: whoever requests it ends the search with the best until then.

    Raises:
        UserError: a name is unknown, a file is malformed, or no pipeline satisfies what is asked.

    >>> import autoddl
    >>> autoddl.pipeline("bert-48", cluster="piz-daint", nodes=8, batch=64, planner="chimera")
    <PipelinePlan W=1 D=8 of bert-48 on piz-daint: 1.62 s per step>
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
    found: Found
    if planner == "chimera":
        found = plan_chimera(workload, micro_batch, stages, num_pipelines, clock)
    elif planner == "wpipe":
        found = plan_wpipe(workload, micro_batch, None if stages is None else stages // 2, clock)
    else:
        found = plan_dapple(
            workload, micro_batch, StageConstraints(stages, None if widths is None else tuple(widths)), clock
        )
    return PipelinePlan(found, workload, stop.is_requested)


def _profile(text: str, micro_batch: int | None, cluster: Cluster) -> Profile:
    known = profile_names()
    priced = text.startswith("transformer:")
    if micro_batch is not None and (priced or text in known):
        raise UserError(f"profile_batch {micro_batch} does not apply to {text}; it is for text graphs")
    if not priced:
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
