"""Writes a plan as a OneFlow model, a JSON document, an annotated layer graph, or a trace of the predicted training step.

:func:`export` returns the text of a file in one of the forms `FORMS`.

=========================================  ===============================================================================
modules                                    contents
=========================================  ===============================================================================
:mod:`.oneflow`, :mod:`.pipelined`         OneFlow files; the parts of a file that only pipelines have
:mod:`.classes`, :mod:`.layertext`         classes of a OneFlow file; statements of a layer
:mod:`.scheduletext`,                      schedule of a pipeline; weights that its stages share
:mod:`.sharedweights`
:mod:`.library`, :mod:`.definitions`       definitions that a OneFlow file needs, copied from the source of the runtime
:mod:`.parts`                              further definitions for OneFlow files, which the runtime does not have
:mod:`.heading`, :mod:`.templates`         top of a OneFlow file; training functions and other fixed texts
:mod:`.assembling`                         the parts put together
:mod:`.source`, :mod:`.writing`            texts of a plan as Python source; statements; line breaks
:mod:`.scene`                              the plan, as all writers of a OneFlow file need it
:mod:`.globaltensors`                      OneFlow files for ``nn.Graph``
:mod:`.annotated`, :mod:`.drawings`        layer graph with the figures of a plan; GraphML and dot
:mod:`.traces`                             predicted training step for chrome://tracing and Perfetto
=========================================  ===============================================================================
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autoddl.costmodel.errors import UserError

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["FORMS", "export"]

#: The forms that `export` writes.
FORMS = ("oneflow", "oneflow-graph", "json", "graphml", "dot", "chrome-trace")


def export(plan: PlanFile, form: str, *, model: str = "") -> str:
    """Return a plan as the text of a file.

    Args:
        plan: a plan, from ``autoddl.plan`` or ``load_plan``.
        form: one of `FORMS`.
        model: ``FILE.py:FUNCTION`` that makes the model, for ``form="oneflow"``; may be empty if the model is a built-in one.

    Raises:
        UserError: the form is unknown, or the plan cannot be written in this form.

    >>> import autoddl
    >>> plan = autoddl.plan("mlp:256,1024,256", cluster="dgx-a100", nodes=1, batch=64)
    >>> export(plan, "dot").splitlines()[0]
    'digraph "mlp:256,1024,256" {'
    """
    if model and form != "oneflow":
        raise UserError(f"model={model} is for form='oneflow', not for form='{form}'")
    if form == "oneflow":
        from .oneflow import oneflow_text

        return oneflow_text(plan, model)
    if form == "oneflow-graph":
        from .globaltensors import graph_text

        return graph_text(plan)
    if form == "json":
        return json.dumps(plan.document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    if form in ("graphml", "dot"):
        from .drawings import dot_text, graphml_text

        return graphml_text(plan) if form == "graphml" else dot_text(plan)
    if form == "chrome-trace":
        from .traces import trace_text

        return trace_text(plan)
    raise UserError(f"form {form!r} is not one of {', '.join(FORMS)}")
