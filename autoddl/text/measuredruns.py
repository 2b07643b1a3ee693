"""Measured training runs as text: what the cost model predicts for each, and the efficiencies that fit their groups."""

from __future__ import annotations

from autoddl.costmodel.units import counted, format_bytes, format_seconds

from ..measuredruns import PricedRun, PricedRuns, RunGroup, RunRanking, rank_runs
from .tables import Column, Section, Table, Text

__all__ = ["runs_text"]


def runs_text(priced: PricedRuns) -> Text:
    """Return a table of the runs, one of their groups, and how well configurations of one model are ordered."""
    return Text((_runs(priced), _groups(priced), _rankings(priced)))


def _signed(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def _bytes(nbytes: float | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


_RUNS: tuple[Column[PricedRun], ...] = (
    Column("run", lambda one: one.run.name),
    Column("group", lambda one: one.run.group, rank=2),
    Column("predicted", lambda one: "-" if one.predicted_s is None else format_seconds(one.predicted_s), right=True),
    Column("measured", lambda one: format_seconds(one.run.measured_s), right=True),
    Column("error", lambda one: _signed(one.error), right=True),
    Column("memory", lambda one: _bytes(one.memory_bytes), right=True, rank=1),
    Column("measured", lambda one: _bytes(one.run.memory_bytes), right=True, rank=1, name="measured memory"),
    Column("error", lambda one: _signed(one.memory_error), right=True, rank=1, name="error of memory"),
)


def _runs(priced: PricedRuns) -> Section:
    how = "the efficiencies of their groups" if priced.is_fitted else "the clusters as they are"
    lines: list[str] = [f"  mean error of the step {priced.mean_abs_error:.1%}"]
    if priced.median_memory_error is not None:
        lines.append(f"  median error of the memory {priced.median_memory_error:.1%}")
    infeasible = [one for one in priced.runs if one.is_infeasible]
    for one in infeasible:
        lines.append(
            f"  {one.run.name} would not fit: {_bytes(one.memory_bytes)} of {format_bytes(one.capacity_bytes)} per device"
        )
    lines += [f"  {one.run.name} is not priced: {one.fault}" for one in priced.runs if one.fault]
    title = f"{counted(len(priced.runs), 'measured run')}, predicted with {how} (memory per device, with the framework's share)"
    return [title, Table.of(_RUNS, priced.runs), *lines]


_GROUPS: tuple[Column[RunGroup], ...] = (
    Column("group", lambda group: group.name),
    Column("runs", lambda group: str(group.num_runs), right=True),
    Column("efficiency", lambda group: f"{group.efficiency:.3f}", right=True),
    Column("of the cluster's", lambda group: f"{group.fit.efficiency:.2f} x", right=True, rank=1),
    Column("mean error", lambda group: f"{group.fit.mean_abs_error:.1%}", right=True),
    Column("leave-one-out", lambda group: f"{group.fit.leave_one_out:.1%}", right=True),
)


def _groups(priced: PricedRuns) -> Section:
    total = sum(group.num_runs for group in priced.groups)
    in_sample = sum(group.num_runs * group.fit.mean_abs_error for group in priced.groups) / total if total else 0.0
    return [
        "The efficiency that fits each group (part of the peak FLOP/s that large products reach)",
        Table.of(_GROUPS, priced.groups),
        f"  over all runs: mean error {in_sample:.1%} in sample, {priced.leave_one_out:.1%} leave-one-out",
    ]


_RANKINGS: tuple[Column[RunRanking], ...] = (
    Column("configurations of", lambda ranking: ranking.name),
    Column("pairs in order", lambda ranking: f"{ranking.num_ordered} of {ranking.num_pairs}", right=True),
    Column("within the scatter", lambda ranking: str(ranking.num_undecided), right=True),
    Column("scatter", lambda ranking: "-" if ranking.scatter is None else f"{ranking.scatter:.1%}", right=True),
)


def _rankings(priced: PricedRuns) -> Section:
    rankings = rank_runs(priced)
    if not rankings:
        return []
    return [
        "The order of the configurations of one model",
        Table.of(_RANKINGS, rankings),
        "  scatter: the largest difference between two measurements of one configuration on this hardware (-: none was measured "
        "twice); pairs whose steps differ by less are not ordered by the measurements",
    ]
