"""Plans for others: an annotated OneFlow model, the document, the annotated layer graph, a trace of the predicted step.

- `export(plan, form)`: the text of a file in one of `FORMS`.
- :mod:`.oneflow` writes the model, :mod:`.pipelined` one in a pipeline (with :mod:`.scheduletext`, :mod:`.sharedweights`):
  :mod:`.classes`, and :mod:`.layertext` layer by layer, which prints the statements that the runtime runs. :mod:`.library` takes
  what they call from the runtime's own source (and what that has not from :mod:`.parts`); :mod:`.assembling` puts all together.
- :mod:`.annotated` puts a plan's figures on the layer graph, :mod:`.drawings` writes it as GraphML and dot.
- :mod:`.traces` writes the predicted step.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from autoddl.costmodel.errors import UserError

if TYPE_CHECKING:
    from ..planfile import PlanFile

__all__ = ["FORMS", "export"]

#: The forms of `export`.
FORMS = ("oneflow", "json", "graphml", "dot", "chrome-trace")


def export(plan: PlanFile, form: str, *, model: str = "") -> str:
    """A plan in another form.

    Args:
        plan: as ``load_plan`` gives it.
        form: one of `FORMS`.
        model: ``FILE.py:FUNCTION`` that makes the model, for ``oneflow`` where it is none that is built in.

    Raises:
        UserError: the form is unknown, or the plan cannot be written so; it names what is in the way.
    """
    if model and form != "oneflow":
        raise UserError(f"model={model} is for form='oneflow', not for form='{form}'")
    if form == "oneflow":
        from .oneflow import oneflow_text

        return oneflow_text(plan, model)
    if form == "json":
        return json.dumps(plan.document, indent=2, sort_keys=True, allow_nan=False) + "\n"
    if form in ("graphml", "dot"):
        from .drawings import dot_text, graphml_text

        return graphml_text(plan) if form == "graphml" else dot_text(plan)
    if form == "chrome-trace":
        from .traces import trace_text

        return trace_text(plan)
    raise UserError(f"form {form!r} is not one of {', '.join(FORMS)}")
