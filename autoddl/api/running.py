"""Runs a script on all ranks of a plan: on this machine, over ssh or with Slurm; or joins a job as one rank."""

from __future__ import annotations

import functools
import os
import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.reading import is_whole

from ..launching.gpuchecks import plan_faults
from ..launching.hosts import LOCALHOST, Host, Placement
from ..launching.interrupts import Interrupted
from ..launching.job import Job
from ..launching.joining import Membership, check_membership, find_membership
from ..launching.output import write_line, write_message
from ..launching.running import describe, run_job
from ..launching.slurm import StepError, batch_script, in_allocation, run_steps, step_command, submit
from ..steptrace import TRACE_VARIABLE
from .files import FilePath
from .jobs import JOB_DEFAULTS, JobOptions, check_limits, demands_for, make_job, placements_for
from .options import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..launching.demands import Demands

__all__ = ["launch"]


@takes(JobOptions, JOB_DEFAULTS)
def launch(
    plan: FilePath,
    script: FilePath,
    arguments: Sequence[str] = (),
    *,
    local: bool = False,
    hosts: Sequence[str] | None = None,
    hostfile: FilePath | None = None,
    slurm: bool = False,
    checkpoints: FilePath | None = None,
    edited: bool = False,
    device: str | None = None,
    trace: FilePath | None = None,
    dry_run: bool = False,
    show: Callable[[str], None] | None = None,
    **options: Unpack[JobOptions],
) -> str:
    """Run a script on all ranks of a plan, and wait until it ends; or submit it to Slurm.

    ``local``, ``hosts``, ``hostfile`` or ``slurm`` says where the ranks run.  If none of them is given, a process that Slurm,
    mpirun or another launcher started as a rank joins its job as this rank; inside an allocation of Slurm, the ranks run as a step
    of ``srun``; otherwise they run on this machine.

    Call this function from the main thread, which receives Ctrl-C.  The script gets its rank and its plan from
    :func:`autoddl.launched`.

    Args:
        plan, script: Paths of the plan file and of the script, the same on every host.
        arguments: Command-line arguments of the script.
        local: Start all ranks on this machine, even inside a job of Slurm or mpirun.
        hosts: Host of each node, in the order of the plan's nodes; ssh connects to them.
        hostfile: A file with one line ``host [slots=N]`` per node, instead of ``hosts``.
        slurm: Write a batch script, submit it to Slurm, and return without waiting.
        checkpoints: A folder that is passed to the script, which resumes from the latest checkpoint there.
        edited: Accept a plan that was edited after planning.
        device: ``"cpu"`` runs a plan for GPUs on CPU ranks, with wider types in place of half precision; by default ranks compute
            on the devices of the plan.
        trace: Record where the time of a step goes on every rank, and write it to this file on the host of rank 0, beside the
            predicted step, as a Chrome trace (JSON, for Perfetto). The step is the fourth one of a trainer of
            ``autoddl.launched().trainer``, or the fourth ``train_step`` of a module of :func:`autoddl.apply`.
        dry_run: Describe the job without running it.
        show: A function that is called with each line that a rank prints; by default the lines are printed.
        options: see `JobOptions`.

    Returns:
        A description of the job: its ranks, hosts and commands.  With ``slurm``, the number of the job and the path of the batch
        script, or the batch script if ``dry_run``.  In an allocation, the command of the step.  Of a job that another launcher
        started, only rank 0 describes its part; for other ranks the text is empty.

    Raises:
        UserError: If the plan, the script or a host is missing, malformed or does not fit the plan.
        RankError: If a rank or a host failed more than ``max_restarts`` times.
        StepError: If a step of Slurm failed more than ``max_restarts`` times.
        Interrupted: If SIGINT, SIGTERM or SIGHUP was received; all ranks have ended.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path, script = os.path.join(folder, "plan.json"), os.path.join(folder, "train.py")
    ...     _ = open(script, "w").write("print('trained')")
    ...     autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8).save(path)
    ...     text = autoddl.launch(path, script, local=True, dry_run=True)
    ...     batch = autoddl.launch(path, script, slurm=True, slurm_options=["--partition=cpu"], dry_run=True)
    >>> text.split()[:2], "#SBATCH --partition=cpu" in batch.splitlines()
    (['2', 'ranks'], True)
    """
    job_options: dict[str, Any] = dict(options)
    slurm_options, on_urgent = job_options.pop("slurm_options"), job_options.pop("on_urgent") or _do_nothing
    is_place_given = _is_place_given(local, hosts, hostfile, slurm)
    if slurm_options and not slurm:
        raise UserError("slurm_options is for slurm=True")
    check_limits(checkpoints, options)
    if trace is not None:
        job_options["environment"] = {**(job_options["environment"] or {}), TRACE_VARIABLE: os.path.abspath(trace)}
    demands = demands_for(plan, script, edited, device, options["with_oneflow"])
    job_of = functools.partial(
        make_job, plan, script, demands, arguments=arguments, edited=edited, checkpoints=checkpoints
    )
    member = None if is_place_given else find_membership(os.environ)
    if member is not None:
        return _join(job_of, job_options, demands, member, dry_run, show or write_line, on_urgent)
    if slurm:
        _check_devices(demands, options["force"])
        return _submit(job_of((), **job_options), slurm_options, dry_run)
    if not is_place_given and in_allocation(os.environ):
        return _run_as_step(job_of((), **job_options), dry_run)
    job = job_of(placements_for(hosts, hostfile, demands, options["force"]), **job_options)
    if not dry_run:
        run_job(job, show or write_line, write_message, on_urgent=on_urgent)
    return describe(job)


