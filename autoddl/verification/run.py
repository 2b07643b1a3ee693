"""Verifying a plan: one device, then the ranks, then the comparison."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.network import namespace_available
from autoddl.pipelines.runtime.workfolders import WorkFolder

from ..planfile import Plan
from ..zoo import is_oneflow_model, resolve_model
from ..zoo.builtin import BuiltIn, recognise
from .comparing import compare, with_recount
from .prediction import in_float32, predicted_steps
from .result import Verification
from .scaling import Limits, Scaled, scale
from .task import Task

__all__ = [
    "NUM_RECOUNTS",
    "Deadline",
    "VerifyOptions",
    "built_in_or_function",
    "check_ranks",
    "machine_limits",
    "notes_of",
    "started",
    "task_of",
    "verify",
    "why_uncounted",
]

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
    plan: Plan,
    num_ranks: int,
    *,
    model: str = "",
    options: VerifyOptions | None = None,
    pool: RankPool | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a plan on local ranks, and compare it with one device and with its price.

    Args:
        plan: for as many devices.
        num_ranks: how many ranks to start.
        model: what makes the model, such as ``FILE.py:FUNCTION``; needed where it is none that is built in.  Refused where its
            graph is not the plan's.
        options: tolerance, timeout, seed, limits.
        pool: ranks to use in place of new ones.
        progress: told what is going on.

    Raises:
        UserError: the plan is for another number of ranks or another model, the model cannot be made or is too large, OneFlow is
            not there.
        RankError: a rank failed; it is named, and none is left.
    """
    options = options or VerifyOptions()
    deadline = Deadline(options.timeout_s)
    check_ranks(plan, num_ranks)
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    built_in, function = built_in_or_function(plan, model)
    limits = options.limits or machine_limits(num_ranks)
    scaled = scale(plan.graph, plan.strategies, in_float32(plan.workload), limits, built_in)
    uncounted = why_uncounted(num_ranks)
    with WorkFolder("verify") as folder:
        task = task_of(scaled, function, options.seed, str(folder), uncounted)
        priced = predicted_steps(scaled.graph, scaled.strategies, scaled.workload, plan.cluster)
        finish = functools.partial(
            compare,
            plan,
            scaled,
            priced,
            tolerance=options.tolerance,
            uncounted=uncounted,
            notes=notes_of(plan, scaled.graph),
        )
        say = progress or (lambda text: None)
        say(f"starting {num_ranks} ranks")
        with contextlib.nullcontext(pool) if pool else started(num_ranks, task.counts_bytes, deadline) as ranks:
            say("running on one device")
            reference = ranks.run(f"{_JOBS}:run_reference", task, timeout_s=deadline.left_s)[0]

            def on_report(rank: int, value: str) -> None:
                if rank == 0:
                    say(value)

            say(f"running on {num_ranks} ranks")
            shards = ranks.run(f"{_JOBS}:run_plan", task, timeout_s=deadline.left_s, on_report=on_report)
            found = finish(reference, shards)
            for _ in range(NUM_RECOUNTS):
                if not found.are_bytes_off:
                    break
                say("counting bytes again")
                again = ranks.run(f"{_JOBS}:count_again", task, timeout_s=deadline.left_s)[0]
                shards = with_recount(shards, again)
                found = finish(reference, shards)
    return replace(found, seconds=deadline.passed_s)


def check_ranks(plan: Plan, num_ranks: int) -> None:
    """Refuse another number of ranks than the plan's.

    Raises:
        UserError: naming both.
    """
    planned = plan.cluster.num_devices
    if num_ranks != planned:
        nodes, per_node = plan.cluster.num_nodes, plan.cluster.devices_per_node
        raise UserError(
            f"the plan is for {planned} devices ({nodes} nodes of {per_node}), --ranks is {num_ranks}; "
            f"give --ranks {planned}, or plan for fewer devices (--nodes, --devices-per-node)"
        )


def why_uncounted(num_ranks: int) -> str:
    """Why bytes on the wire cannot be counted; "" where they can."""
    return namespace_available().reason if num_ranks > 1 else "one rank sends nothing"


def task_of(scaled: Scaled, function: str, seed: int, folder: str, uncounted: str) -> Task:
    """What ranks and one device are to run."""
    return Task(
        graph=scaled.graph,
        strategies=dict(scaled.strategies),
        workload=scaled.workload,
        built_in=scaled.built_in,
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


def module_function(plan: Plan, model: str) -> str:
    """The function that makes the module, with an absolute path; "" where it is built in.  Refuses another model's graph."""
    if not model:
        return ""
    graph = resolve_model(model)
    plan.check_graph(graph)
    if not is_oneflow_model(model):
        return ""
    file, _, name = model.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def built_in_or_function(plan: Plan, model: str) -> tuple[BuiltIn | None, str]:
    """How the plan's model is made: one that is built in, or a function (see `module_function`).

    Raises:
        UserError: it is another model, or there is no way to make it.
    """
    function = module_function(plan, model)
    built_in = None if function else recognise(plan.graph)
    if built_in is None and not function:
        raise UserError(
            f"the plan's model {plan.graph.name} is none that can be built here; say what makes it: --model FILE.py:FUNCTION"
        )
    return built_in, function


def notes_of(plan: Plan, graph: LayerGraph) -> tuple[str, ...]:
    """What the reader should know of how a plan is run, at its model's size here."""
    notes = []
    if plan.workload.precision != "float32":
        notes.append(
            f"the plan is for {plan.workload.precision} precision; CPU ranks run, and bytes are priced, in float32"
        )
    if any("dropout" in layer.epilogue for layer in graph.layers):
        notes.append("dropout is off: it draws at random")
    return tuple(notes)


# ---- Ranks and time --------------------------------------------------------------------------------------------------------


def started(num_ranks: int, private_network: bool, deadline: Deadline) -> RankPool:
    """Ranks that notice soon when one of them stalls."""
    return RankPool(
        num_ranks,
        private_network=private_network,
        stall_timeout_s=STALL_SECONDS,
        start_timeout_s=deadline.left_s,
    )


class Deadline:
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
