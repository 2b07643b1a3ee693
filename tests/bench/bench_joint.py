"""Joint plans of pipelines and strategies: how good they are after 5 seconds and at the end, and how long the proof takes.

    python tests/bench/bench_joint.py [--limit 60] [--only bert-large]

Each case is planned in a process of its own, on one core.  Its clock counts processor time from the call of the planner, as the
time limit does, so that a busy machine changes little; steps and bounds are what
the planner reports while it searches.  The gap is of the final plan: how much better another one could be at most.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

#: Seconds after which the best plan until then is asked for.
EARLY_S = 5.0
#: What a case may take beyond its limit, which is processor time of the search: imports, and figures of the plan.
_BEYOND_S = 300.0


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    nodes: int
    devices_per_node: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} on {self.cluster} {self.nodes} x {self.devices_per_node}, batch {self.batch}"


CASES = (
    Case("gpt3-13b", "dgx-a100", 8, 8, 64),
    Case("gpt3-175b", "dgx-a100", 128, 8, 1536),
    Case("llama3-70b", "dgx-h100", 8, 8, 512),
    Case("bert-large", "piz-daint", 16, 1, 256),
    Case("vgg16", "v100-c", 8, 1, 256),
)

#: What others publish for the planning of one case: who, which case, seconds, of what, and where.
PUBLISHED = (
    (
        "Alpa",
        "GPT-39B on 64 V100 (8 x 8)",
        2393.26,
        "1582.66 s compilation, 804.48 s profiling, 1.65 s dynamic programming, 4.47 s other",
        "Zheng et al., OSDI'22, Table 5 (arXiv:2201.12023)",
    ),
)


class Progress:
    """The best step over time, as a planner reports it, and when it was proven; None if it was not."""

    def __init__(self) -> None:
        self._start = time.process_time()
        self.steps: list[tuple[float, float]] = []
        self.proven_s: float | None = None

    def report(self, best_s: float, bound_s: float, simulated: int) -> None:
        """As :data:`autoddl.pipelines.joint.job.Report`."""
        if math.isfinite(best_s) and (not self.steps or best_s < self.steps[-1][1]):
            self.steps.append((time.process_time() - self._start, best_s))
            self.proven_s = None
        if self.proven_s is None and self.steps and bound_s >= self.steps[-1][1] * (1 - 1e-9):
            self.proven_s = self.seconds

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.process_time() - self._start

    def step_after(self, seconds: float) -> float | None:
        """The best step that was known then."""
        return min((step for when, step in self.steps if when <= seconds), default=None)


def plan(case: Case, limit_s: float) -> dict[str, float | bool | str | None]:
    """Plan a case in this process, on one core; its figures."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from autoddl.costmodel.cluster import load_cluster
    from autoddl.costmodel.errors import UserError
    from autoddl.pipelines.joint.planner import plan_jointly
    from autoddl.pipelines.joint.result import JointOptions
    from autoddl.pipelines.joint.rivals import describe
    from autoddl.search.planner import Options
    from autoddl.zoo import resolve_model

    graph = resolve_model(case.model)
    cluster = load_cluster(case.cluster).resized(case.nodes, case.devices_per_node)
    progress = Progress()
    try:
        found = plan_jointly(
            graph, cluster, JointOptions(Options(batch=case.batch, time_limit_s=limit_s)), progress.report
        )
    except UserError as error:
        return {"fault": str(error)}
    seconds = progress.seconds
    progress.report(found.cost, found.lower_bound_s, 0)
    return {
        "early_s": progress.step_after(EARLY_S),
        "step_s": found.cost,
        "gap": found.gap,
        "proven_s": progress.proven_s if found.optimal else None,
        "seconds": seconds,
        # On Linux ru_maxrss is in KiB, on macOS in bytes.
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "plan": describe(found.evaluation),
    }


def measure(number: int, limit_s: float) -> dict[str, float | bool | str | None]:
    """Plan a case in a process of its own."""
    command = [sys.executable, __file__, "--limit", str(limit_s), "--case", str(number)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * limit_s + _BEYOND_S)
    except subprocess.TimeoutExpired as error:
        return {"fault": f"no answer after {error.timeout:g} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"fault": lines[-1] if lines else f"exit code {done.returncode}"}
    return json.loads(done.stdout)


def row(case: Case, found: dict[str, float | bool | str | None]) -> str:
    """A line of the table."""
    if "fault" in found:
        return f"{case!s:48}  {found['fault']}"
    early = "none" if found["early_s"] is None else f"{found['early_s']:.4g} s"
    proven = "not proven" if found["proven_s"] is None else f"{found['proven_s']:.1f} s"
    peak = f"{found['peak_bytes'] / 2**20:.0f} MiB"
    return (
        f"{case!s:48}  {early:>9}  {found['step_s']:>7.4g} s  {found['gap']:>7.2%}  {proven:>10}  "
        f"{found['seconds']:>6.1f} s  {peak:>9}  {found['plan']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of processor time of a search (%(default)g)")
    parser.add_argument("--only", choices=[case.model for case in CASES], help="one case (all)")
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)  # what the process of a case is started with
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(json.dumps(plan(CASES[options.case], options.limit)))
        return
    early = f"{EARLY_S:g} s"
    print(f"joint plans, each on one core, at most {options.limit:g} s of processor time")
    print(
        f"{'case':48}  {'step ' + early:>9}  {'final':>9}  {'gap':>7}  {'proven':>10}  {'took':>8}  {'memory':>9}  plan"
    )
    for number, case in enumerate(CASES):
        if options.only in (None, case.model):
            print(row(case, measure(number, options.limit)), flush=True)
    print("what others publish for planning (on their machines, of their models):")
    for who, what, seconds, parts, where in PUBLISHED:
        print(f"  {who}, {what}: {seconds:,.0f} s ({parts}); {where}")


if __name__ == "__main__":
    main()
