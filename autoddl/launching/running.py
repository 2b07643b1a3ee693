"""Running a job to its end, with restarts after failures."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_ranges
from autoddl.pipelines.runtime.ranks.failures import RankError

from .connection import supervisor_command
from .interrupts import InterruptCounter
from .job import Job
from .output import RankOutput
from .session import HostError, run_session

__all__ = ["describe", "run_job"]


def run_job(
    job: Job,
    show: Callable[[str], None],
    say: Callable[[str], None],
    *,
    first_restart: int = 0,
    on_urgent: Callable[[], None] = lambda: None,
) -> None:
    """Run a job. If a rank fails, the job is restarted, up to ``job.max_restarts`` times.

    ``AUTODDL_RESTART`` passes the number of restarts to the script, which resumes from the latest checkpoint in
    ``AUTODDL_CHECKPOINTS``. A user's error is not retried: it would occur again.

    Args:
        job: what to run.
        show: prints a line of a rank's output.
        say: prints a message of the launcher.
        first_restart: number of times that another launcher has restarted the job before.
        on_urgent: called at the user's second request to end; see `InterruptCounter`.

    Raises:
        UserError: a host cannot be reached, or does not meet the job's requirements.
        RankError: a rank or a host failed, and no restart is left.
        Interrupted: SIGINT, SIGTERM or SIGHUP was received.
    """
    output = RankOutput(job.log_dir, _host_names(job), show, say)
    with InterruptCounter(on_urgent) as interrupts:
        for attempt in range(job.max_restarts + 1):
            try:
                run_session(job, first_restart + attempt, output, interrupts, say)
                return
            except (RankError, HostError) as error:
                failure = _reported_error(job, attempt, error)
                if isinstance(failure, UserError) or attempt == job.max_restarts:
                    raise failure from None
                say(f"{failure}; starting again ({attempt + 1} of {job.max_restarts})")


def _reported_error(job: Job, attempt: int, error: RankError | HostError) -> RankError | HostError:
    """The error to report: a host that could be reached before has failed since, which is not a user's error."""
    if attempt > 0 and isinstance(error, HostError):
        return RankError(str(error), job.placements[0].ranks[0], None)
    return error


def _host_names(job: Job) -> dict[int, str]:
    """The host of each rank, as it is shown; "" if there is only one host."""
    if job.is_local:
        return {rank: "" for placement in job.placements for rank in placement.ranks}
    own = socket.gethostname()
    return {
        rank: own if placement.host.is_local else placement.host.address
        for placement in job.placements
        for rank in placement.ranks
    }


def describe(job: Job) -> str:
    """A description of what :func:`run_job` would do."""
    script = shlex.join([str(job.script), *job.arguments])
    lines = [f"{job.num_ranks} ranks of {script}", f"in {job.directory}"]
    lines += [f"with {name}={shlex.quote(value)}" for name, value in job.rank_variables(0).items()]
    for placement in job.placements:
        ranks = format_ranges(placement.ranks)
        command = supervisor_command(placement.host, job.python, job.python, job.ssh, job.heartbeat)
        lines += [f"host {placement.host.name}: ranks {ranks}", f"  {shlex.join(command)}"]
    return "\n".join(lines)
