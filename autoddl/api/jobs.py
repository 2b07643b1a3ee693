"""The options of `launch`, and the job that they describe."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_RESTARTS, MAX_SECONDS

from ..executors import check_workload
from ..launching.demands import Demands, check_script, demands_of
from ..launching.heartbeat import DEFAULT_HOST_TIMEOUT_S, HeartbeatTimes
from ..launching.hosts import LOCALHOST, Host, Placement, parse_hosts, place, read_hostfile, renumbered
from ..launching.job import Job
from ..planfile import load_plan
from .files import FilePath

__all__ = ["JOB_DEFAULTS", "JobOptions", "check_limits", "demands_for", "make_job", "placements_for"]


class JobOptions(TypedDict, total=False):
    """Options of a job: its ranks, their hosts and time limits.

    Attributes:
        max_restarts: Maximum number of restarts of the job after failures.
        environment: Additional environment variables of the ranks.
        log_dir: Folder of the log files, one per rank; by default ``autoddl-logs/TIME``.
        directory: Working directory of the ranks.
        force: Launch even if the number of hosts, their devices or their memory differ from those of the plan.
        with_oneflow: If False, run the script without checking OneFlow and without joining the ranks in OneFlow.
        python: Path of Python on remote hosts; by default the path of this Python.
        ssh: Command that connects to remote hosts, with its options.
        master_address: Address of the host of rank 0; by default the address at which ssh reached the host.
        stall_timeout_s: Maximum time that a rank waits for another rank, in seconds.
        start_timeout_s: Maximum time until all ranks have joined, in seconds.
        grace_s: Time that ranks have to end after Ctrl-C, in seconds.
        slurm_options: Options of ``sbatch``, such as ``--partition=gpu``, for a job that is submitted to Slurm.
        on_urgent: A function that is called at the second Ctrl-C, in the signal handler, since the main thread may be blocked by
            its output.
        host_timeout_s: Maximum time without a sign of life from a host, in seconds.
    """

    max_restarts: int
    environment: Mapping[str, str] | None
    log_dir: FilePath | None
    directory: FilePath
    force: bool
    with_oneflow: bool
    python: str
    ssh: str
    master_address: str | None
    stall_timeout_s: float
    start_timeout_s: float
    grace_s: float
    slurm_options: Sequence[str]
    on_urgent: Callable[[], None] | None
    host_timeout_s: float


#: Defaults of `JobOptions`; None for options that are not listed.
JOB_DEFAULTS: Mapping[str, Any] = {
    "max_restarts": 0,
    "directory": ".",
    "force": False,
    "with_oneflow": True,
    "python": sys.executable,
    "ssh": "ssh",
    "stall_timeout_s": 60.0,
    "start_timeout_s": 180.0,
    "grace_s": 10.0,
    "slurm_options": (),
    "host_timeout_s": DEFAULT_HOST_TIMEOUT_S,
}


def demands_for(plan: FilePath, script: FilePath, edited: bool, device: str | None, with_oneflow: bool) -> Demands:
    """Check the script, and return what a plan demands of hosts: nodes, devices, memory and ranks.

    Raises:
        UserError: If the plan cannot be read, or the script does not exist or does not fit the plan; if ``device`` is not a type of
            device of the plan; if the ranks of a worker would not get the GPUs of the plan; or if ranks do not execute the workload
            of the plan.
    """
    loaded = load_plan(plan, edited)
    check_workload(loaded.workload)
    demands = demands_of(loaded, device)
    if demands.stray_worker and not with_oneflow:
        raise UserError(
            f"{demands.stray_worker}; launch can change that only for ranks that it joins in OneFlow: leave out --without-oneflow, "
            "or plan with workers that have all devices of each of their nodes"
        )
    if not os.path.isfile(script):
        raise UserError(f"script {os.fspath(script)} does not exist")
    check_script(Path(script), loaded)
    return demands


def placements_for(
    hosts: Sequence[str] | None, hostfile: FilePath | None, demands: Demands, force: bool
) -> tuple[Placement, ...]:
    """Return the ranks of each host; without ``hosts`` and ``hostfile``, all ranks are placed on this machine.

    Raises:
        UserError: If a host or the file is malformed, or the number of hosts or of their devices differs from that of the plan.
    """
    used_hosts = [Host(LOCALHOST)]
    if hosts:
        used_hosts = list(parse_hosts(",".join(hosts)))
    elif hostfile:
        used_hosts = list(read_hostfile(os.fspath(hostfile)))
    placements = place(used_hosts, demands.num_nodes, demands.devices_per_node, force=force)
    return tuple(renumbered(placements, demands.rank_on) if demands.devices else placements)


def make_job(
    plan: FilePath | None,
    script: FilePath,
    demands: Demands,
    placements: Sequence[Placement],
    *,
    arguments: Sequence[str],
    edited: bool,
    directory: FilePath,
    log_dir: FilePath | None,
    checkpoints: FilePath | None,
    environment: Mapping[str, str] | None,
    ssh: str,
    force: bool,
    host_timeout_s: float,
    **more: Any,
) -> Job:
    """Return the job, with absolute paths; ``more`` are further fields of :class:`autoddl.launching.job.Job`.

    Raises:
        UserError: If ``ssh`` is not a command.
    """
    return Job(
        plan=None if plan is None else Path(plan).absolute(),
        script=Path(script).absolute(),
        demands=demands,
        placements=tuple(placements),
        arguments=tuple(arguments),
        is_edited=edited,
        directory=Path(directory).absolute(),
        log_dir=Path(log_dir or _default_log_dir()).absolute(),
        checkpoints=Path(checkpoints).absolute() if checkpoints else None,
        environment=dict(environment or {}),
        ssh=_command_words(ssh),
        forced=force,
        heartbeat=HeartbeatTimes(host_timeout_s),
        **more,
    )


def check_limits(checkpoints: FilePath | None, options: JobOptions) -> None:
    """Check the time limits, the number of restarts and the folder of checkpoints.

    Raises:
        UserError: If a number is out of range, or ``checkpoints`` is a file; the message names the argument.
    """
    max_restarts = options["max_restarts"]
    if not 0 <= max_restarts <= MAX_RESTARTS:
        raise UserError(f"max_restarts is {max_restarts}, should be from 0 to {MAX_RESTARTS}")
    seconds = {
        "stall_timeout": options["stall_timeout_s"],
        "start_timeout": options["start_timeout_s"],
        "grace": options["grace_s"],
        "host_timeout": options["host_timeout_s"],
    }
    for name, value in seconds.items():
        if not 0 < value <= MAX_SECONDS:
            raise UserError(f"{name} is {value:g}, should be more than 0 and at most {MAX_SECONDS:g} seconds")
    if checkpoints and os.path.exists(checkpoints) and not os.path.isdir(checkpoints):
        raise UserError(f"checkpoints {os.fspath(checkpoints)} is a file, should be a folder")


def _default_log_dir() -> str:
    """Return a log folder that no other job uses, but that all ranks of a Slurm job share."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"autoddl-logs/slurm-{job}" if job else time.strftime(f"autoddl-logs/%Y%m%d-%H%M%S-{os.getpid()}")


def _command_words(ssh: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(ssh))
    except ValueError as error:
        raise UserError(f"ssh {ssh!r} cannot be read: {error}") from None
    if not words:
        raise UserError("ssh is empty, should be a command")
    return words
