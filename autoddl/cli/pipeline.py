"""``autoddl pipeline``: which pipeline to run for a profiled model, by DAPPLE's, Chimera's or WPipe's planner."""

from __future__ import annotations

import argparse
import json
import os
import re
from difflib import get_close_matches

from autoddl.costmodel.cluster import Cluster, load_cluster, preset_names
from autoddl.costmodel.errors import UserError, quote
from autoddl.pipelines.profile import Profile, load_profile, profile_names

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
    group = parser.add_argument_group("wishes")
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
    from autoddl.pipelines.planners import Clock, Shape, Workload, plan_chimera, plan_dapple, plan_wpipe
    from autoddl.pipelines.planners.document import Result, document_of

    from ..text.pipelines import pipeline_plan_text

    cluster = load_cluster(arguments.cluster).resized(arguments.nodes, arguments.devices_per_node)
    limit = arguments.memory_limit
    workload = Workload(
        _profile(arguments.profile, arguments.profile_batch, cluster),
        cluster,
        arguments.batch,
        recompute=arguments.recompute,
        state=arguments.state_factor,
        memory_bytes=None if limit is None else limit * 2**30,
    )
    stages, micro_batch = arguments.stages, arguments.micro_batch
    widths = _widths(arguments.widths, stages, arguments.planner)
    result: Result
    if arguments.planner == "wpipe" and stages is not None and stages % 2:
        raise UserError(f"--stages {stages} for wpipe should be even: every worker has two")
    with interruptible() as asked:
        clock = Clock(stop=asked.stop)
        if arguments.planner == "chimera":
            result = plan_chimera(workload, micro_batch, stages, arguments.pipelines, clock)
        elif arguments.planner == "wpipe":
            result = plan_wpipe(workload, micro_batch, None if stages is None else stages // 2, clock)
        else:
            result = plan_dapple(workload, micro_batch, Shape(stages, widths), clock)
    document = document_of(result, workload, is_interrupted=asked.stop.is_requested)
    if arguments.json:
        print(json.dumps(document, indent=1, allow_nan=False))
    else:
        show(pipeline_plan_text(document), arguments)
    return asked.exit_code("this is the best plan until then")


def _profile(text: str, micro_batch: int | None, cluster: Cluster) -> Profile:
    from autoddl.pipelines.planners.transformer import transformer_profile

    known = profile_names()
    priced = text.startswith("transformer:")
    if micro_batch is not None and (priced or text in known):
        raise UserError(f"--profile-batch {micro_batch} does not apply to {text}; it is for text graphs")
    if not priced:
        if text not in known and not os.path.exists(text):
            close = get_close_matches(text[:60].lower(), known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UserError(
                f"profile {quote(text)} is neither a file nor one of {', '.join(known)} nor "
                f"transformer:LAYERSxHIDDENxSEQUENCE, such as transformer:48x1024x128{hint}"
            )
        return load_profile(text, micro_batch)
    sizes = re.fullmatch(r"transformer:([0-9]{1,9})x([0-9]{1,9})x([0-9]{1,9})", text)
    if sizes is None:
        raise UserError(
            f"profile {quote(text)} should read transformer:LAYERSxHIDDENxSEQUENCE, such as transformer:48x1024x128"
        )
    layers, hidden, sequence = map(int, sizes.groups())
    return transformer_profile(cluster, layers, hidden, sequence, micro_batch=1 if micro_batch is None else micro_batch)


def _widths(text: str | None, stages: int | None, planner: str) -> tuple[int, ...] | None:
    if text is None:
        return None
    if planner != "dapple":
        raise UserError(f"--widths {text} is for the dapple planner; {planner} makes all its stages alike")
    if re.fullmatch(r"[0-9]{1,9}(:[0-9]{1,9})*", text) is None:
        raise UserError(f"--widths {quote(text)} should be numbers of devices, such as 8:8")
    widths = tuple(map(int, text.split(":")))
    if stages is not None and stages != len(widths):
        raise UserError(f"--widths {text} has {len(widths)} stages, --stages says {stages}")
    return widths
