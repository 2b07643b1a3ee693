"""Slurm: a batch script for a plan, its submission, and the step that it runs.

The batch script holds the job's resource requests and one command, ``autoddl launch``. Inside the allocation this command
starts a step with ``srun``, each task of which joins as one rank (:mod:`.joining`), and watches the step. Slurm ends all
tasks when one fails.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_atomically

from .interrupts import InterruptCounter, Interrupted
from .job import Job

__all__ = ["StepError", "batch_script", "in_allocation", "launch_command", "run_steps", "step_command", "submit"]

# As for supervisors: a folder "autoddl" in the working directory must not hide the package.
_START = "import sys; sys.path[:] = [p for p in sys.path if p]; from autoddl.__main__ import main; sys.exit(main())"
_REFUSED = 2
#: Variables of an allocation whose steps bind each task to GPUs of its own.
_GPU_BINDINGS = ("SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU")
#: Options of sbatch that set the order of tasks.
_DISTRIBUTION = re.compile(r"(?:--distribution|-m)(?![= ]*(?:block|\*))", re.IGNORECASE)
_TICK_SECONDS = 0.1
_SUBMIT_SECONDS = 120.0  # sbatch itself retries for some time if the controller does not answer
_STEP_END_SECONDS = 30.0  # how long Slurm may take to end a step, in addition to the ranks' own time


class StepError(RuntimeError):
    """A step of Slurm failed; the output of the step contains the error.

    Attributes:
        exit_code: 2 if the ranks refused their input, otherwise 1.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a Slurm allocation: in its batch script or in a shell."""
    return "SLURM_JOB_ID" in environ


def launch_command(job: Job, *, max_restarts: int) -> list[str]:
    """The command line that launches this job, inside an allocation or as a rank of a step."""
    options = {
        "--chdir": job.directory,
        "--log-dir": job.log_dir,
        "--checkpoints": job.checkpoints,
        "--master-address": job.master_address,
        "--stall-timeout": f"{job.stall_timeout_s:g}",
        "--start-timeout": f"{job.start_timeout_s:g}",
        "--grace": f"{job.grace_s:g}",
        "--host-timeout": f"{job.heartbeat.host_timeout_s:g}",
        "--max-restarts": max_restarts,
        "--device": None if job.demands.on_gpus else job.demands.device_type or None,
    }
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--env={name}={value}" for name, value in job.environment.items()]
    flags = (("--edited", job.is_edited), ("--force", job.forced), ("--without-oneflow", not job.with_oneflow))
    words += [name for name, given in flags if given]
    return [job.python, "-c", _START, "launch", str(job.plan), str(job.script), *words, "--", *job.arguments]


def batch_script(job: Job, options: Sequence[str]) -> str:
    """The script for ``sbatch``.

    Args:
        job: what to run.
        options: additional options of sbatch, such as ``--partition=gpu``.

    Raises:
        UserError: an option does not begin with a dash, or contains a line break, which would end its line in the script, or it
            numbers ranks otherwise than node by node.
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
            raise UserError(f"slurm_options: {option!r} should begin with a dash, such as --partition=gpu")
        if _DISTRIBUTION.match(option):
            raise UserError(
                f"slurm_options: {option!r} should be left out: a plan's ranks are numbered node by node (block)"
            )
    for option in [*asked, *options]:
        if len(option.splitlines()) > 1:
            raise UserError(f"sbatch option {option!r} contains a line break")
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in [*asked, *options])]
    lines.append("# Slurm opens its output file before this script runs, so the folder must exist:")
    lines.append(f"# mkdir -p {shlex.quote(str(job.log_dir))}")
    command = shlex.join(launch_command(job, max_restarts=job.max_restarts))
    return "\n".join([*lines, "", f"exec {command}", ""])


def _quoted(option: str) -> str:
    """An option for a line of #SBATCH, where quotes work as in a shell; without quotes if it needs none."""
    name, equals, value = option.partition("=")
    return f"{name}={shlex.quote(value)}" if equals else option


def submit(job: Job, script: str) -> tuple[str, Path]:
    """Submit a batch script with ``sbatch``; returns the job's number and the path of the script.

    Raises:
        UserError: sbatch is not installed, or refuses the script.
    """
    path = job.log_dir / "launch.sbatch"
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); give another log_dir=FOLDER") from None
    write_atomically(path, script)
    try:
        command = ["sbatch", "--parsable", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SUBMIT_SECONDS)
    except FileNotFoundError:
        raise UserError(f"there is no sbatch here; the script is in {path}") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sbatch has not answered within {_SUBMIT_SECONDS:g} s; the script is in {path}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise UserError(f"sbatch refuses {path}: {said}")
    return done.stdout.strip().partition(";")[0], path


def step_command(job: Job) -> list[str]:
    """The command of the step: ranks in the plan's order, node by node, each of them joining."""
    demands = job.demands
    return [
        "srun",
        f"--nodes={demands.num_nodes}",
        f"--ntasks={demands.num_ranks}",
        f"--ntasks-per-node={demands.devices_per_node}",
        "--distribution=block:block",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",
        # Each task sees all GPUs of the step on its node, even if the allocation asks for GPUs by task.
        *(["--gpu-bind=none"] if demands.on_gpus and any(name in os.environ for name in _GPU_BINDINGS) else []),
        "--input=none",
        "--unbuffered",
        *launch_command(job, max_restarts=0),
    ]


def run_steps(job: Job, say: Callable[[str], None]) -> int:
    """Run the job as a step of this allocation, with restarts after failures; returns the exit code.

    Raises:
        UserError: srun is not installed.
        Interrupted: SIGINT, SIGTERM or SIGHUP was received.
    """
    with InterruptCounter() as interrupts:
        for attempt in range(job.max_restarts + 1):
            environment = {**os.environ, "AUTODDL_RESTART": str(attempt)}
            code = _run_step(step_command(job), environment, interrupts, job.grace_s + _STEP_END_SECONDS)
            if code in (0, _REFUSED):
                return code
            if attempt == job.max_restarts:
                return 1
            say(f"the step ended with code {code}; starting again ({attempt + 1} of {job.max_restarts})")
    raise AssertionError("the last attempt returns")


def _run_step(
    command: Sequence[str], environment: Mapping[str, str], interrupts: InterruptCounter, patience_s: float
) -> int:
    """Run one step; after an interrupt it may take ``patience_s`` to end."""
    try:
        step = subprocess.Popen(command, env=environment, start_new_session=True)
    except FileNotFoundError:
        raise UserError("this is a Slurm allocation (SLURM_JOB_ID is set), but there is no srun here") from None
    forwarded, deadline = 0, float("inf")
    while step.poll() is None:
        if interrupts.count > forwarded:
            forwarded = interrupts.count
            deadline = time.monotonic() + patience_s
            step.send_signal(signal.SIGTERM if forwarded == 1 else signal.SIGKILL)
        elif time.monotonic() > deadline:
            step.kill()
        time.sleep(_TICK_SECONDS)
    if interrupts.number:
        raise Interrupted(interrupts.number)
    return step.returncode if step.returncode >= 0 else 128 - step.returncode
