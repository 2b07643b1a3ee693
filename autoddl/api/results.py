"""What the methods of a plan and `compare` return: values that print themselves as the command line does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.units import format_seconds

from .display import html_of

if TYPE_CHECKING:
    import pandas

    from autoddl.search.planner import Planned

    from ..diffing import PlanDifference
    from ..explain import Choice
    from ..explain import Explanation as Explained
    from ..text.tables import Text
    from ..verification.result import Verification as Verified

__all__ = ["Comparison", "Difference", "Explanation", "Result", "Verification"]


class Result(ABC):
    """A result: a line as its ``repr``, its text as its ``str`` and in a notebook, and a JSON document."""

    @property
    @abstractmethod
    def document(self) -> dict[str, Any]:
        """What the command line prints with ``--json``."""

    @property
    @abstractmethod
    def text(self) -> Text:
        """What the command line prints without ``--json``; ``text.fitted(80)`` fits into so many columns."""

    def __str__(self) -> str:
        return str(self.text)

    def _repr_html_(self) -> str:
        return html_of(self.text)


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """Why a plan is as it is: what limits it, and what every other choice would cost.

    Attributes:
        found: the view of the plan, its sections of choices, and the price of memory.
    """

    found: Explained

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of the plan, each with its nearest alternatives; of a pipeline those of equal stages once."""
        return tuple(choice for section in self.found.sections for choice in section.choices)

    @property
    def document(self) -> dict[str, Any]:
        from ..explain import explanation_document

        return explanation_document(self.found)

    @property
    def text(self) -> Text:
        from ..text.explanation import explanation_text

        return explanation_text(self.found)

    def __repr__(self) -> str:
        return f"<Explanation of {self.found.view.model}: {len(self.choices)} choices>"


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """What differs between two plans.

    Attributes:
        found: what differs: model, cluster, options, pipeline, layers, figures.
        names: what the text calls the plans.
    """

    found: PlanDifference
    names: tuple[str, str] = ("before", "after")

    @property
    def is_empty(self) -> bool:
        """Whether nothing differs."""
        return self.found.is_empty

    @property
    def document(self) -> dict[str, Any]:
        from ..diffing import difference_document

        return difference_document(self.found)

    @property
    def text(self) -> Text:
        from ..text.difference import difference_text

        return difference_text(self.found, self.names)

    def __repr__(self) -> str:
        before, after = (format_seconds(view.step_s) for view in (self.found.before, self.found.after))
        return f"<Difference: {'none' if self.is_empty else f'step {before} before, {after} after'}>"


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """A plan that ran on local ranks, beside one device and its price.

    Attributes:
        found: all numbers.
    """

    found: Verified

    @property
    def is_right(self) -> bool:
        """Whether loss, gradients, parameters and bytes are what they should be."""
        return self.found.is_right

    @property
    def faults(self) -> tuple[str, ...]:
        """What is off, in sentences."""
        return self.found.faults

    @property
    def losses(self) -> tuple[tuple[float, float], ...]:
        """Of each step: one device's, and the ranks'."""
        return self.found.losses

    @property
    def num_ranks(self) -> int:
        """How many ranks ran."""
        return self.found.num_ranks

    @property
    def document(self) -> dict[str, Any]:
        from ..verification import verification_document

        return verification_document(self.found)

    @property
    def text(self) -> Text:
        from ..text.verification import verification_text

        return verification_text(self.found)

    def __repr__(self) -> str:
        verdict = "right" if self.is_right else f"off: {self.faults[0]}"
        return f"<Verification of {self.found.model} on {self.num_ranks} ranks: {verdict}>"


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Search methods and baselines side by side.

    Attributes:
        rows: of each method and baseline: ``name``, and either ``infeasible``, why there is no plan, or ``step_s``,
            ``communication_s``, ``memory_bytes`` and what else is known: ``status``, ``gap``, ``optimal``, ``evaluations``,
            ``search_s`` and ``taken_from`` of a method, ``mesh`` of a baseline.
        exact: what the exact search found.
        is_interrupted: whether a stop was requested, so that rows may be missing their best plan.
    """

    rows: tuple[Mapping[str, Any], ...]
    exact: Planned
    is_interrupted: bool = False

    @property
    def lower_bound_s(self) -> float:
        """No plan costs less [s]."""
        return self.exact.lower_bound

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """The row of a method or baseline."""
        for row in self.rows:
            if row["name"] == name:
                return row
        raise KeyError(name)

    def to_frame(self) -> pandas.DataFrame:
        """A row for each method and baseline; needs pandas.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        from .frames import frame_of

        columns = dict.fromkeys(name for row in self.rows for name in row)
        return frame_of([dict(row) for row in self.rows], list(columns), "rows")

    @property
    def document(self) -> dict[str, Any]:
        return {
            "format": "autoddl-comparison",
            "version": 1,
            "model": self.exact.graph.name,
            "objective": self.exact.options.objective,
            "status": "interrupted" if self.is_interrupted else "complete",
            "lower_bound_s": self.lower_bound_s,
            "rows": [dict(row) for row in self.rows],
        }

    @property
    def text(self) -> Text:
        from ..text.comparison import comparison_text

        return comparison_text(self.exact, [dict(row) for row in self.rows])

    def __repr__(self) -> str:
        model, bound = self.exact.graph.name, format_seconds(self.lower_bound_s)
        return f"<Comparison for {model}: {', '.join(row['name'] for row in self.rows)}; lower bound {bound}>"
