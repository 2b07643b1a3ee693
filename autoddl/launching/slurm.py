"""Slurm: a batch script for a plan, its submission, and the step that it runs.

The batch script holds what the job asks of the cluster and one command, ``autoddl launch`` again: inside the allocation that
starts a step with ``srun``, each task of which joins as one rank (:mod:`.joining`), and watches the step. Slurm ends all tasks
when one fails.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autoddl.costmodel.documents import write_atomically
from autoddl.costmodel.errors import UserError

from .interrupts import Interrupted, Interrupts
from .job import Job

__all__ = ["batch_script", "in_allocation", "launch_command", "run_steps", "step_command", "submit"]

# As for supervisors: a folder "autoddl" in the working directory must not hide the package.
_START = "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.__main__ import main; sys.exit(main())"
_REFUSED = 2
_TICK_SECONDS = 0.1


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in an allocation of Slurm's, in its batch script or in a shell."""
    return "SLURM_JOB_ID" in environ


def launch_command(job: Job, *, max_restarts: int) -> list[str]:
    """The command line that launches this job from wherever it is started: inside an allocation, or as a rank."""
    options = {
        "--chdir": job.directory,
        "--log-dir": job.log_dir,
        "--checkpoints": job.checkpoints,
        "--master-address": job.master_address,
        "--stall-timeout": f"{job.stall_timeout_s:g}",
        "--start-timeout": f"{job.start_timeout_s:g}",
        "--grace": f"{job.grace_s:g}",
        "--max-restarts": max_restarts,
    }
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--env={name}={value}" for name, value in job.environment.items()]
    flags = (("--edited", job.is_edited), ("--force", job.forced), ("--without-oneflow", not job.with_oneflow))
    words += [name for name, given in flags if given]
    return [job.python, "-c", _START, "launch", str(job.plan), str(job.script), *words, "--", *job.arguments]


def batch_script(job: Job, options: Sequence[str]) -> str:
    """The script for ``sbatch``; ``options`` are further ones of sbatch's, as ``--partition=gpu``.

    Raises:
        UserError: an option is none, or holds a line break, which would end its line in the script.
    """
    demands = job.demands
    asked = [
        f"--job-name=autoddl-{job.script.stem}",
        f"--nodes={demands.num_nodes}",
        f"--ntasks-per-node={demands.devices_per_node}",
        *([f"--gpus-per-node={demands.devices_per_node}"] if demands.on_gpus else []),
        f"--output={job.log_dir}/slurm-%j.out",
    ]
    for option in options:
        if not option.startswith("-"):
            raise UserError(
                f"--slurm-option {option!r} should begin with a dash, such as --slurm-option=--partition=gpu"
            )
    for option in [*asked, *options]:
        if len(option.splitlines()) > 1:
            raise UserError(f"sbatch option {option!r} holds a line break")
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in [*asked, *options])]
    lines.append("# Slurm opens its output file before anything here runs, so the folder has to be there:")
    lines.append(f"# mkdir -p {shlex.quote(str(job.log_dir))}")
    command = shlex.join(launch_command(job, max_restarts=job.max_restarts))
    return "\n".join([*lines, "", f"exec {command}", ""])


def _quoted(option: str) -> str:
    """An option in a line of #SBATCH, where quotes work as in a shell; plain where nothing needs them."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else option


def submit(job: Job, script: str) -> tuple[str, Path]:
    """Give a batch script to ``sbatch``; the job's number, and where the script was kept.

    Raises:
        UserError: there is no sbatch, or it refuses.
    """
    job.log_dir.mkdir(parents=True, exist_ok=True)
    path = job.log_dir / "launch.sbatch"
    write_atomically(path, script)
    try:
        done = subprocess.run(["sbatch", "--parsable", str(path)], capture_output=True, text=True)
    except FileNotFoundError:
        raise UserError(f"there is no sbatch here; the script is in {path}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"sbatch refuses {path}: {said}")
    return done.stdout.strip().partition(";")[0], path


def step_command(job: Job) -> list[str]:
    """The step of an allocation: ranks in the plan's order, node by node, each of them joining."""
    demands = job.demands
    return [
        "srun",
        f"--nodes={demands.num_nodes}",
        f"--ntasks={demands.num_ranks}",
        f"--ntasks-per-node={demands.devices_per_node}",
        "--distribution=block:block",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        "--input=none",
        "--unbuffered",
        *launch_command(job, max_restarts=0),
    ]


def run_steps(job: Job, say: Callable[[str], None]) -> int:
    """Run the job as a step of this allocation, again after a failure as often as the user allows; the exit code.

    Raises:
        UserError: there is no srun. Interrupted: SIGINT, SIGTERM or SIGHUP came.
    """
    with Interrupts() as interrupts:
        for attempt in range(job.max_restarts + 1):
            code = _run_step(step_command(job), {**os.environ, "AUTODDL_RESTART": str(attempt)}, interrupts)
            if code in (0, _REFUSED):
                return code
            if attempt == job.max_restarts:
                return 1
            say(f"the step ended with code {code}; starting again ({attempt + 1} of {job.max_restarts})")
    raise AssertionError("the last attempt returns")


def _run_step(command: Sequence[str], environment: Mapping[str, str], interrupts: Interrupts) -> int:
    try:
        step = subprocess.Popen(command, env=environment, start_new_session=True)
    except FileNotFoundError:
        raise UserError("this is an allocation of Slurm's (SLURM_JOB_ID is set), but there is no srun here") from None
    told = 0
    while step.poll() is None:
        if interrupts.count > told:
            told = interrupts.count
            step.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
        time.sleep(_TICK_SECONDS)
    if interrupts.number:
        raise Interrupted(interrupts.number)
    return step.returncode if step.returncode >= 0 else 128 - step.returncode
