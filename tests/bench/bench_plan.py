"""GPT-3 175B, 96 blocks untied, on 128 nodes x 8: from start to printed table, and how the search grows with the blocks.

python tests/bench/bench_plan.py
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.search import solve
from autoddl.zoo import resolve_model

#: A limit that binds, relative to what the optimum without a limit needs.
_BINDING = 0.85
COMMAND = ["plan", "gpt3-175b", "--cluster", "dgx-a100", "--nodes", "128", "--batch", "1536", "--untied"]


def whole_command(*options: str) -> None:
    """Wall time of the command as a user runs it, and what the search took of it; then its figures, from a run that prints JSON."""
    command = [sys.executable, "-m", "autoddl", *COMMAND, *options]
    start = time.perf_counter()
    table = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10
    plan = json.loads(subprocess.run([*command, "--json"], check=True, capture_output=True).stdout)
    print(f"autoddl {' '.join([*COMMAND, *options])}")
    certificate = next(line.strip() for line in table.splitlines() if " search, " in line)
    print(f"  {seconds:.2f} s from start to printed table, {peak:.0f} MiB; {certificate}")
    print(
        f"  {plan['status']}, step {plan['step_s']:.2f} s, memory {plan['memory_bytes'] / 2**30:.1f} GiB of "
        f"{plan['memory_limit_bytes'] / 2**30:.0f} GiB per device; {len(plan['candidates'])} settings"
    )


def growth() -> None:
    """Seconds of the exact search over the number of blocks, without and with a limit that binds; double the blocks should take
    about double the time."""
    cluster = load_cluster("dgx-a100").resized(128)
    print("exact search of gpt:Bx12288, untied, micro-batch 32 of 1536: seconds (ratio to half as many blocks)")
    print(f"{'blocks':>8}  {'no limit':>16}  {'limit binds':>16}")
    before: tuple[float, ...] = ()
    for blocks in (12, 24, 48, 96):
        graph = resolve_model(f"gpt:{blocks}x12288", heads=96)
        book = PriceBook(graph, cluster, Workload(1536, 32, "mixed"), untied=True)
        table = book.problem(1536, 32).table
        free = solve(table, time_limit=30.0)
        bound = solve(table, memory_limit=_BINDING * free.memory_bytes, time_limit=30.0)
        seconds = (free.seconds, bound.seconds)
        ratios = [f"({now / then:4.2f})" for now, then in zip(seconds, before)] or ["", ""]
        marks = ["" if result.optimal else "*" for result in (free, bound)]
        cells = [f"{s:8.3f}{mark:1} {ratio:6}" for s, mark, ratio in zip(seconds, marks, ratios)]
        print(f"{blocks:8}  {cells[0]:>16}  {cells[1]:>16}")
        before = seconds
    print("(* stopped at its time limit)")


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    whole_command()
    whole_command("--micro-batch", "32")
    growth()


if __name__ == "__main__":
    main()
