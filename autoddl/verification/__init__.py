"""Running a plan on local ranks against one device and against its price.

- `verify(plan, num_ranks)` -> `Verification`: loss, gradients, parameters after three optimizer steps, bytes per layer.
- `pipelines.verify_pipeline` -> `PipelineVerification`: the same for a plan with a pipeline; `pipeline_result`, `pipeline_job`;
  `fitting`: it on fewer ranks, and smaller.
- `scaling`: the plan's model made small enough for the machine, with the strategies kept.
- `prediction`: the steps that are priced; `result`: the verdict; `documents`: its JSON (its text: :mod:`autoddl.text`).
- `rank_job`: what the ranks do, the only part that needs OneFlow, and only there; `comparing`: what they found.
"""

from __future__ import annotations

from .documents import verification_document
from .result import Verification
from .run import VerifyOptions, verify
from .scaling import Limits, scale

__all__ = ["Limits", "Verification", "VerifyOptions", "scale", "verification_document", "verify"]
