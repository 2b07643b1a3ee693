"""Why a plan is as it is: where its time goes, what limits it, and what every other choice would cost.

``load_view`` reads any plan for its readers (:class:`PlanView`); ``explain`` finds the alternatives of every layer with their
regret (:class:`Explanation`); ``explanation_document`` is its JSON, :mod:`autoddl.text.explanation` its text.
"""

from __future__ import annotations

from .alternatives import Alternative, Choice, MemoryPrice
from .document import explanation_document
from .explanation import Explanation, explain
from .view import PlanView, load_view, view_of

__all__ = [
    "Alternative",
    "Choice",
    "Explanation",
    "MemoryPrice",
    "PlanView",
    "explain",
    "explanation_document",
    "load_view",
    "view_of",
]
