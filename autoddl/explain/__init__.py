"""Why a plan is as it is: where its time goes, what limits it, and what every other choice would cost.

``load_view`` reads any plan for its readers (:class:`PlanView`); ``explain`` finds the alternatives of every layer with their
regret (:class:`Explanation`); ``explanation_document`` and ``explanation_text`` show it.
"""

from __future__ import annotations

from .alternatives import Alternative, Choice, MemoryPrice
from .explanation import Explanation, explain
from .showing import explanation_document, explanation_text
from .view import PlanView, load_view, view_of

__all__ = [
    "Alternative",
    "Choice",
    "Explanation",
    "MemoryPrice",
    "PlanView",
    "explain",
    "explanation_document",
    "explanation_text",
    "load_view",
    "view_of",
]
