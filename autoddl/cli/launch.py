"""``autoddl launch``: run a script on all ranks of a plan, here, over ssh, through Slurm, or as one rank of a started job."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.reading import is_whole
from autoddl.costmodel.suggestions import did_you_mean

from ..launching.heartbeat import DEFAULT_HOST_TIMEOUT_S
from ._options import add_edited

if TYPE_CHECKING:
    from ..launching.demands import Demands
    from ..launching.hosts import Placement
    from ..launching.job import Job
    from ..launching.joining import Membership

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script on all ranks of a plan: here, over ssh, through Slurm, or as one rank of a started job (needs OneFlow)",
        usage="autoddl launch PLAN.json SCRIPT.py [options] [-- ARGUMENT ...]",
        description="Run a script on all ranks of a plan. The ranks are on this machine, unless hosts are given; inside a job of "
        "Slurm's, of mpirun's, or where RANK and WORLD_SIZE are set, this process joins as one rank. The exit code is 1 when a "
        "rank fails. The script finds its plan by autoddl.launched().",
    )
    parser.add_argument(
        "plan", metavar="PLAN.json", help="what `autoddl plan -o` wrote; on every host at the same place"
    )
    parser.add_argument("script", metavar="SCRIPT.py", help="what every rank runs; on every host at the same place")
    where = parser.add_argument_group("where").add_mutually_exclusive_group()
    where.add_argument("--local", action="store_true", help="on this machine, whatever the environment says")
    where.add_argument(
        "--hosts", metavar="H1,H2,...", help="over ssh, one host per node of the plan, in the plan's order"
    )
    where.add_argument("--hostfile", metavar="FILE", help="the same, a line `host [slots=N]` for each")
    where.add_argument("--slurm", action="store_true", help="write a batch script and submit it")
    how = parser.add_argument_group("how")
    how.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start anew after failures (%(default)s)")
    how.add_argument("--checkpoints", metavar="DIR", help="told to the script, which goes on from what it finds there")
    how.add_argument("--log-dir", metavar="DIR", help="a file per rank (autoddl-logs/TIME)")
    how.add_argument("--chdir", metavar="DIR", help="where the ranks work (the current directory)")
    how.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the ranks; repeatable"
    )
    how.add_argument(
        "--force", action="store_true", help="on hosts of other number, devices or memory than the plan's, too"
    )
    how.add_argument("--dry-run", action="store_true", help="print what would be run")
    how.add_argument(
        "--without-oneflow", action="store_true", help="run the script without checking or joining OneFlow"
    )
    far = parser.add_argument_group("remote hosts")
    far.add_argument(
        "--python", default=sys.executable, metavar="PATH", help="the Python there (the same path as here)"
    )
    far.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="with options, such as 'ssh -p 2222' (%(default)s)"
    )
    far.add_argument("--master-address", metavar="HOST", help="of rank 0's host (the address at which ssh reached it)")
    far.add_argument(
        "--slurm-option", action="append", default=[], metavar="--OPTION=VALUE", help="for sbatch; repeatable"
    )
    limits = parser.add_argument_group("limits, in seconds")
    limits.add_argument(
        "--stall-timeout", type=float, default=60.0, metavar="S", help="a rank waits for another (%(default)g)"
    )
    limits.add_argument(
        "--start-timeout", type=float, default=180.0, metavar="S", help="until all ranks joined (%(default)g)"
    )
    limits.add_argument(
        "--grace", type=float, default=10.0, metavar="S", help="for ranks to end after Ctrl-C (%(default)g)"
    )
    limits.add_argument(
        "--host-timeout",
        type=float,
        default=DEFAULT_HOST_TIMEOUT_S,
        metavar="S",
        help="a host gives no sign of life (%(default)g)",
    )
    add_edited(parser)
    parser.set_defaults(arguments=[])
    _take_arguments_after_dashes(parser)


def _take_arguments_after_dashes(parser: argparse.ArgumentParser) -> None:
    """All that follows ``--`` is the script's, also what looks like our options; argparse itself would look at it."""
    parse = parser.parse_known_args

    def parse_before(args: Any = None, namespace: Any = None) -> Any:
        words: list[str] = list(args)
        at = words.index("--") if "--" in words else len(words)
        parsed, unknown = parse(words[:at], namespace)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], parser._option_string_actions)
            parser.error(
                f"{unknown[0]!r} is no option of launch; the script's own arguments come after --{hint and '; ' + hint}"
            )
        parsed.arguments = words[at + 1 :]
        return parsed, unknown

    parser.parse_known_args = parse_before  # type: ignore[method-assign]


def run(arguments: argparse.Namespace) -> int:
    """Launch; the exit code."""
    from ..launching.interrupts import Interrupted

    _check(arguments)
    try:
        return _launch(arguments)
    except Interrupted as interrupted:
        _say(f"interrupted by {interrupted}; all ranks have been ended")
        return 128 + interrupted.number


