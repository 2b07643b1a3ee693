"""Runs a verification: the single-device reference, then the plan on all ranks, then the comparison of the two.

The reference of an asynchronous schedule computes with weights that are as stale as those of the schedule.  See
`task.gradient_step` for the step whose gradients are compared.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.failures import RankError
from autoddl.pipelines.runtime.ranks.launcher import RankPool
from autoddl.pipelines.runtime.ranks.network import namespace_available
from autoddl.pipelines.runtime.ranks.workfolders import WorkFolder

from ..executors import EAGER
from ..ownmodels import function_of_plan
from ..planfile import PlanFile
from ..zoo.builtin import BuiltIn, recognise
from .comparing import with_recount
from .executors import Executor, executor_of
from .fitting import FittedPlan, fit_plan
from .prediction import predict
from .result import Verification
from .scaling import Limits
from .task import VerificationTask

__all__ = ["NUM_RECOUNTS", "VerifyOptions", "verify"]

#: Further counts of the bytes, if a count deviates from the prediction, before the deviation is reported.
NUM_RECOUNTS = 4
#: Errors of single precision up to this multiple of the tolerance may be rounding.
MAX_ROUNDING = 100
#: Seconds that a rank waits for another one.  A stalled rank is detected within this time, and the command ends within 20 s.
STALL_SECONDS = 10.0
#: Parameters that the ranks of a machine copy in a second, at least.
COPIED_PER_SECOND = 5e6
#: Bytes of memory of a process that has imported OneFlow and done nothing else.
RANK_BYTES = 350e6
#: Fraction of the available memory that a verification may use.
USABLE_MEMORY = 0.5
#: FLOPs of a verification for each core of the machine: about ten seconds.
FLOPS_PER_CORE = 2e11
_JOBS = "autoddl.verification.rank_job"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class VerifyOptions:
    """Options of a verification.

    Attributes:
        tolerance: Largest allowed relative error of losses, gradients and parameters.
        timeout_s: Time limit of the whole verification, in seconds.
        seed: Seed of the initial values and the data.
        limits: Memory and FLOPs of all ranks together.  None: what the machine can provide (`machine_limits`).
        executor: What executes the plan, one of `autoddl.executors.EXECUTORS`.
    """

    tolerance: float = 1e-5
    timeout_s: float = 300.0
    seed: int = 0
    limits: Limits | None = None
    executor: str = EAGER


def verify(
    plan: PlanFile,
    num_ranks: int,
    *,
    model: str = "",
    options: VerifyOptions | None = None,
    pool: RankPool | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a plan on local ranks, and compare the results with a single-device reference and with the plan's price.

    If values are off in single precision by little more than the tolerance, the verification is repeated in double precision,
    which tells rounding from a wrong result.

    Args:
        plan: A plan with or without a pipeline.
        num_ranks: Number of ranks: the number of the plan's devices.  A plan with a pipeline can run on fewer ranks, without some
            of its middle stages (see `fitting`).
        model: The model of the plan, such as ``FILE.py:FUNCTION``.  Required unless the plan's model is a built-in one.
        options: Tolerance, timeout, seed and limits.
        pool: Ranks to use.  None, or if they crash and the plan is run again: new ranks are started.
        progress: Called with a short text when a new phase of the verification begins.

    Raises:
        UserError: If the plan cannot be fitted to this number of ranks, ``model`` is not the plan's model, the model cannot be
            created or is too large for the limits, or OneFlow is not installed.
        RankError: If a rank fails.  The error names the rank; all ranks have ended.  A crash inside an nn.Graph is an error only
            if it happens twice; a note tells of the first one.
    """
    options = options or VerifyOptions()
    deadline = _Deadline(options.timeout_s)
    first = _verified(plan, num_ranks, model, options, pool, progress, deadline, in_double=False)
    if not _may_be_rounding(first):
        return first
    second = _verified(plan, num_ranks, model, options, pool, progress, deadline, in_double=True)
    note = f"repeated in float64, since values were off by {_worst_error(first):.1e} in float32, which may be rounding"
    return replace(second, notes=(*(n for n in second.notes if "amplify rounding" not in n), note))


def _worst_error(verification: Verification) -> float:
    errors = [check.error for check in (*verification.gradients, *verification.parameters)]
    return max([*errors, *verification.loss_errors], default=0.0)


def _may_be_rounding(verification: Verification) -> bool:
    """Return whether errors above the tolerance are so small that rounding in single precision may cause them."""
    tolerance, error = verification.tolerance.values, _worst_error(verification)
    is_single = verification.executor == EAGER and verification.workload.precision == "float32"
    return is_single and tolerance < error < MAX_ROUNDING * tolerance


