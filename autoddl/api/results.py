"""Results of the methods of a plan and of `compare`.  They print the same text as the command line."""

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
    from ..explain import Explanation as ExplanationResult
    from ..text.tables import Text
    from ..verification.result import Verification as VerificationResult

__all__ = ["Comparison", "Difference", "Explanation", "Result", "Verification"]


class Result(ABC):
    """Base class of results.

    ``repr`` gives one line, ``print`` the text that the command line prints, and notebooks show tables.
    """

    @property
    @abstractmethod
    def document(self) -> dict[str, Any]:
        """The JSON document that the command line prints with ``--json``."""

    @property
    @abstractmethod
    def text(self) -> Text:
        """The text that the command line prints; ``text.fitted(80)`` fits the text into 80 columns."""

    def __str__(self) -> str:
        return str(self.text)

    def _repr_html_(self) -> str:
        return html_of(self.text)


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """The reasons for a plan: what limits its step time, and what other choices would cost.

    Attributes:
        result: The figures of the plan, its choices in groups of equal stages, and the price of memory.
    """

    result: ExplanationResult

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The choices of the plan, each with its nearest alternatives; equal stages of a pipeline are listed once."""
        return tuple(choice for section in self.result.sections for choice in section.choices)

    @property
    def document(self) -> dict[str, Any]:
        from ..explain import explanation_document

        return explanation_document(self.result)

    @property
    def text(self) -> Text:
        from ..text.explanation import explanation_text

        return explanation_text(self.result)

    def __repr__(self) -> str:
        return f"<Explanation of {self.result.view.model}: {len(self.choices)} choices>"


@dataclass(frozen=True, repr=False)
class Difference(Result):
    """The differences between two plans.

    Attributes:
        result: Differences of model, cluster, options, pipeline, layers and figures.
        names: Names of the two plans in the text.
    """

    result: PlanDifference
    names: tuple[str, str] = ("before", "after")

    @property
    def is_empty(self) -> bool:
        """Whether the plans do not differ."""
        return self.result.is_empty

    @property
    def document(self) -> dict[str, Any]:
        from ..diffing import difference_document

        return difference_document(self.result)

    @property
    def text(self) -> Text:
        from ..text.difference import difference_text

        return difference_text(self.result, self.names)

    def __repr__(self) -> str:
        before, after = (format_seconds(view.step_s) for view in (self.result.before, self.result.after))
        return f"<Difference: {'none' if self.is_empty else f'step {before} before, {after} after'}>"


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """Comparison of a run of a plan on ranks of this machine with one device and with the predicted traffic.

    Attributes:
        result: All compared numbers.
    """

    result: VerificationResult

    @property
    def is_right(self) -> bool:
        """Whether losses, gradients, parameters and bytes agree with one device and with the prediction."""
        return self.result.is_right

    @property
    def faults(self) -> tuple[str, ...]:
        """The disagreements, one sentence each; empty if :attr:`is_right`."""
        return self.result.faults

    @property
    def losses(self) -> tuple[tuple[float, float], ...]:
        """For each step, the loss on one device and the loss on the ranks."""
        return self.result.losses

    @property
    def num_ranks(self) -> int:
        """Number of ranks that ran."""
        return self.result.num_ranks

    @property
    def document(self) -> dict[str, Any]:
        from ..verification import verification_document

        return verification_document(self.result)

    @property
    def text(self) -> Text:
        from ..text.verification import verification_text

        return verification_text(self.result)

    def __repr__(self) -> str:
        verdict = "right" if self.is_right else f"off: {self.faults[0]}"
        return f"<Verification of {self.result.model} on {self.num_ranks} ranks: {verdict}>"


@dataclass(frozen=True, repr=False)
class Comparison(Result):
    """Comparison of search methods and baselines.

    Attributes:
        rows: One dictionary per method and baseline.  Every row has ``name``.  A row without a plan has ``infeasible``, the reason.
            Other rows have ``step_s``, ``communication_s`` and ``memory_bytes``; rows of methods also have ``status``, ``gap``,
            ``optimal``, ``evaluations``, ``search_s`` and, if the plan is that of a baseline, ``taken_from``; rows of baselines
            have ``mesh``.
        exact: Result of the exact search.
        is_interrupted: Whether a stop was requested.  Searches that it ended may have missed better plans.
    """

    rows: tuple[Mapping[str, Any], ...]
    exact: Planned
    is_interrupted: bool = False

    @property
    def lower_bound_s(self) -> float:
        """Proven lower bound on the cost of every plan, in seconds."""
        return self.exact.lower_bound

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        """Return the row of a method or baseline by its name."""
        for row in self.rows:
            if row["name"] == name:
                return row
        raise KeyError(name)

    def to_frame(self) -> pandas.DataFrame:
        """Return a DataFrame with one row per method and baseline.  Requires pandas.

        Raises:
            MissingPackageError: If pandas is not installed.

        >>> import autoddl
        >>> comparison = autoddl.compare("mlp:64,32,16", cluster="local-cpu", batch=16, methods=["exact"])
        >>> list(comparison.to_frame()["name"])
        ['exact', 'data parallel', 'zero-1', 'zero-2', 'fsdp', 'megatron', 'summa']
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
