"""Checks a user's own model against the plan that was made for it."""

from __future__ import annotations

from pathlib import Path

from .planfile import PlanFile
from .zoo import is_oneflow_model, resolve_model

__all__ = ["function_of_plan"]


def function_of_plan(plan: PlanFile, model: str) -> str:
    """Return the user's function that returns the plan's module.

    Args:
        plan: The plan.
        model: The model as the user named it: ``FILE.py:FUNCTION``, the name of another model, or "".

    Returns:
        ``FILE.py:FUNCTION`` with an absolute path.  "" if ``model`` does not name a function.

    Raises:
        UserError: If the model does not exist, or its layer graph is not the plan's.  ``FILE.py:FUNCTION`` requires OneFlow.
    """
    if not model:
        return ""
    plan.check_graph(resolve_model(model))
    if not is_oneflow_model(model):
        return ""
    file, _, name = model.rpartition(":")
    return f"{Path(file).resolve()}:{name}"
