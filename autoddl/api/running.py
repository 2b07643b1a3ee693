"""Runs a script on all ranks of a plan."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_RESTARTS, MAX_SECONDS

from ..launching.demands import Demands, check_script, demands_of
from ..launching.heartbeat import DEFAULT_HOST_TIMEOUT_S, HeartbeatTimes
from ..launching.hosts import LOCALHOST, Host, Placement, parse_hosts, place, read_hostfile, renumbered
from ..launching.job import Job
from ..launching.running import describe, run_job
from ..planfile import load_plan
from .files import FilePath
from .options import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["check_limits", "demands_for", "launch", "make_job", "placements_for", "write_line", "write_message"]


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
    host_timeout_s: float


#: Defaults of `JobOptions`; None for options that are not listed.
_JOB_DEFAULTS: Mapping[str, Any] = {
    "max_restarts": 0,
    "directory": ".",
    "force": False,
    "with_oneflow": True,
    "python": sys.executable,
    "ssh": "ssh",
    "stall_timeout_s": 60.0,
    "start_timeout_s": 180.0,
    "grace_s": 10.0,
    "host_timeout_s": DEFAULT_HOST_TIMEOUT_S,
}


@takes(JobOptions, _JOB_DEFAULTS)
def launch(
    plan: FilePath,
    script: FilePath,
    arguments: Sequence[str] = (),
    *,
    hosts: Sequence[str] | None = None,
    hostfile: FilePath | None = None,
    checkpoints: FilePath | None = None,
    edited: bool = False,
    dry_run: bool = False,
    show: Callable[[str], None] | None = None,
    **options: Unpack[JobOptions],
) -> str:
    """Run a script on all ranks of a plan, on this machine or on other hosts over ssh, and wait until it ends.

    Call this function from the main thread, which receives Ctrl-C.  The script gets its rank and its plan from
    :func:`autoddl.launched`.  The command ``autoddl launch`` can also submit a job to Slurm, and join a job that another launcher
    has started.

    Args:
        plan, script: Paths of the plan file and of the script, the same on every host.
        arguments: Command-line arguments of the script.
        hosts: Host of each node, in the order of the plan's nodes; by default this machine.
        hostfile: A file with one line ``host [slots=N]`` per node, instead of ``hosts``.
        checkpoints: A folder that is passed to the script, which resumes from the latest checkpoint there.
        edited: Accept a plan that was edited after planning.
        dry_run: Describe the job without running it.
        show: A function that is called with each line that a rank prints; by default the lines are printed.
        options: see `JobOptions`.

    Returns:
        A description of the job: its ranks, hosts and commands.

    Raises:
        UserError: If the plan, the script or a host is missing, malformed or does not fit the plan.
        RankError: If a rank or a host failed more than ``max_restarts`` times.
        Interrupted: If SIGINT, SIGTERM or SIGHUP was received; all ranks have ended.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path, script = os.path.join(folder, "plan.json"), os.path.join(folder, "train.py")
    ...     _ = open(script, "w").write("print('trained')")
    ...     autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8).save(path)
    ...     text = autoddl.launch(path, script, dry_run=True)
    >>> text.split()[:2]
    ['2', 'ranks']
    """
    job_options: dict[str, Any] = dict(options)
    force, host_timeout_s, environment = (job_options.pop(name) for name in ("force", "host_timeout_s", "environment"))
    check_limits(
        job_options["max_restarts"],
        checkpoints,
        stall_timeout_s=job_options["stall_timeout_s"],
        start_timeout_s=job_options["start_timeout_s"],
        grace_s=job_options["grace_s"],
        host_timeout_s=host_timeout_s,
    )
    demands = demands_for(plan, script, edited)
    parsed_hosts = None
    if hosts:
        parsed_hosts = parse_hosts(",".join(hosts))
    elif hostfile:
        parsed_hosts = read_hostfile(os.fspath(hostfile))
    job = make_job(
        plan,
        script,
        demands,
        placements_for(parsed_hosts, demands, force),
        arguments=tuple(arguments),
        is_edited=edited,
        environment=dict(environment or {}),
        checkpoints=checkpoints,
        heartbeat=HeartbeatTimes(host_timeout_s),
        forced=force,
        **job_options,
    )
    if not dry_run:
        run_job(job, show or write_line, write_message)
    return describe(job)


def demands_for(plan: FilePath, script: FilePath, edited: bool) -> Demands:
    """Check the script, and return what a plan demands of hosts: nodes, devices, memory and ranks.

    Raises:
        UserError: If the plan cannot be read, or the script does not exist or does not fit the plan.
    """
    loaded = load_plan(plan, edited)
    demands = demands_of(loaded)
    if not os.path.isfile(script):
        raise UserError(f"script {os.fspath(script)} does not exist")
    check_script(Path(script), loaded)
    return demands


def placements_for(hosts: Sequence[Host] | None, demands: Demands, force: bool) -> tuple[Placement, ...]:
    """Return the ranks of each host; without ``hosts``, all ranks are placed on this machine.

    Raises:
        UserError: If the number of hosts or of their devices differs from that of the plan.
    """
    used_hosts = [Host(LOCALHOST)] if hosts is None else list(hosts)
    placements = place(used_hosts, demands.num_nodes, demands.devices_per_node, force=force)
    return tuple(renumbered(placements, demands.rank_on) if demands.devices else placements)


def make_job(
    plan: FilePath,
    script: FilePath,
    demands: Demands,
    placements: Sequence[Placement],
    *,
    directory: FilePath = ".",
    log_dir: FilePath | None = None,
    checkpoints: FilePath | None = None,
    ssh: str = "ssh",
    **more: Any,
) -> Job:
    """Return the job, with absolute paths; ``more`` are further fields of :class:`autoddl.launching.job.Job`.

    Raises:
        UserError: If ``ssh`` is not a command.
    """
    return Job(
        plan=Path(plan).absolute(),
        script=Path(script).absolute(),
        demands=demands,
        placements=tuple(placements),
        directory=Path(directory).absolute(),
        log_dir=Path(log_dir or _default_log_dir()).absolute(),
        checkpoints=Path(checkpoints).absolute() if checkpoints else None,
        ssh=_command_words(ssh),
        **more,
    )


def check_limits(
    max_restarts: int,
    checkpoints: FilePath | None,
    *,
    stall_timeout_s: float,
    start_timeout_s: float,
    grace_s: float,
    host_timeout_s: float,
) -> None:
    """Check the time limits, the number of restarts and the folder of checkpoints.

    Raises:
        UserError: If a number is out of range, or ``checkpoints`` is a file; the message names the argument.
    """
    if not 0 <= max_restarts <= MAX_RESTARTS:
        raise UserError(f"max_restarts is {max_restarts}, should be from 0 to {MAX_RESTARTS}")
    seconds = {
        "stall_timeout": stall_timeout_s,
        "start_timeout": start_timeout_s,
        "grace": grace_s,
        "host_timeout": host_timeout_s,
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


def write_line(line: str) -> None:
    """Write a line of a rank to standard output."""
    # In one write: ranks that joined a job share a terminal, and `print` may write the end of the line separately.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def write_message(text: str) -> None:
    """Write a message of the launcher to standard error, as one line."""
    sys.stderr.write(f"autoddl: {' '.join(text.split())}\n")
    sys.stderr.flush()