def _do_nothing() -> None:
    """Do nothing at the second Ctrl-C."""


def _is_place_given(local: bool, hosts: Sequence[str] | None, hostfile: FilePath | None, slurm: bool) -> bool:
    """Return whether an argument says where the ranks run.

    Raises:
        UserError: If several do.
    """
    places = {"local": local, "hosts": hosts, "hostfile": hostfile, "slurm": slurm}
    given = [name for name, value in places.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} exclude each other; give one of them")
    return bool(given)


def _check_devices(demands: Demands, force: bool) -> None:
    """Check the GPUs that the plan is for before Slurm reserves them.

    Raises:
        UserError: If OneFlow or the plan's precision cannot run on them, unless ``force`` is given and it might.
    """
    for fault in plan_faults(demands) if demands.on_gpus else ():
        if not fault.is_warning and not (force and fault.can_be_forced):
            raise UserError(fault.text)
        write_message(f"{fault.text}; continuing anyway")


def _submit(job: Job, slurm_options: Sequence[str], dry_run: bool) -> str:
    """Submit a job to Slurm, and return its number and the path of the batch script; if ``dry_run``, the script itself."""
    script = batch_script(job, slurm_options)
    if dry_run:
        return script.rstrip("\n")
    number, path = submit(job, script)
    return f"job {number}: {path}"


def _run_as_step(job: Job, dry_run: bool) -> str:
    """Run a job as a step of this allocation, and return the command of the step.

    Raises:
        StepError: If the step failed more often than it may be restarted.
    """
    if not dry_run and (code := run_steps(job, write_message)):
        raise StepError(f"the step of Slurm ended with code {code}; its output names the rank that failed", code)
    return shlex.join(step_command(job))


def _join(
    job_of: Callable[..., Job],
    job_options: dict[str, Any],
    demands: Demands,
    member: Membership,
    dry_run: bool,
    show: Callable[[str], None],
    on_urgent: Callable[[], None],
) -> str:
    """Join a job that another launcher started, as one of its ranks.  That launcher restarts failed jobs."""
    check_membership(member, demands, force=job_options["force"])
    rank = demands.rank_on(member.rank)
    joining = {
        **job_options,
        "rendezvous": member.rendezvous,
        "local_ranks": {rank: member.local_rank},
        "max_restarts": 0,
    }
    job = job_of((Placement(Host(LOCALHOST), range(rank, rank + 1)),), **joining)
    if not dry_run:
        restart = os.environ.get("AUTODDL_RESTART", "0")
        first_restart = int(restart) if is_whole(restart) else 0
        try:
            run_job(job, show, write_message, first_restart=first_restart, on_urgent=on_urgent)
        except Interrupted as interrupted:
            raise Interrupted(interrupted.number, is_reported=True) from None
    return describe(job) if member.rank == 0 else ""
