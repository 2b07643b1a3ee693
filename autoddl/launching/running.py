"""Running a job to its end: attempt after attempt, as often as the user allows."""

from __future__ import annotations

import shlex
import socket
from collections.abc import Callable

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_ranges
from autoddl.pipelines.runtime.failures import RankError

from .connection import supervisor_command
from .interrupts import Interrupts
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
    """Run a job; a rank that fails has the job started anew, up to ``job.max_restarts`` times.

    The script finds in ``AUTODDL_RESTART`` how many times that has happened, and goes on from its own last checkpoint
    (``AUTODDL_CHECKPOINTS``). What a rank refused as the user's fault would be refused again, so that is not tried.

    Args:
        show: takes lines of ranks for the terminal; ``say`` what the launcher itself has to say.
        first_restart: how often the job was started before, by somebody else.
        on_urgent: called when the user asks a second time to end; see `Interrupts`.

    Raises:
        UserError: a host cannot be reached, or has not what the job needs. RankError: a rank or a host failed once too often.
        Interrupted: SIGINT, SIGTERM or SIGHUP came.
    """
    output = RankOutput(job.log_dir, _host_names(job), show, say)
    with Interrupts(on_urgent) as interrupts:
        for attempt in range(job.max_restarts + 1):
            try:
                run_session(job, first_restart + attempt, output, interrupts, say)
                return
            except (RankError, HostError) as error:
                failure = _of_attempt(job, attempt, error)
                if isinstance(failure, UserError) or attempt == job.max_restarts:
                    raise failure from None
                say(f"{failure}; starting again ({attempt + 1} of {job.max_restarts})")


def _of_attempt(job: Job, attempt: int, error: RankError | HostError) -> RankError | HostError:
    """The error as it counts: a host that could be reached before has failed since, which is no fault of the user's."""
    if attempt > 0 and isinstance(error, HostError):
        return RankError(str(error), job.placements[0].ranks[0], None)
    return error


def _host_names(job: Job) -> dict[int, str]:
    """The host of each rank, as it is shown: nothing where there is only one."""
    if job.is_here_alone:
        return {rank: "" for placement in job.placements for rank in placement.ranks}
    own = socket.gethostname()
    return {
        rank: own if placement.host.is_local else placement.host.address
        for placement in job.placements
        for rank in placement.ranks
    }


def describe(job: Job) -> str:
    """What `run_job` would do, as text."""
    script = shlex.join([str(job.script), *job.arguments])
    lines = [f"{job.num_ranks} ranks of {script}", f"in {job.directory}"]
    lines += [f"with {name}={shlex.quote(value)}" for name, value in job.rank_variables(0).items()]
    for placement in job.placements:
        ranks = format_ranges(placement.ranks)
        command = supervisor_command(placement.host, job.python, job.python, job.ssh, job.beats)
        lines += [f"host {placement.host.name}: ranks {ranks}", f"  {shlex.join(command)}"]
    return "\n".join(lines)
