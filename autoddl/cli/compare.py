"""``autoddl compare``: baselines and search methods side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.stopping import Stop, StopRequestedError
from autoddl.search import METHODS

from ._options import show
from ._planning import add_planning_arguments, cluster_of, model_of, options_of
from ._stopping import interruptible

if TYPE_CHECKING:
    from ..planner import BaselineFigures, Options, Planned

__all__ = ["add_parser", "run"]

#: Larger spaces are not enumerated unless they are asked for by name.
LARGEST_ENUMERATION = 10**9


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser("compare", help="baselines and search methods side by side", description=__doc__)
    add_planning_arguments(parser)
    parser.add_argument(
        "--methods",
        default=None,
        metavar="M,...",
        help=f"of {', '.join(METHODS)} (all; exhaustive only where the space is at most {LARGEST_ENUMERATION:.0e})",
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan with every method, print one table."""
    from ..planner import make_plan
    from ..text.comparison import comparison_text

    methods = arguments.methods.split(",") if arguments.methods else list(METHODS)
    for method in methods:
        if method not in METHODS:
            raise UserError(f"--methods names {method!r}, should name some of {', '.join(METHODS)}")
    if arguments.temperature is not None and "metropolis-hastings" not in methods:
        raise UserError("--temperature is for metropolis-hastings, which --methods does not name")
    graph, cluster = model_of(arguments), cluster_of(arguments)
    with interruptible("a plan") as asked:
        exact = make_plan(graph, cluster, options_of(arguments, "exact"), stop=asked.stop)
        rows: list[dict[str, Any]] = []
        for method in methods:
            if method == "exact":
                rows.append(_search_row(method, exact))
            elif method == "exhaustive" and not arguments.methods and exact.result.space_size > LARGEST_ENUMERATION:
                too_many = f"{exact.result.space_size:.1e} assignments are too many to enumerate"
                rows.append({"name": method, "infeasible": too_many})
            else:
                options = options_of(arguments, method)
                rows.append(_row_of(method, graph, cluster, options, exact.baselines, asked.stop))
    rows += map(_baseline_row, exact.baselines)
    if arguments.json:
        document = {
            "format": "autoddl-comparison",
            "version": 1,
            "model": graph.name,
            "objective": exact.options.objective,
            "status": "interrupted" if asked.number else "complete",
            "lower_bound_s": exact.lower_bound,
            "rows": rows,
        }
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        show(comparison_text(exact, rows), arguments)
    return asked.exit_code("these are the best plans until then")


def _row_of(
    method: str,
    graph: LayerGraph,
    cluster: Cluster,
    options: Options,
    baselines: Sequence[BaselineFigures],
    stop: Stop,
) -> dict[str, Any]:
    """What a method other than exact finds, of its own or, where that is not better, of a baseline's."""
    from ..planner import make_plan

    found = None
    if not stop.is_requested:
        with contextlib.suppress(StopRequestedError):
            found = make_plan(graph, cluster, options, stop=stop, known=baselines)
    if found is None or (found.is_interrupted and not found.evaluations):
        return {"name": method, "infeasible": "interrupted before it had a plan"}
    return _search_row(method, found)


def _search_row(method: str, planned: Planned) -> dict[str, Any]:
    return {
        "name": method,
        "step_s": planned.assessment.step_s,
        "communication_s": planned.assessment.communication_s,
        "memory_bytes": planned.assessment.memory_bytes,
        "status": planned.status,
        "gap": planned.gap,
        "optimal": planned.optimal,
        "evaluations": planned.evaluations,
        "search_s": planned.search_s,
        **({"taken_from": planned.taken_from} if planned.taken_from else {}),
    }


def _baseline_row(figures: BaselineFigures) -> dict[str, Any]:
    if figures.assessment is None:
        return {"name": figures.name, "infeasible": figures.infeasible}
    return {
        "name": figures.name,
        "step_s": figures.assessment.step_s,
        "communication_s": figures.assessment.communication_s,
        "memory_bytes": figures.assessment.memory_bytes,
        "mesh": figures.mesh,
    }
