"""``autoddl pipeline``: which pipeline to run for a profiled model, by DAPPLE's, Chimera's or WPipe's planner."""

from __future__ import annotations

import argparse
import json
import re

from autoddl.costmodel.cluster import preset_names
from autoddl.costmodel.errors import UserError, quote
from autoddl.pipelines.profile import profile_names

from ._options import add_wide, show
from ._stopping import interruptible

__all__ = ["add_parser", "run"]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the command."""
    parser = subparsers.add_parser(
        "pipeline", help="plan stages, replicas and devices of a pipeline", description=__doc__
    )
    parser.add_argument(
        "--profile",
        required=True,
        metavar="F",
        help=f"a file (our JSON, or a PipeDream text graph), one of {', '.join(profile_names())}, or "
        "transformer:LAYERSxHIDDENxSEQUENCE, priced by the cluster's device",
    )
    parser.add_argument(
        "--profile-batch", type=int, metavar="N", help="micro-batch of a text graph (pbs-N of its name)"
    )
    parser.add_argument("--cluster", required=True, metavar="C", help=f"a file, or one of {', '.join(preset_names())}")
    parser.add_argument("--nodes", type=int, metavar="N", help="number of nodes")
    parser.add_argument("--devices-per-node", type=int, metavar="G", help="devices in each node")
    parser.add_argument("--batch", type=int, required=True, metavar="B", help="samples per iteration over all devices")
    parser.add_argument("--planner", choices=("dapple", "chimera", "wpipe"), default="dapple", help="(%(default)s)")
    group = parser.add_argument_group("constraints")
    group.add_argument("--micro-batch", type=int, metavar="b", help="samples per micro-batch (chosen)")
    group.add_argument("--stages", type=int, metavar="S", help="number of stages (chosen)")
    group.add_argument("--widths", metavar="P:Q", help="devices of each stage, for dapple (chosen)")
    group.add_argument(
        "--pipelines", type=int, metavar="2f", default=2, help="in both directions, for chimera (%(default)s)"
    )
    group.add_argument("--recompute", action="store_true", help="recompute activations (chimera and wpipe try both)")
    group.add_argument("--memory-limit", type=float, metavar="GIB", help="per device (the device's memory)")
    group.add_argument(
        "--state-factor",
        type=float,
        metavar="X",
        default=4.0,
        help="bytes of weights, gradients and optimizer state per byte of weights (%(default)s: Adam)",
    )
    add_wide(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(arguments: argparse.Namespace) -> int:
    """Plan and print."""
    from ..api.profiled import pipeline

    limit = arguments.memory_limit
    with interruptible() as asked:
        found = pipeline(
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
            memory_limit_bytes=None if limit is None else limit * 2**30,
            state_factor=arguments.state_factor,
            profile_batch=arguments.profile_batch,
            stop=asked.stop,
        )
    if arguments.json:
        print(json.dumps(found.document, indent=1, allow_nan=False))
    else:
        show(found.text, arguments)
    return asked.exit_code("this is the best plan until then")


def _widths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})*", text) is None:
        raise UserError(f"--widths {quote(text)} should be numbers of devices, such as 8:8")
    return tuple(map(int, text.split(":")))
