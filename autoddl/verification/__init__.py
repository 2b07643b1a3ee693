"""Running a plan on local ranks against one device and against its price.

- `verify(plan, num_ranks)` -> `Verification`: loss, gradients, parameters after three optimizer steps, bytes per layer.
- `fitting`: the plan on the ranks and the machine at hand; `scaling`: its model made smaller, with the strategies kept.
- `prediction`: the steps that are priced; `comparing`: what ranks found beside them; `result`: the verdict; `documents`: its JSON
  (its text: :mod:`autoddl.text`).
- `rank_job`: what the ranks do, and `running`: what carries out a plan there; the only parts that need OneFlow, and only there.
"""

from __future__ import annotations

from .documents import verification_document
from .result import Verification
from .run import VerifyOptions, verify
from .scaling import Limits, scale

__all__ = ["Limits", "Verification", "VerifyOptions", "scale", "verification_document", "verify"]
