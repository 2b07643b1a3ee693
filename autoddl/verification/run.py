"""Verifying a plan: one device, then the ranks, then the comparison."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autoddl.costmodel.collectives import Step
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.launcher import RankPool
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.network import namespace_available
from autoddl.pipelines.runtime.wire import MESSAGE_BYTES

from ..models import is_oneflow_model, resolve_model
from ..models.builtin import recognise
from ..plan import Plan
from .prediction import (
    PHASES,
    Steps,
    in_float32,
    missing_steps,
    output_steps,
    predicted_steps,
    sent_messages,
    unpriced_steps,
)
from .result import NOISE_BYTES, LayerCheck, PhaseCheck, Tolerance, ValueCheck, Verification
from .scaling import Limits, Scaled, scale
from .task import Shard, Task

__all__ = ["VerifyOptions", "check_ranks", "machine_limits", "verify"]

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
    say = progress or (lambda text: None)
    started = time.monotonic()
    check_ranks(plan, num_ranks)
    if not (available := is_available()):
        raise UserError(f"cannot verify: {available.reason}")
    function = _function(plan, model)
    built_in = None if function else recognise(plan.graph)
    if built_in is None and not function:
        raise UserError(
            f"the plan's model {plan.graph.name} is none that can be built here; say what makes it: --model FILE.py:FUNCTION"
        )
    limits = options.limits or machine_limits(num_ranks)
    scaled = scale(plan.graph, plan.strategies, in_float32(plan.workload), limits, built_in)
    priced = predicted_steps(scaled.graph, scaled.strategies, scaled.workload, plan.cluster)
    private = namespace_available()
    with tempfile.TemporaryDirectory(prefix="autoddl-verify-") as folder:
        counts_bytes = bool(private) and num_ranks > 1
        task = Task(
            scaled.graph,
            dict(scaled.strategies),
            scaled.workload,
            scaled.built_in,
            function,
            options.seed,
            folder,
            counts_bytes,
        )
        if pool is not None:
            losses, shards = _run(pool, task, options.timeout_s, say)
        else:
            say(f"starting {num_ranks} ranks")
            with RankPool(
                num_ranks,
                private_network=counts_bytes,
                stall_timeout_s=STALL_SECONDS,
                start_timeout_s=options.timeout_s,
            ) as own:
                losses, shards = _run(own, task, options.timeout_s - (time.monotonic() - started), say)
    return Verification(
        model=plan.graph.name,
        levels=tuple((level.name, level.size) for level in plan.cluster.levels),
        workload=scaled.workload,
        changes=scaled.changes,
        tolerance=Tolerance(options.tolerance, NOISE_BYTES * num_ranks),
        losses=_losses(losses, shards),
        layers=_layers(scaled, priced, shards),
        step=_whole_step(scaled, priced, shards),
        uncounted="" if counts_bytes else private.reason or "one rank sends nothing",
        notes=_notes(plan, scaled),
        seconds=time.monotonic() - started,
    )


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


def _function(plan: Plan, model: str) -> str:
    """The function that makes the module, with an absolute path; "" where it is built in.  Refuses another model's graph."""
    if not model:
        return ""
    graph = resolve_model(model)
    plan.check_graph(graph)
    if not is_oneflow_model(model):
        return ""
    file, _, name = model.rpartition(":")
    return f"{Path(file).resolve()}:{name}"


def _notes(plan: Plan, scaled: Scaled) -> tuple[str, ...]:
    notes = []
    if plan.workload.precision != "float32":
        notes.append(
            f"the plan is for {plan.workload.precision} precision; CPU ranks run, and bytes are priced, in float32"
        )
    if any("dropout" in layer.epilogue for layer in scaled.graph.layers):
        notes.append("dropout is off: it draws at random")
    return tuple(notes)


# ---- Running ---------------------------------------------------------------------------------------------------------------


