"""A GPT learns a real text with several schedules: synchronous ones on top of each other, asynchronous ones beside them.

    python tests/bench/bench_convergence.py [--text FILE] [--steps 200] [--picture build/convergence.svg]

Every schedule sees the same micro-batches. Synchronous schedules should differ by rounding errors only; PipeDream-2BW and WPipe
learn with weights that are one update old (WPipe in half of the stages only). WPipe's compression of what goes between stages
is tried with one of each kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tqdm import tqdm

from autoddl.pipelines.runtime.pipeline.problems import TextModel, shipped_text
from autoddl.pipelines.runtime.pipeline.training import TrainingOptions, schedule_of, train

#: Name, whether it is compressed, and how it is drawn: the synchronous ones so that all show on top of each other.
CASES = (
    ("1f1b", False, {"color": "0.75", "linewidth": 5}),
    ("chimera", False, {"color": "tab:blue", "linewidth": 2.4}),
    ("zero-bubble", False, {"color": "black", "linewidth": 1, "linestyle": (0, (4, 4))}),
    ("chimera", True, {"color": "tab:cyan", "linewidth": 1, "linestyle": ":"}),
    ("pipedream-2bw", False, {"color": "tab:red", "linewidth": 1.2}),
    ("wpipe", False, {"color": "tab:green", "linewidth": 1.2}),
    ("wpipe", True, {"color": "tab:olive", "linewidth": 1, "linestyle": ":"}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, default=shipped_text(), help="(our license)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--picture",
        type=Path,
        default="build/convergence.svg",
        help="where the figure goes (%(default)s; needs matplotlib)",
    )
    arguments = parser.parse_args()
    curves: dict[str, np.ndarray] = {}
    synchronous = []
    for name, compress, _ in CASES:
        label = label_of(name, compress)
        curves[label], is_synchronous = learn(name, compress, arguments.text, arguments.steps)
        if is_synchronous and not compress:
            synchronous.append(label)
        last = curves[label][-20:].mean()
        print(f"{label:20} first loss {curves[label][0]:.4f}, mean of the last 20 {last:.4f}", flush=True)
    first = curves[synchronous[0]]
    apart = max(float(np.abs(curves[label] / first - 1).max()) for label in synchronous)
    print(f"{', '.join(synchronous)} differ by at most {apart:.1e} (relative, of a step's loss)")
    for label in [label for label in curves if label not in synchronous]:
        beside = np.abs(curves[label] / first - 1)[-20:].mean()
        print(f"{label:20} is {100 * beside:.2g} % from {synchronous[0]} in the last 20 steps")
    try:
        draw(arguments.picture, curves)
    except ImportError:
        print("no picture: matplotlib is not installed")


def label_of(name: str, compress: bool) -> str:
    return f"{name}, compressed" if compress else name


def learn(name: str, compress: bool, text: Path, num_steps: int) -> tuple[np.ndarray, bool]:
    """The loss of every step, and whether the schedule is synchronous."""
    schedule = schedule_of(name, num_steps, num_stages=2, num_micro_batches=2)
    options = TrainingOptions(
        TextModel(text, "gpt", layers=4, width=32, heads=2, sequence=32, tied=False),
        schedule,
        num_steps,
        micro_batch=8,
        learning_rate=3e-3,
        compress=compress,
    )
    with tqdm(total=num_steps, desc=label_of(name, compress), disable=None) as bar:
        result = train(options, lambda step: _advance(bar, step.number))
    return np.array(result.losses), schedule.is_synchronous


def _advance(bar: tqdm, number: int) -> None:
    bar.update(number - bar.n)


def draw(path: Path, curves: dict[str, np.ndarray]) -> None:
    """Loss by step, all of it and the last quarter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    num_steps = max(map(len, curves.values()))
    for axis, begin in zip(axes, (0, num_steps * 3 // 4)):
        for name, compress, style in CASES:
            losses = curves[label_of(name, compress)]
            axis.plot(np.arange(begin + 1, len(losses) + 1), losses[begin:], label=label_of(name, compress), **style)
        axis.set(xlabel="step", title="all steps" if begin == 0 else "the last quarter")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("loss per byte (nats)")
    axes[0].legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"picture: {path}")


if __name__ == "__main__":
    main()