def _launch(arguments: argparse.Namespace) -> int:
    from ..api.running import demands_for
    from ..launching.joining import find_membership
    from ..launching.running import describe, run_job
    from ..launching.slurm import batch_script, in_allocation, run_steps, step_command, submit

    demands = demands_for(arguments.plan, arguments.script, arguments.edited)
    is_elsewhere = arguments.local or arguments.hosts or arguments.hostfile or arguments.slurm
    member = None if is_elsewhere else find_membership(os.environ)
    if member is not None:
        return _join(arguments, demands, member)
    if arguments.slurm:
        job = _job(arguments, demands, placements=())
        script = batch_script(job, arguments.slurm_option)
        if arguments.dry_run:
            print(script, end="")
            return 0
        number, path = submit(job, script)
        print(f"job {number}: {path}")
        return 0
    if not is_elsewhere and in_allocation(os.environ):
        job = _job(arguments, demands, placements=())
        if arguments.dry_run:
            print(shlex.join(step_command(job)))
            return 0
        return run_steps(job, _say)
    job = _job(arguments, demands, placements=_placements(arguments, demands))
    if arguments.dry_run:
        print(describe(job))
        return 0
    run_job(job, _show, _say, on_urgent=_mute)
    return 0


def _join(arguments: argparse.Namespace, demands: Demands, member: Membership) -> int:
    """Be one rank. What all ranks see alike is said by one of them."""
    from ..launching.hosts import LOCALHOST, Host, Placement
    from ..launching.interrupts import Interrupted
    from ..launching.joining import check_membership
    from ..launching.running import describe, run_job

    try:
        check_membership(member, demands, force=arguments.force)
    except UserError:
        if member.num_ranks != demands.num_ranks and member.rank > 0:
            return 2
        raise
    rank = demands.rank_on(member.rank)
    placement = Placement(Host(LOCALHOST), range(rank, rank + 1))
    job = _job(
        arguments,
        demands,
        placements=(placement,),
        rendezvous=member.rendezvous,
        local_ranks={rank: member.local_rank},
        max_restarts=0,
    )
    if arguments.dry_run:
        if member.rank == 0:
            print(describe(job))
        return 0
    restart = os.environ.get("AUTODDL_RESTART", "0")
    try:
        first_restart = int(restart) if is_whole(restart) else 0
        run_job(job, _show, _say, first_restart=first_restart, on_urgent=_mute)
    except Interrupted as interrupted:  # the launcher that started all ranks says so
        return 128 + interrupted.number
    return 0


def _job(arguments: argparse.Namespace, demands: Demands, placements: Sequence[Placement], **more: Any) -> Job:
    from ..api.running import make_job
    from ..launching.heartbeat import HeartbeatTimes

    fields: dict[str, Any] = {
        "arguments": tuple(arguments.arguments),
        "is_edited": arguments.edited,
        "directory": arguments.chdir or ".",
        "log_dir": arguments.log_dir,
        "environment": _variables(arguments.env),
        "checkpoints": arguments.checkpoints,
        "master_address": arguments.master_address,
        "python": arguments.python,
        "ssh": arguments.ssh,
        "stall_timeout_s": arguments.stall_timeout,
        "start_timeout_s": arguments.start_timeout,
        "grace_s": arguments.grace,
        "heartbeat": HeartbeatTimes(arguments.host_timeout),
        "max_restarts": arguments.max_restarts,
        "with_oneflow": not arguments.without_oneflow,
        "forced": arguments.force,
    }
    return make_job(arguments.plan, arguments.script, demands, placements, **{**fields, **more})


def _placements(arguments: argparse.Namespace, demands: Demands) -> tuple[Placement, ...]:
    from ..api.running import placements_for
    from ..launching.hosts import parse_hosts, read_hostfile

    hosts = None
    if arguments.hosts:
        hosts = parse_hosts(arguments.hosts)
    elif arguments.hostfile:
        hosts = read_hostfile(arguments.hostfile)
    return placements_for(hosts, demands, arguments.force)


def _variables(given: Sequence[str]) -> dict[str, str]:
    variables = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UserError(f"--env {text!r} should be NAME=VALUE, or NAME for the value that it has here")
        if not equals and name not in os.environ:
            raise UserError(f"--env {name}: it has no value here; give {name}=VALUE")
        variables[name] = value if equals else os.environ[name]
    return variables


def _check(arguments: argparse.Namespace) -> None:
    from ..api.running import check_limits

    check_limits(
        arguments.max_restarts,
        arguments.checkpoints,
        arguments.stall_timeout,
        arguments.start_timeout,
        arguments.grace,
        arguments.host_timeout,
    )
    if arguments.slurm_option and not arguments.slurm:
        raise UserError("--slurm-option is for --slurm")


def _show(line: str) -> None:
    # In one piece: ranks that joined share a terminal, and `print` may write the end of the line by itself.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _mute() -> None:
    """Show nothing more: what is being written goes nowhere, even where the main thread waits for its reader."""
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _say(text: str) -> None:
    sys.stderr.write(f"autoddl: {' '.join(text.split())}\n")
    sys.stderr.flush()