def _run(pool: RankPool, task: Task, timeout_s: float, say: Progress) -> tuple[tuple[float, ...], list[Shard]]:
    """One device's losses, and every rank's findings."""
    started = time.monotonic()
    say("running on one device")
    reference = pool.run(f"{_JOBS}:run_reference", task, timeout_s=timeout_s)[0]
    say(f"running on {pool.num_ranks} ranks")
    left = timeout_s - (time.monotonic() - started)

    def on_report(rank: int, value: str) -> None:
        if rank == 0:
            say(value)

    return reference.losses, pool.run(f"{_JOBS}:run_plan", task, timeout_s=left, on_report=on_report)


# ---- Comparing -------------------------------------------------------------------------------------------------------------


def _losses(expected: Sequence[float], shards: Sequence[Shard]) -> tuple[tuple[float, float], ...]:
    pairs = []
    for step, value in enumerate(expected):
        found = max((shard.losses[step] for shard in shards), key=lambda loss: _distance(loss, value))
        pairs.append((value, found))
    return tuple(pairs)


def _distance(found: float, expected: float) -> float:
    distance = abs(found - expected)
    return distance if distance == distance else float("inf")


def _layers(scaled: Scaled, priced: Mapping[tuple[str, str], Steps], shards: Sequence[Shard]) -> tuple[LayerCheck, ...]:
    found = []
    for layer in scaled.graph.layers:
        strategy = scaled.strategies[layer.name]
        phases = {}
        for phase in PHASES:
            sections = [[s for s in shard.sections if (s.layer, s.phase) == (layer.name, phase)] for shard in shards]
            phases[phase] = _phase(
                priced[layer.name, phase],
                unpriced_steps(layer, strategy, phase),
                [[step for section in own for step in section.steps] for own in sections],
                None if shards[0].step_bytes is None else sum(section.payload_bytes or 0 for section in sections[0]),
            )
        own = [parameter.name for parameter in layer.parameters if parameter.tied_to is None]
        found.append(
            LayerCheck(
                layer.name,
                layer.kind,
                layer.block,
                layer.role,
                strategy,
                phases,
                _values(own, [shard.gradient_errors for shard in shards]),
                _values(own, [shard.parameter_errors for shard in shards]),
            )
        )
    return tuple(found)


def _whole_step(scaled: Scaled, priced: Mapping[tuple[str, str], Steps], shards: Sequence[Shard]) -> PhaseCheck:
    """All micro-batches and the gradients, as one."""
    expected: list[Step] = []
    unpriced: list[Step] = []
    for (name, phase), steps in priced.items():
        times = 1 if phase == "gradient" else scaled.workload.num_micro_batches
        expected += steps * times
        unpriced += unpriced_steps(scaled.graph[name], scaled.strategies[name], phase) * times
    unpriced += output_steps(scaled.graph, scaled.strategies, scaled.workload) * scaled.workload.num_micro_batches
    return _phase(expected, unpriced, [shard.step_steps for shard in shards], shards[0].step_bytes)


def _phase(
    expected: Sequence[Step], unpriced: Sequence[Step], ran: Sequence[Sequence[Step]], payload_bytes: float | None
) -> PhaseCheck:
    """``ran``: the steps of every rank; ``payload_bytes``: what all of them sent, None where it was not counted."""
    missing: list[str] = []
    unexpected: list[str] = []
    for steps in ran:
        lacking, beyond = missing_steps((*expected, *unpriced), steps)
        missing += [str(step) for step in lacking if str(step) not in missing]
        unexpected += [str(step) for step in beyond if str(step) not in unexpected]
    sent = None
    if payload_bytes is not None:
        headers = MESSAGE_BYTES * sum(sent_messages(step) for steps in ran for step in steps)
        sent = payload_bytes - headers - len(ran) * sum(step.sent_bytes for step in unpriced)
    predicted = len(ran) * sum(step.sent_bytes for step in expected)
    return PhaseCheck(predicted, sent, tuple(missing), tuple(unexpected))


def _values(names: Sequence[str], errors: Sequence[Mapping[str, float]]) -> tuple[ValueCheck, ...]:
    """The worst rank for each parameter."""
    checks = []
    for name in names:
        rank = max(range(len(errors)), key=lambda rank: errors[rank].get(name, 0.0))
        if any(name in found for found in errors):
            checks.append(ValueCheck(name, errors[rank].get(name, 0.0), rank))
    return tuple(checks)
