"""The text of every result, as the command line prints it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from autoddl.calib.report import Table

    from ..diffing import PlanDifference
    from ..explain import Explanation
    from ..joint.result import JointPlan
    from ..planner import Planned
    from ..trusting import PlanTrust
    from ..verification.pipeline_result import PipelineVerification
    from ..verification.result import Verification

    Verified = Union[Verification, PipelineVerification]
    Search = Union[Planned, JointPlan]

__all__ = [
    "comparison_text",
    "difference_text",
    "explanation_text",
    "search_text",
    "tables_text",
    "verification_document",
    "verification_text",
]


def search_text(search: Search, trusted: PlanTrust | None) -> str:
    """What a search found."""
    from ..joint.result import JointPlan

    if isinstance(search, JointPlan):
        from ..joint.table import joint_text

        return joint_text(search)
    from ..tables import plan_text

    return plan_text(search, trusted)


def explanation_text(found: Explanation) -> str:
    """What limits a plan, and the alternatives."""
    from ..explain import explanation_text

    return explanation_text(found)


def difference_text(found: PlanDifference, names: tuple[str, str]) -> str:
    """What differs between two plans, which are called so."""
    from ..diffing import difference_text

    return difference_text(found, names)


def verification_text(found: Verified) -> str:
    """What ran, and the verdict."""
    from ..verification.pipeline_result import PipelineVerification

    if isinstance(found, PipelineVerification):
        from ..verification.pipeline_report import pipeline_text

        return pipeline_text(found)
    from ..verification import verification_text

    return verification_text(found)


def verification_document(found: Verified) -> dict[str, Any]:
    """What ran, and the verdict, as JSON."""
    from ..verification.pipeline_result import PipelineVerification

    if isinstance(found, PipelineVerification):
        from ..verification.pipeline_report import pipeline_document

        return pipeline_document(found)
    from ..verification import verification_document

    return verification_document(found)


def tables_text(found: Sequence[Table]) -> str:
    """What a calibration found: tables with their remarks."""
    from ..tables import aligned

    return "\n\n".join("\n".join((t.title, *aligned(t.rows, right=t.right), *t.remarks)) for t in found)


# ---- Comparisons -------------------------------------------------------------------------------------------------------


def comparison_text(exact: Planned, rows: Sequence[dict[str, Any]]) -> str:
    """A table of the plans that are feasible, then why the rest is not."""
    return "\n".join(_comparison(exact, rows))


def _comparison(exact: Planned, rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    from autoddl.costmodel.units import format_bytes, format_seconds

    from ..tables import aligned

    cluster, bound = exact.cluster, format_seconds(exact.lower_bound)
    yield f"{exact.graph.name} on {cluster.name}, {cluster.num_devices} devices; lower bound {bound}"
    table = [("plan", "step", "communication", "memory", "to the best", "evaluations", "search", "")]
    field = "communication_s" if exact.options.objective == "communication" else "step_s"
    for row in rows:
        if "infeasible" in row:
            continue
        table.append(
            (
                row["name"],
                format_seconds(row["step_s"]),
                format_seconds(row["communication_s"]),
                format_bytes(row["memory_bytes"]),
                f"{row[field] / exact.cost:.4g}x" if exact.cost else "",
                f"{row['evaluations']:,}" if "evaluations" in row else "",
                format_seconds(row["search_s"]) if "search_s" in row else "",
                _remark(row),
            )
        )
    yield from aligned(table, right=(1, 2, 3, 4, 5, 6))
    for row in rows:
        if "infeasible" in row:
            yield f"  {row['name']}: {row['infeasible']}"
    if exact.left_out:
        yield f"  {exact.left_out}"


def _remark(row: dict[str, Any]) -> str:
    """What is proven of a search's plan; the mesh of a baseline's."""
    if "mesh" in row:
        return str(row["mesh"])
    interrupted = ", interrupted" if row["status"] == "interrupted" else ""
    taken_from = f", as {row['taken_from']}: nothing better was found" if "taken_from" in row else ""
    return "proven optimal" if row["optimal"] else f"gap {row['gap']:.2%}{interrupted}{taken_from}"
