"""A GPT learns a real text with several schedules: synchronous ones on top of each other, asynchronous ones beside them.

    python tests/bench/bench_convergence.py [--text FILE] [--steps 200] [-o convergence.svg]

Every schedule sees the same micro-batches. Synchronous schedules should differ by rounding errors only; PipeDream-2BW and WPipe
learn with weights that are one update old (WPipe in half of the stages only).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from tqdm import tqdm

from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, schedule_of, train

SCHEDULES = (("1f1b", {}), ("chimera", {}), ("zero-bubble", {}), ("pipedream-2bw", {}), ("wpipe", {}))
LICENSE = Path(__file__).resolve().parents[2] / "LICENSE"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=LICENSE, help="(the license)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path, default=Path(tempfile.gettempdir()) / "convergence.svg")
    arguments = parser.parse_args()
    curves: dict[str, np.ndarray] = {}
    synchronous = []
    for name, options in SCHEDULES:
        schedule = schedule_of(name, arguments.steps, num_stages=2, num_micro_batches=2, **options)
        with tqdm(total=arguments.steps, desc=name, disable=None) as bar:
            result = train(
                TrainingOptions(
                    arguments.text,
                    layers=4,
                    width=32,
                    heads=2,
                    sequence=32,
                    schedule=schedule,
                    num_steps=arguments.steps,
                    micro_batch=8,
                    tied=False,
                    learning_rate=3e-3,
                ),
                lambda step, bar=bar: bar.update(step.number - bar.n),
            )
        curves[name] = np.array(result.losses)
        if schedule.is_synchronous:
            synchronous.append(name)
        last = curves[name][-20:].mean()
        print(f"{name:14} first loss {curves[name][0]:.4f}, mean of the last 20 {last:.4f}", flush=True)
    first = curves[synchronous[0]]
    apart = max(float(np.abs(curves[name] / first - 1).max()) for name in synchronous)
    print(f"synchronous schedules differ by at most {apart:.1e} (relative, of a step's loss)")
    for name in curves.keys() - set(synchronous):
        print(
            f"{name:14} is {np.abs(curves[name] / first - 1)[-20:].mean():.1%} from {synchronous[0]} in the last 20 steps"
        )
    _draw(curves, arguments.output)


def _draw(curves: dict[str, np.ndarray], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    styles = ("-", "--", ":", "-", "-")
    for (name, losses), style in zip(curves.items(), styles):
        axes.plot(np.arange(1, len(losses) + 1), losses, style, label=name, linewidth=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel("loss per byte")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)
    print(f"drawn in {path}")


if __name__ == "__main__":
    main()
