"""Verifies a plan: runs it on local ranks and compares the results with a single-device reference and with its price.

`verify(plan, num_ranks)` returns a `Verification`: the errors of the losses, of the gradients and of the parameters after three
optimizer steps, and the bytes that each layer sent.  The steps of a verification, and their modules:

=============  ===================================================================================================
module         contents
=============  ===================================================================================================
`run`          `verify`: calls the other modules and starts the ranks
`fitting`      fits a plan to the given number of ranks and to the memory of the machine
`scaling`      reduces the sizes of the model, with unchanged strategies
`prediction`   predicts the communication steps and the bytes of each layer
`task`         the values that the launcher and the ranks exchange
`rank_job`     the jobs that the ranks execute; imports OneFlow
`running`      executes a plan on the ranks; imports OneFlow
`comparing`    compares the results of the ranks with the reference and with the prediction
`result`       the result of a verification: all comparisons and the verdict
`documents`    the JSON document of a result (:mod:`autoddl.text` has its text)
=============  ===================================================================================================
"""

from __future__ import annotations

from .documents import verification_document
from .result import Verification
from .run import VerifyOptions, verify
from .scaling import Limits, scale

__all__ = ["Limits", "Verification", "VerifyOptions", "scale", "verification_document", "verify"]
