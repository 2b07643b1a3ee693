"""Schedules on ranks whose stages sleep: measured makespans beside the simulator's.

    python tests/bench/bench_pipelines.py [--forward 0.2] [--repeats 2] [--ranks 4 8]

A forward sleeps for --forward seconds, a backward twice as long; sends, receives, all-reduces and their order are real, 64 KB a
boundary. So the figures tell how well the runtime keeps a schedule, whatever the number of cores. The simulation knows nothing of
transfers (their time is 0), and the best of the repeats is reported with the spread. OneFlow's scheduler thread polls while
anything is under way, so that with more ranks than cores a message can take some 10 ms: tasks have to be long beside that.
"""

from __future__ import annotations

import argparse

from tqdm import tqdm

from autoddl.pipelines import Times, generate, simulate
from autoddl.pipelines.draw import to_text
from autoddl.pipelines.runtime.pipeline.lowering import lower
from autoddl.pipelines.runtime.pipeline.report import combine
from autoddl.pipelines.runtime.ranks.launcher import RankPool

ROWS, ROW_ELEMENTS, GRADIENT_ELEMENTS = 4, 4096, 65536
CASES = (
    (4, "gpipe", 8, {}),
    (4, "1f1b", 4, {}),
    (4, "1f1b", 8, {}),
    (4, "chimera", 4, {}),
    (4, "chimera", 8, {}),
    (4, "chimera", 8, {"concatenation": "halving"}),
    (4, "zero-bubble", 8, {}),
    (4, "wpipe", 4, {"iterations": 3}),
    (8, "1f1b", 8, {}),
    (8, "chimera", 8, {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forward", type=float, default=0.2)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", choices=(4, 8), default=(4, 8), help="(both)")
    parser.add_argument("--draw", action="store_true", help="both timelines of the first case of each schedule")
    arguments = parser.parse_args()
    print(f"{'ranks':>5} {'schedule':12} {'N':>3} {'simulated':>10} {'measured':>9} {'ratio':>6}   all repeats")
    for num_ranks in arguments.ranks:
        cases = [case for case in CASES if case[0] == num_ranks]
        best: dict[tuple[str, int], tuple[float, float]] = {}
        with RankPool(num_ranks) as pool:
            for _, name, num_micro_batches, options in tqdm(cases, disable=None):
                schedule = generate(name, num_stages=num_ranks, num_micro_batches=num_micro_batches, **options)
                times = Times.of(schedule.num_stages, forward=arguments.forward, backward=2 * arguments.forward)
                # A little time for transfers, so that what begins with a transfer comes after it in the order.
                ordering = Times.of(
                    schedule.num_stages, forward=arguments.forward, backward=2 * arguments.forward, transfer=1e-3
                )
                lowered = lower(schedule, ROWS, times=ordering)
                sizes = [ROW_ELEMENTS] * (schedule.num_stages - 1), [GRADIENT_ELEMENTS] * schedule.num_stages
                job = "autoddl.pipelines.runtime.pipeline.sleeping:sleep_through"
                results = pool.run(job, lowered, times, *sizes, arguments.repeats, timeout_s=120)
                timelines = [combine(schedule, reports).timeline for reports in zip(*results)]
                simulated = simulate(schedule, times)
                ratios = sorted(timeline.makespan / simulated.makespan for timeline in timelines)
                measured = ratios[0] * simulated.makespan
                best.setdefault((name, num_micro_batches), (simulated.makespan, measured))
                print(
                    f"{num_ranks:5} {name:12} {num_micro_batches:3} {simulated.makespan:8.3f} s {measured:7.3f} s "
                    f"{ratios[0]:6.3f}   {' '.join(f'{ratio:.3f}' for ratio in ratios)}",
                    flush=True,
                )
                if arguments.draw:
                    print(to_text(simulated, tick=arguments.forward))
                    print(to_text(timelines[0], tick=arguments.forward), flush=True)
        (predicted, took), (plain, plain_took) = best["chimera", num_ranks], best["1f1b", num_ranks]
        print(
            f"{num_ranks:5} chimera : 1f1b at N = {num_ranks}: simulated {predicted / plain:.3f}, "
            f"measured {took / plain_took:.3f}"
        )


if __name__ == "__main__":
    main()