def _verified(
    plan: PlanFile,
    num_ranks: int,
    model: str,
    options: VerifyOptions,
    pool: RankPool | None,
    progress: Progress | None,
    deadline: _Deadline,
    *,
    in_double: bool,
) -> Verification:
    """Run and compare a plan once; arguments as those of `verify`, and whether to compute in double precision in any case."""
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    # Fit the plan to the ranks, and predict what they send.
    built_in, function = _built_in_or_function(plan, model)
    limits = options.limits or machine_limits(num_ranks)
    fitted = fit_plan(plan, num_ranks, limits, built_in, options.executor, in_double)
    executor = executor_of(options.executor)
    executor.check(fitted)
    prediction = predict(fitted)
    # Bytes are counted in a network namespace of the ranks' own.
    not_counted_because = namespace_available().reason if num_ranks > 1 else "one rank sends nothing"
    show_progress = progress or (lambda text: None)
    with WorkFolder("verify") as folder:
        task = _make_task(fitted, function, options.seed, folder=str(folder), counts_bytes=not not_counted_because)
        task = replace(task, corrects_bias=options.executor == EAGER)
        compare_with = functools.partial(
            executor.compare,
            plan,
            fitted,
            prediction,
            tolerance=options.tolerance,
            not_counted_because=not_counted_because,
        )
        crashes: list[str] = []
        while True:
            try:
                show_progress(f"starting {num_ranks} ranks")
                usable = None if crashes else pool  # a crash has ended it
                with contextlib.nullcontext(usable) if usable else _start_ranks(task, num_ranks, deadline) as ranks:
                    verification = _run_task(task, executor, ranks, deadline, show_progress, compare_with)
                break
            except RankError as error:
                crashes.append(f"repeated, since {error}")
                if not error.crashed or len(crashes) == executor.num_attempts:
                    raise
    return replace(verification, seconds=deadline.elapsed_s, notes=(*verification.notes, *crashes))


def _run_task(
    task: VerificationTask,
    executor: Executor,
    ranks: RankPool,
    deadline: _Deadline,
    show_progress: Progress,
    compare_with: Callable[..., Verification],
) -> Verification:
    """Run the single-device reference, then the plan on all ranks, and compare the two."""

    def on_report(rank: int, value: str) -> None:
        if rank == 0:
            show_progress(value)

    show_progress("running on one device")
    reference = ranks.run(f"{_JOBS}:run_reference", task, timeout_s=deadline.remaining_s)[0]
    show_progress("running on all ranks")
    results = ranks.run(executor.run_job, task, timeout_s=deadline.remaining_s, on_report=on_report)
    verification = compare_with(reference, results)
    # Other processes on the machine may disturb a count; count again before a deviation is reported.
    for _ in range(NUM_RECOUNTS):
        if not verification.are_bytes_off:
            break
        show_progress("counting bytes again")
        recount = ranks.run(executor.count_job, task, timeout_s=deadline.remaining_s)[0]
        results = with_recount(results, recount)
        verification = compare_with(reference, results)
    return verification


def _make_task(fitted: FittedPlan, function: str, seed: int, *, folder: str, counts_bytes: bool) -> VerificationTask:
    return VerificationTask(
        graph=fitted.scaled.graph,
        workload=fitted.scaled.workload,
        stages=fitted.stages,
        schedule=fitted.schedule,
        built_in=fitted.scaled.built_in,
        function=function,
        seed=seed,
        folder=folder,
        counts_bytes=counts_bytes,
    )


def machine_limits(num_ranks: int) -> Limits:
    """Return the memory and the FLOPs that this machine can provide for a verification."""
    available_bytes = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # on Linux, the memory of caches is available too
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        available_bytes = int(fields["MemAvailable"].split()[0]) * 1024
    usable_bytes = USABLE_MEMORY * available_bytes - RANK_BYTES * num_ranks
    return Limits(max(usable_bytes, 0.0), FLOPS_PER_CORE * len(os.sched_getaffinity(0)))


# ---- The model -------------------------------------------------------------------------------------------------------------


def _built_in_or_function(plan: PlanFile, model: str) -> tuple[BuiltIn | None, str]:
    """Return the built-in model of a plan (None if it is not built in) and the user's function that returns it ("" without one).

    Raises:
        UserError: If ``model`` is not the plan's model, or if the plan's model is not built in and no function is given.
    """
    function = function_of_plan(plan, model)
    built_in = None if function else recognise(plan.graph)
    if built_in is None and not function:
        raise UserError(
            f"the plan's model {plan.graph.name} is not a built-in one; give model=FILE.py:FUNCTION, which makes it"
        )
    return built_in, function


# ---- Ranks and time --------------------------------------------------------------------------------------------------------


def _start_ranks(task: VerificationTask, num_ranks: int, deadline: _Deadline) -> RankPool:
    # Ranks first copy all parameters, each at its own pace, so that the first of them waits for the last.
    copied = num_ranks * sum(p.num_elements for layer in task.graph.layers for p in layer.parameters)
    return RankPool(
        num_ranks,
        private_network=task.counts_bytes,
        stall_timeout_s=STALL_SECONDS + copied / COPIED_PER_SECOND,
        start_timeout_s=deadline.remaining_s,
    )


class _Deadline:
    """The time limit of a verification."""

    def __init__(self, timeout_s: float):
        self._start = time.monotonic()
        self._timeout_s = timeout_s

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def remaining_s(self) -> float:
        return max(self._timeout_s - self.elapsed_s, 0.0)
