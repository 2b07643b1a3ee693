"""Schedules: what generating, validating and simulating costs per task, and Chimera's whole space.

    python tests/bench/bench_schedules.py [--skip-sweep]

The first table shows that time is linear in tasks. The sweep generates, validates and simulates Chimera for every even D <= 32,
every f that divides D/2, every N from 1 to 4 D, and compares the makespan in unit times with the closed form.
"""

from __future__ import annotations

import argparse
import time

from tqdm import tqdm

from autoddl.pipelines.critical import critical_path
from autoddl.pipelines.generators import generate
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import validate

SIZES = ((16, 128), (32, 256), (64, 512), (128, 1000))
NAMES = ("1f1b", "chimera", "zero-bubble", "pipedream", "wpipe")


def sizes() -> None:
    print(
        f"{'schedule':12} {'workers':>7} {'N':>5} {'tasks':>8} {'generate+validate':>18} {'validate':>9} {'simulate':>9}",
        end="",
    )
    print(f" {'critical path':>14} {'us/task':>8}")
    for name in NAMES:
        for num_workers, num_micro_batches in SIZES:
            options = {"iterations": 1} if name in ("pipedream", "wpipe") else {}
            clock = [time.process_time()]
            schedule = generate(name, num_stages=num_workers, num_micro_batches=num_micro_batches, **options)
            clock.append(time.process_time())
            validate(schedule)
            clock.append(time.process_time())
            timeline = simulate(schedule, Times.of(schedule.num_stages, forward=1, backward=2, transfer=0.1))
            clock.append(time.process_time())
            critical_path(timeline)
            clock.append(time.process_time())
            steps = [after - before for before, after in zip(clock, clock[1:])]
            each = (steps[0] + steps[2]) / schedule.num_tasks * 1e6
            print(
                f"{name:12} {num_workers:7} {num_micro_batches:5} {schedule.num_tasks:8} {steps[0]:16.2f} s {steps[1]:7.2f} s "
                f"{steps[2]:7.2f} s {steps[3]:12.2f} s {each:8.2f}"
            )


def sweep() -> None:
    cases = [
        (num_stages, f, n)
        for num_stages in range(2, 33, 2)
        for f in range(1, num_stages // 2 + 1)
        if num_stages // 2 % f == 0
        for n in range(1, 4 * num_stages + 1)
    ]
    begin, tasks = time.process_time(), 0
    for num_stages, f, n in tqdm(cases, desc="chimera", disable=None):
        schedule = generate("chimera", num_stages=num_stages, num_micro_batches=n, num_pipelines=2 * f)
        makespan = simulate(schedule, Times.of(num_stages, forward=1, backward=1)).makespan
        units, rest = divmod(n, num_stages)
        behind = 2 * num_stages + 2 * -(-rest // (2 * f)) - 2 if rest else num_stages // f - 2
        assert makespan == 2 * num_stages * units + behind, (num_stages, f, n, makespan)
        tasks += schedule.num_tasks
    print(
        f"chimera: all {len(cases)} cases ({tasks} tasks) valid, at the closed form: {time.process_time() - begin:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--skip-sweep", action="store_true")
    arguments = parser.parse_args()
    sizes()
    if not arguments.skip_sweep:
        sweep()


if __name__ == "__main__":
    main()
