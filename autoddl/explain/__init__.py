"""Explains a plan: where the time of its step goes, what limits it, and what every other choice of a layer would cost.

``view_of`` computes the figures of a plan that readers see (:class:`PlanView`).  ``explain`` finds for each layer the alternative
strategies and their regret (:class:`Explanation`).  ``explanation_document`` turns an explanation into JSON,
:mod:`autoddl.text.explanation` into text.
"""

from __future__ import annotations

from .choices import Alternative, Choice, MemoryPrice, StageChoices
from .devicememory import DeviceMemory
from .document import explanation_document
from .explanation import Explanation, explain
from .groups import LayerGroup, StageGroup
from .savings import Saving
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
    "Saving",
    "StageChoices",
    "StageGroup",
    "StepPart",
    "explain",
    "explanation_document",
    "view_of",
]
