"""Long runs again and again: no hang, and the same losses to the last bit every time.

    python tests/bench/bench_endurance.py              a short one: 2 runs of each schedule and number of ranks
    python tests/bench/bench_endurance.py --full       10 of each
    python tests/bench/bench_endurance.py [--runs 2 | --full] [--steps 200] [--stages 2 4] [--schedules chimera wpipe]
                                          [--model gpt] [--timeout 600]

Every run starts ranks of its own and trains a tiny GPT or perceptron on our license. A rank that waits for another for more than
15 s, or a run that takes more than so many seconds, ends the benchmark with exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time

from tqdm import tqdm

from autoddl.pipelines.runtime.pipeline.problems import TextModel, TextPerceptron, TrainingProblem, shipped_text
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, schedule_of, train
from autoddl.pipelines.runtime.ranks.failures import RankError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    how_often = parser.add_mutually_exclusive_group()
    how_often.add_argument("--runs", type=int, default=2, help="of each schedule (%(default)s)")
    how_often.add_argument("--full", dest="runs", action="store_const", const=10, help="10 runs of each schedule")
    parser.add_argument("--steps", type=int, default=200, help="in each run (%(default)s)")
    parser.add_argument("--stages", type=int, nargs="+", default=(2, 4), help="workers (2 and 4)")
    parser.add_argument("--schedules", nargs="+", default=("chimera", "wpipe"), help="(chimera and wpipe)")
    parser.add_argument("--model", choices=("gpt", "mlp"), default="gpt", help="(%(default)s)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for a run (%(default)s)")
    arguments = parser.parse_args()
    print(
        f"{'schedule':14} {'model':5} {'ranks':>5} {'runs':>4} {'steps':>5} {'seconds a run':>15}  {'last loss':>10}  between runs"
    )
    for num_stages in arguments.stages:
        for name in arguments.schedules:
            report(name, num_stages, arguments)


def report(name: str, num_stages: int, arguments: argparse.Namespace) -> None:
    """Print a line on all runs of a schedule."""
    seconds, losses = [], []
    for _ in tqdm(range(arguments.runs), desc=f"{name} on {num_stages}", disable=None):
        begin = time.monotonic()
        losses.append(run(name, num_stages, arguments.model, arguments.steps, arguments.timeout))
        seconds.append(time.monotonic() - begin)
    apart = max(abs(one - other) for run in losses for one, other in zip(run, losses[0]))
    what = f"{name:14} {arguments.model:5} {num_stages:5} {len(losses):4} {len(losses[0]):5}"
    took = f"{min(seconds):6.1f} to {max(seconds):5.1f}"
    between = "identical" if apart == 0 else f"up to {apart:.1e} apart"
    print(f"{what} {took}  {losses[0][-1]:10.6f}  {between}", flush=True)


def run(name: str, num_stages: int, model: str, num_steps: int, timeout_s: float) -> tuple[float, ...]:
    """The losses of all steps of a run; ends the process where it hangs."""
    schedule = schedule_of(name, num_steps, num_stages=num_stages, num_micro_batches=num_stages)
    problem: TrainingProblem
    if model == "gpt":
        layers = max(1, schedule.num_stages - 2)
        problem = TextModel(shipped_text(), "gpt", layers, width=16, heads=2, sequence=8, tied=schedule.is_synchronous)
    else:
        problem = TextPerceptron(shipped_text(), (16,) * (schedule.num_stages + 1))
    options = TrainingOptions(problem, schedule, num_steps, micro_batch=2, learning_rate=3e-3)
    try:
        return train(options, timeout_s=timeout_s).losses
    except RankError as error:
        sys.exit(f"{name} on {num_stages} ranks: {error}")


if __name__ == "__main__":
    main()
