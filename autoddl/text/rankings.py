"""A measured ranking as text: strategies that ran on ranks, predicted against measured."""

from __future__ import annotations

import numpy as np

from autoddl.calib.candidates import RankedStrategy
from autoddl.calib.ranked import MeasuredRanking
from autoddl.calib.ranking import Score
from autoddl.costmodel.units import counted, format_seconds

from .tables import Column, Section, Table, Text

__all__ = ["ranking_text"]


def ranking_text(ranking: MeasuredRanking) -> Text:
    """Return the scores of the predictions, and a table of the strategies in ascending order of predicted communication."""
    return Text((_scores(ranking), _strategies(ranking)))


_SCORES: tuple[Column[tuple[str, Score]], ...] = (
    Column("", lambda row: row[0]),
    Column("Spearman", lambda row: f"{row[1].spearman:.3f}", right=True),
    Column("repeat-to-repeat", lambda row: "-" if np.isnan(row[1].ceiling) else f"{row[1].ceiling:.3f}", right=True),
    Column("pairs in order", lambda row: f"{row[1].pairs:.1%} of {row[1].num_pairs}", right=True),
    Column("regret of the predicted best", lambda row: f"{row[1].regret:.1%}", right=True),
    Column(
        "repeat-to-repeat", lambda row: "-" if np.isnan(row[1].floor) else f"{row[1].floor:.1%}", right=True, rank=1
    ),
    Column("median error", lambda row: f"{row[1].error:.1%}", right=True),
)


def _scores(ranking: MeasuredRanking) -> Section:
    rounds = ranking.communication.shape[1]
    remarks = [
        f"  {len(ranking.strategies)} strategies, {counted(rounds, 'round')} of which the fastest counts; "
        "pairs: those measured more than 10 % apart",
    ]
    if ranking.disturbed:
        remarks.append(f"  other processes used the cores during {ranking.disturbed:.0%} of the visits")
    remarks += [f"  not run: {name}: {reason}" for name, reason in ranking.refused]
    title = f"{ranking.graph.name} on {ranking.cluster.num_devices} ranks, predicted against measured"
    return [title, Table.of(_SCORES, ranking.scores.items()), *remarks]


#: A strategy, its measured communication [s], and its measured step [s]; None if steps were not measured.
_Row = tuple[RankedStrategy, float, "float | None"]

_STRATEGIES: tuple[Column[_Row], ...] = (
    Column("strategy", lambda row: row[0].name),
    Column("communication: predicted", lambda row: format_seconds(row[0].communication_s), right=True),
    Column("measured", lambda row: format_seconds(row[1]), right=True),
    Column("step: predicted", lambda row: format_seconds(row[0].step_s), right=True),
    Column("measured", lambda row: "-" if row[2] is None else format_seconds(row[2]), right=True),
)


def _strategies(ranking: MeasuredRanking) -> Section:
    steps = [None] * len(ranking.strategies) if ranking.step is None else ranking.step.min(axis=1).tolist()
    rows: list[_Row] = list(zip(ranking.strategies, ranking.communication.min(axis=1).tolist(), steps))
    rows.sort(key=lambda row: row[0].communication_s)
    return ["Strategies", Table.of(_STRATEGIES, rows)]
