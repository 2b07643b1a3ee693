"""Why a plan is as it is: where its time goes, what limits it, and what every other choice would cost.

``view_of`` makes the figures of a plan for its readers (:class:`PlanView`); ``explain`` finds the alternatives of every layer with
their regret (:class:`Explanation`); ``explanation_document`` is its JSON, :mod:`autoddl.text.explanation` its text.
"""

from __future__ import annotations

from .choices import Alternative, Choice, MemoryPrice, StageChoices
from .devicememory import DeviceMemory
from .document import explanation_document
from .explanation import Explanation, explain
from .groups import LayerGroup, StageGroup
from .searched import Certificate, RivalFigures
from .steptime import StepPart
from .view import PlanView, view_of

__all__ = [
    "Alternative",
    "Certificate",
    "Choice",
    "DeviceMemory",
    "Explanation",
    "LayerGroup",
    "MemoryPrice",
    "PlanView",
    "RivalFigures",
    "StageChoices",
    "StageGroup",
    "StepPart",
    "explain",
    "explanation_document",
    "view_of",
]
