"""``autoddl pipeline``: plan a pipeline of a profiled model with the planner of DAPPLE, Chimera or WPipe."""

from __future__ import annotations

import argparse
import re

from autoddl.costmodel.errors import UserError, quote
from autoddl.pipelines.profile import profile_names

from ._options import add_json, add_memory_limit, add_wide, memory_limit_bytes, print_result
from ._planning import add_cluster_arguments
from ._stopping import interruptible

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "pipeline",
        help="plan a pipeline of a profiled model with the planner of a paper",
        description="Plan the stages, replicas and devices of a pipeline for a profiled model with the planner of DAPPLE, Chimera "
        "or WPipe.",
    )
    parser.add_argument(
        "--profile",
        required=True,
        metavar="PROFILE",
        help=f"a file (JSON of AutoDDL, or a PipeDream text graph), one of {', '.join(profile_names())}, or "
        "transformer:LAYERSxHIDDENxSEQUENCE, whose layers are priced for the device of the cluster",
    )
    parser.add_argument(
        "--profile-batch",
        type=int,
        metavar="N",
        help="micro-batch that a PipeDream text graph was profiled with (default: the number after pbs- in its name)",
    )
    add_cluster_arguments(parser)
    parser.add_argument(
        "--batch", type=int, required=True, metavar="B", help="samples per training step over all devices"
    )
    parser.add_argument(
        "--planner",
        choices=("dapple", "chimera", "wpipe"),
        default="dapple",
        help="planner of the paper of that name (default: %(default)s)",
    )
    group = parser.add_argument_group("constraints (default: chosen by the planner)")
    group.add_argument("--micro-batch", type=int, metavar="b", help="samples per micro-batch")
    group.add_argument("--stages", type=int, metavar="D", help="number of stages")
    group.add_argument("--widths", metavar="W:W:...", help="dapple: number of devices of each stage")
    group.add_argument(
        "--pipelines",
        type=int,
        metavar="P",
        default=2,
        help="chimera: number of pipelines over both directions, an even number (default: %(default)s)",
    )
    group.add_argument(
        "--recompute",
        action="store_true",
        help="recompute activations (default: chimera and wpipe try both, dapple does not recompute)",
    )
    add_memory_limit(group, "the device's memory")
    group.add_argument(
        "--state-factor",
        type=float,
        metavar="X",
        default=4.0,
        help="bytes of weights, gradients and optimizer state per byte of weights (default: %(default)g, as of Adam)",
    )
    add_wide(parser)
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan the pipeline and print it."""
    from ..api.profiled import pipeline

    with interruptible() as interrupt:
        plan = pipeline(
            arguments.profile,
            cluster=arguments.cluster,
            batch=arguments.batch,
            planner=arguments.planner,
            nodes=arguments.nodes,
            devices_per_node=arguments.devices_per_node,
            micro_batch=arguments.micro_batch,
            stages=arguments.stages,
            widths=_widths(arguments.widths),
            num_pipelines=arguments.pipelines,
            recompute=arguments.recompute,
            memory_limit_bytes=memory_limit_bytes(arguments),
            state_factor=arguments.state_factor,
            profile_batch=arguments.profile_batch,
            stop=interrupt.stop,
        )
    print_result(plan, arguments)
    return interrupt.exit_code("this is the best plan found so far")


def _widths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})*", text) is None:
        raise UserError(f"--widths {quote(text)} should be numbers of devices, such as 8:8")
    return tuple(map(int, text.split(":")))
