"""Verifying a plan: one device, then the ranks with the plan's schedule, then the comparison.

Of a synchronous schedule the gradients of the first step are compared. An asynchronous one runs its steps in one go, against one
device that computes with weights as old as the schedule says; its last step's gradients are compared, which are those of stale
weights.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.network import namespace_available
from autoddl.pipelines.runtime.workfolders import WorkFolder

from ..ownmodels import function_of_plan
from ..planfile import PlanFile
from ..zoo.builtin import BuiltIn, recognise
from .comparing import compare, with_recount
from .fitting import FittedPlan, fit_plan
from .prediction import predict
from .result import Verification
from .scaling import Limits
from .task import VerificationTask

__all__ = ["NUM_RECOUNTS", "VerifyOptions", "verify"]

#: How often bytes are counted again before they are called off.
NUM_RECOUNTS = 4
#: How long a rank may wait for another one: one that stalls is found within this, and the command ends within 20 s.
STALL_SECONDS = 10.0
#: What a process with OneFlow takes before it does anything.
RANK_BYTES = 350e6
#: Of free memory.
USABLE_MEMORY = 0.5
#: About ten seconds on every core.
FLOPS_PER_CORE = 2e11
_JOBS = "autoddl.verification.rank_job"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    """How to verify.

    Attributes:
        tolerance: of values, relative to one device.
        timeout_s: for everything.
        seed: of initial values and data.
        limits: what the ranks may take; the machine's where it is None.
    """

    tolerance: float = 1e-5
    timeout_s: float = 300.0
    seed: int = 0
    limits: Limits | None = None


def verify(
    plan: PlanFile,
    num_ranks: int,
    *,
    model: str = "",
    options: VerifyOptions | None = None,
    pool: RankPool | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a plan on local ranks, and compare it with one device and with its price.

    Args:
        plan: with or without a pipeline.
        num_ranks: how many ranks to start: as many as the plan has devices. Of a plan with a pipeline fewer will do: stages in the
            middle are left out then (see `fitting`).
        model: what makes the model, such as ``FILE.py:FUNCTION``; needed where it is none that is built in.  Refused where its
            graph is not the plan's.
        options: tolerance, timeout, seed, limits.
        pool: ranks to use in place of new ones.
        progress: told what is going on.

    Raises:
        UserError: the plan cannot be brought to so many ranks or is for another model, the model cannot be made or is too large,
            OneFlow is not there.
        RankError: a rank failed; it is named, and none is left.
    """
    options = options or VerifyOptions()
    deadline = _Deadline(options.timeout_s)
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    built_in, function = _built_in_or_function(plan, model)
    fitted = fit_plan(plan, num_ranks, options.limits or machine_limits(num_ranks), built_in)
    predicted = predict(fitted, plan.cluster)
    uncounted = namespace_available().reason if num_ranks > 1 else "one rank sends nothing"
    say = progress or (lambda text: None)

    def on_report(rank: int, value: str) -> None:
        if rank == 0:
            say(value)

    with WorkFolder("verify") as folder:
        task = _task(fitted, function, options.seed, str(folder), uncounted)
        say(f"starting {num_ranks} ranks")
        with contextlib.nullcontext(pool) if pool else _started(num_ranks, task.counts_bytes, deadline) as ranks:
            say("running on one device")
            reference = ranks.run(f"{_JOBS}:run_reference", task, timeout_s=deadline.left_s)[0]
            say(f"running on {num_ranks} ranks")
            shards = ranks.run(f"{_JOBS}:run_plan", task, timeout_s=deadline.left_s, on_report=on_report)
            asked: dict[str, Any] = {"tolerance": options.tolerance, "uncounted": uncounted}
            found = compare(plan, fitted, predicted, reference, shards, **asked)
            for _ in range(NUM_RECOUNTS):
                if not found.are_bytes_off:
                    break
                say("counting bytes again")
                again = ranks.run(f"{_JOBS}:count_again", task, timeout_s=deadline.left_s)[0]
                shards = with_recount(shards, again)
                found = compare(plan, fitted, predicted, reference, shards, **asked)
    return replace(found, seconds=deadline.passed_s)


def _task(fitted: FittedPlan, function: str, seed: int, folder: str, uncounted: str) -> VerificationTask:
    """What ranks and one device are to run."""
    return VerificationTask(
        graph=fitted.scaled.graph,
        workload=fitted.scaled.workload,
        stages=fitted.stages,
        schedule=fitted.schedule,
        is_applied=fitted.is_applied,
        built_in=fitted.scaled.built_in,
        function=function,
        seed=seed,
        folder=folder,
        counts_bytes=not uncounted,
    )


def machine_limits(num_ranks: int) -> Limits:
    """What this machine can give to a verification."""
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = Path("/proc/meminfo")
    if memory.exists():  # free memory alone would leave out what caches hold
        fields = dict(line.split(":", 1) for line in memory.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    usable = USABLE_MEMORY * available - RANK_BYTES * num_ranks
    return Limits(max(usable, 0.0), FLOPS_PER_CORE * len(os.sched_getaffinity(0)))


# ---- The model -------------------------------------------------------------------------------------------------------------


def _built_in_or_function(plan: PlanFile, model: str) -> tuple[BuiltIn | None, str]:
    """How the plan's model is made: one that is built in, or a function (see `function_of_plan`).

    Raises:
        UserError: it is another model, or there is no way to make it.
    """
    function = function_of_plan(plan, model)
    built_in = None if function else recognise(plan.graph)
    if built_in is None and not function:
        raise UserError(
            f"the plan's model {plan.graph.name} is not a built-in one; give model=FILE.py:FUNCTION, which makes it"
        )
    return built_in, function


# ---- Ranks and time --------------------------------------------------------------------------------------------------------


def _started(num_ranks: int, private_network: bool, deadline: _Deadline) -> RankPool:
    """Ranks that notice soon when one of them stalls."""
    return RankPool(
        num_ranks,
        private_network=private_network,
        stall_timeout_s=STALL_SECONDS,
        start_timeout_s=deadline.left_s,
    )


class _Deadline:
    """When everything has to be done."""

    def __init__(self, timeout_s: float):
        self._started = time.monotonic()
        self._timeout_s = timeout_s

    @property
    def passed_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def left_s(self) -> float:
        return max(self._timeout_s - self.passed_s, 0.0)
