"""A user's own model beside a plan that was made for it."""

from __future__ import annotations

from pathlib import Path

from .planfile import PlanFile
from .zoo import is_oneflow_model, resolve_model

__all__ = ["function_of_plan"]


def function_of_plan(plan: PlanFile, model: str) -> str:
    """The function that makes a plan's module, ``FILE.py:FUNCTION`` with an absolute path; "" where ``model`` names no file.

    Raises:
        UserError: there is no such model, or its graph is not the plan's; needs OneFlow where it is a file's.
    """
    if not model:
        return ""
    plan.check_graph(resolve_model(model))
    if not is_oneflow_model(model):
        return ""
    file, _, name = model.rpartition(":")
    return f"{Path(file).resolve()}:{name}"
