"""``autoddl launch``: run a script on all ranks of a plan, on this machine, over ssh or with Slurm, or join a job as one rank."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from autoddl.costmodel.suggestions import did_you_mean

from ..launching.heartbeat import DEFAULT_HOST_TIMEOUT_S
from ._options import add_connection, add_edited, add_log_dir, add_plan, variables_option

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script on all ranks of a plan: on this machine, over ssh or with Slurm (requires OneFlow)",
        usage="autoddl launch PLAN.json SCRIPT.py [options] [-- ARGUMENT ...]",
        description="Run a script on all ranks of a plan, on this machine or on the given hosts. If the command itself runs inside "
        "a job of Slurm or mpirun, or if RANK and WORLD_SIZE are set, it joins the job as one rank. In the script, "
        "autoddl.launched() returns the rank and the plan. The exit code is 1 if a rank fails.",
    )
    add_plan(parser)
    parser.add_argument(
        "script",
        metavar="SCRIPT.py",
        help="the script that every rank runs; plan and script need the same path on every host",
    )
    _add_place_options(parser)
    _add_job_options(parser)
    _add_remote_options(parser)
    _add_time_limits(parser)
    add_edited(parser)
    parser.set_defaults(arguments=[], python=sys.executable, ssh="ssh")
    _take_arguments_after_dashes(parser)


def _add_place_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("place of the ranks").add_mutually_exclusive_group()
    group.add_argument(
        "--local", action="store_true", help="start all ranks on this machine, even inside a job of Slurm or mpirun"
    )
    group.add_argument(
        "--hosts",
        metavar="H1,H2,...",
        help="start the ranks over ssh, on one host per node, in the order of the plan's nodes",
    )
    group.add_argument(
        "--hostfile", metavar="FILE", help="file with one line `host [slots=N]` per node, instead of --hosts"
    )
    group.add_argument("--slurm", action="store_true", help="write a batch script and submit it to Slurm")


def _add_job_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("job")
    group.add_argument(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="maximum number of restarts after failures (default: %(default)s)",
    )
    group.add_argument(
        "--checkpoints",
        metavar="DIR",
        help="folder that is passed to the script, which resumes from the latest checkpoint there",
    )
    add_log_dir(group)
    group.add_argument("--chdir", metavar="DIR", help="working directory of the ranks (default: the current directory)")
    group.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="environment variable of the ranks; without a value, that of this environment; repeatable",
    )
    group.add_argument(
        "--device",
        metavar="TYPE",
        help="type of device that the ranks compute on: 'cpu' runs a plan for GPUs on CPU ranks (default: that of the plan)",
    )
    group.add_argument(
        "--force",
        action="store_true",
        help="launch even if the number of hosts, their devices or their memory differ from those of the plan",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="record where the time of the fourth step goes on every rank, beside the predicted step, in a Chrome trace; "
        "rank 0 writes it, and prints the largest differences",
    )
    group.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
    group.add_argument(
        "--without-oneflow",
        action="store_true",
        help="run the script without checking OneFlow and without joining the ranks in OneFlow",
    )


def _add_remote_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("remote hosts")
    add_connection(group)
    group.add_argument(
        "--slurm-option",
        action="append",
        default=[],
        metavar="--OPTION=VALUE",
        help="option of sbatch, with --slurm; repeatable",
    )


def _add_time_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("time limits, in seconds")
    group.add_argument(
        "--stall-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="maximum time that a rank waits for another rank (default: %(default)g)",
    )
    group.add_argument(
        "--start-timeout",
        type=float,
        default=180.0,
        metavar="S",
        help="maximum time until all ranks have joined (default: %(default)g)",
    )
    group.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="time that ranks have to end after Ctrl-C (default: %(default)g)",
    )
    group.add_argument(
        "--host-timeout",
        type=float,
        default=DEFAULT_HOST_TIMEOUT_S,
        metavar="S",
        help="maximum time without a sign of life from a host (default: %(default)g)",
    )


def _take_arguments_after_dashes(parser: argparse.ArgumentParser) -> None:
    """Pass all words after ``--`` to the script, even those that look like options of this command."""
    parse = parser.parse_known_args

    def parse_before(args: Any = None, namespace: Any = None) -> Any:
        words: list[str] = list(args)
        num_own = words.index("--") if "--" in words else len(words)
        parsed, unknown = parse(words[:num_own], namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions)
            parser.error(
                f"{unknown[0]!r} is not an option of launch; the script's own arguments come after --{hint and '; ' + hint}"
            )
        parsed.arguments = words[num_own + 1 :]
        return parsed, unknown

    parser.parse_known_args = parse_before  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> int:
    """Launch the script and return the exit code."""
    from ..api.running import launch
    from ..launching.interrupts import Interrupted
    from ..launching.joining import SharedError
    from ..launching.output import write_message
    from ..launching.slurm import StepError

    try:
        text = launch(
            arguments.plan,
            arguments.script,
            arguments.arguments,
            local=arguments.local,
            hosts=arguments.hosts.split(",") if arguments.hosts else None,
            hostfile=arguments.hostfile,
            slurm=arguments.slurm,
            slurm_options=arguments.slurm_option,
            max_restarts=arguments.max_restarts,
            checkpoints=arguments.checkpoints,
            log_dir=arguments.log_dir,
            directory=arguments.chdir or ".",
            environment=variables_option(arguments.env),
            device=arguments.device,
            force=arguments.force,
            trace=arguments.trace,
            dry_run=arguments.dry_run,
            with_oneflow=not arguments.without_oneflow,
            python=arguments.python,
            ssh=arguments.ssh,
            master_address=arguments.master_address,
            stall_timeout_s=arguments.stall_timeout,
            start_timeout_s=arguments.start_timeout,
            grace_s=arguments.grace,
            host_timeout_s=arguments.host_timeout,
            edited=arguments.edited,
            on_urgent=_discard_output,
        )
    except Interrupted as interrupted:
        if not interrupted.is_reported:
            write_message(f"interrupted by {interrupted}; all ranks have been ended")
        return 128 + interrupted.number
    except (SharedError, StepError) as error:  # reported by rank 0, or in the output of the step
        return error.exit_code
    if text and (arguments.dry_run or arguments.slurm):
        print(text)
    return 0


def _discard_output() -> None:
    """Discard all further output, including output that the main thread is waiting to write."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # standard output is not a file
        os.dup2(null, sys.stdout.fileno())
    os.close(null)
