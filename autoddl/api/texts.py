"""Texts and documents of results that come in two kinds: with a pipeline, and without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from autoddl.pipelines.joint.result import JointPlan
    from autoddl.search.planner import Planned

    from ..text.tables import Text
    from ..trusting import PlanTrust
    from ..verification.pipeline_result import PipelineVerification
    from ..verification.result import Verification

    Verified = Union[Verification, PipelineVerification]
    Search = Union[Planned, JointPlan]

__all__ = ["search_text", "verification_document", "verification_text"]


def search_text(search: Search, trusted: PlanTrust | None) -> Text:
    """What a search found."""
    from autoddl.pipelines.joint.result import JointPlan

    if isinstance(search, JointPlan):
        from ..text.jointplans import joint_text

        return joint_text(search)
    from ..text.plans import plan_text

    return plan_text(search, trusted)


def verification_text(found: Verified) -> Text:
    """What ran, and the verdict."""
    from ..verification.pipeline_result import PipelineVerification

    if isinstance(found, PipelineVerification):
        from ..text.pipelineverification import pipeline_text

        return pipeline_text(found)
    from ..text.verification import verification_text

    return verification_text(found)


def verification_document(found: Verified) -> dict[str, Any]:
    """What ran, and the verdict, as JSON."""
    from ..verification import documents
    from ..verification.pipeline_result import PipelineVerification

    if isinstance(found, PipelineVerification):
        return documents.pipeline_document(found)
    return documents.verification_document(found)
