"""Running a script on all ranks of a plan."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Union

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_RESTARTS, MAX_SECONDS

from ..launching.demands import Demands, check_script, demands_of
from ..launching.heartbeat import DEFAULT_HOST_TIMEOUT_S, HeartbeatTimes
from ..launching.hosts import LOCALHOST, Host, Placement, parse_hosts, place, read_hostfile, renumbered
from ..launching.job import Job
from ..launching.running import describe, run_job
from ..planfile import load_plan
from .options import takes

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["check_limits", "demands_for", "launch", "make_job", "placements_for"]

AnyPath = Union[str, "os.PathLike[str]"]


class JobOptions(TypedDict, total=False):
    """Of a job: its ranks, their hosts, and how long they may take.

    Attributes:
        max_restarts: how often the job is started anew after failures.
        environment: further variables of the ranks.
        log_dir: of a file for each rank; ``autoddl-logs/TIME`` by default.
        directory: where the ranks work.
        force: launch even if the number of hosts, their devices or their memory differ from the plan's.
        with_oneflow: False runs the script without checking or joining OneFlow.
        python, ssh, master_address: of remote hosts: their Python, the command that reaches them, the address of rank 0's host.
        stall_timeout_s: how long a rank waits for another one.
        start_timeout_s: how long the start may take until all ranks have joined.
        grace_s: how long ranks may take to end after Ctrl-C.
        host_timeout_s: how long a host may give no sign of life.
    """

    max_restarts: int
    environment: Mapping[str, str] | None
    log_dir: AnyPath | None
    directory: AnyPath
    force: bool
    with_oneflow: bool
    python: str
    ssh: str
    master_address: str | None
    stall_timeout_s: float
    start_timeout_s: float
    grace_s: float
    host_timeout_s: float


_JOB_DEFAULTS: Mapping[str, Any] = {
    **{
        "max_restarts": 0,
        "directory": ".",
        "force": False,
        "with_oneflow": True,
        "python": sys.executable,
        "ssh": "ssh",
    },
    **{"stall_timeout_s": 60.0, "start_timeout_s": 180.0, "grace_s": 10.0, "host_timeout_s": DEFAULT_HOST_TIMEOUT_S},
}


@takes(JobOptions, _JOB_DEFAULTS)
def launch(
    plan: AnyPath,
    script: AnyPath,
    arguments: Sequence[str] = (),
    *,
    hosts: Sequence[str] | None = None,
    hostfile: AnyPath | None = None,
    checkpoints: AnyPath | None = None,
    edited: bool = False,
    dry_run: bool = False,
    show: Callable[[str], None] | None = None,
    **options: Unpack[JobOptions],
) -> str:
    """Run a script on all ranks of a plan, here or over ssh, to its end; from the main thread, which Ctrl-C interrupts.

    The script finds its rank and its plan by :func:`autoddl.launched`.  The command ``autoddl launch`` also writes batch scripts
    for Slurm, and joins a job that somebody else has started.

    Args:
        plan, script: files, on every host at the same place.
        arguments: of the script.
        hosts: one for each node of the plan, in its order; this machine by default.
        hostfile: the same, a line ``host [slots=N]`` for each.
        checkpoints: a folder, passed to the script, which resumes from what it finds there.
        edited: take a plan also if it was edited.
        dry_run: run nothing.
        show: takes lines of ranks; by default they go to standard output.
        options: see `JobOptions`.

    Returns:
        What was run, as text: ranks, hosts and commands.

    Raises:
        UserError: the plan, the script or a host is not what it should be.
        RankError: a rank or a host failed once too often.
        Interrupted: SIGINT, SIGTERM or SIGHUP came; all ranks have been ended.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path, script = os.path.join(folder, "plan.json"), os.path.join(folder, "train.py")
    ...     _ = open(script, "w").write("print('trained')")
    ...     autoddl.plan("mlp:64,64", cluster="local-cpu", devices_per_node=2, batch=8).save(path)
    ...     text = autoddl.launch(path, script, dry_run=True)
    >>> text.split()[:2]
    ['2', 'ranks']
    """
    asked: dict[str, Any] = dict(options)
    force, host_timeout_s, environment = (asked.pop(name) for name in ("force", "host_timeout_s", "environment"))
    waits = asked["stall_timeout_s"], asked["start_timeout_s"], asked["grace_s"], host_timeout_s
    check_limits(asked["max_restarts"], checkpoints, *waits)
    demands = demands_for(plan, script, edited)
    named = parse_hosts(",".join(hosts)) if hosts else read_hostfile(os.fspath(hostfile)) if hostfile else None
    job = make_job(
        plan,
        script,
        demands,
        placements_for(named, demands, force),
        arguments=tuple(arguments),
        is_edited=edited,
        environment=dict(environment or {}),
        checkpoints=checkpoints,
        heartbeat=HeartbeatTimes(host_timeout_s),
        forced=force,
        **asked,
    )
    if not dry_run:
        run_job(job, show or _write_line, _say)
    return describe(job)


def demands_for(plan: AnyPath, script: AnyPath, edited: bool) -> Demands:
    """What a plan demands of hosts, after a look at the script.

    Raises:
        UserError: the plan cannot be read, or the script is not there or does not fit.
    """
    loaded = load_plan(plan, edited)
    demands = demands_of(loaded)
    if not os.path.isfile(script):
        raise UserError(f"script {os.fspath(script)} does not exist")
    check_script(Path(script), loaded)
    return demands


def placements_for(hosts: Sequence[Host] | None, demands: Demands, force: bool) -> tuple[Placement, ...]:
    """The ranks of each host, of this machine where none are given.

    Raises:
        UserError: the hosts are not as many as the plan's nodes, or have not as many devices.
    """
    named = [Host(LOCALHOST)] if hosts is None else list(hosts)
    placements = place(named, demands.num_nodes, demands.devices_per_node, force=force)
    return tuple(renumbered(placements, demands.rank_on) if demands.devices else placements)


def make_job(
    plan: AnyPath,
    script: AnyPath,
    demands: Demands,
    placements: Sequence[Placement],
    *,
    directory: AnyPath = ".",
    log_dir: AnyPath | None = None,
    checkpoints: AnyPath | None = None,
    ssh: str = "ssh",
    **more: Any,
) -> Job:
    """The job, with absolute paths; ``more`` are fields of :class:`autoddl.launching.job.Job`.

    Raises:
        UserError: ``ssh`` is no command.
    """
    return Job(
        plan=Path(plan).absolute(),
        script=Path(script).absolute(),
        demands=demands,
        placements=tuple(placements),
        directory=Path(directory).absolute(),
        log_dir=Path(log_dir or _default_log_dir()).absolute(),
        checkpoints=Path(checkpoints).absolute() if checkpoints else None,
        ssh=_words(ssh),
        **more,
    )


def check_limits(
    max_restarts: int,
    checkpoints: AnyPath | None,
    stall_timeout_s: float,
    start_timeout_s: float,
    grace_s: float,
    host_timeout_s: float,
) -> None:
    """Refuse numbers that are out of range, and a file in place of a folder.

    Raises:
        UserError: naming it.
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
    """A folder of its own for every job; the ranks of a job that Slurm starts find the same one."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"autoddl-logs/slurm-{job}" if job else time.strftime(f"autoddl-logs/%Y%m%d-%H%M%S-{os.getpid()}")


def _words(ssh: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(ssh))
    except ValueError as error:
        raise UserError(f"ssh {ssh!r} cannot be read: {error}") from None
    if not words:
        raise UserError("ssh is empty, should be a command")
    return words


def _write_line(line: str) -> None:
    # In one piece: ranks that joined share a terminal.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"autoddl: {' '.join(text.split())}\n")
    sys.stderr.flush()
