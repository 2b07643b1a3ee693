"""Published training runs: what the cost model predicts, what was measured, and what other tools predict.

    python tests/bench/bench_published.py

The runs are those of calib/published_runs.csv. One efficiency is fitted to each group of hardware and software, none to a run. The
predictions of Calculon and SimuMax are those that their authors published for the same runs (tests/bench/others_predictions.csv).
SimuMax measures the efficiency of every product on the device before; Calculon has one table of efficiencies per device.
"""

from __future__ import annotations

import csv
from pathlib import Path

import autoddl
from autoddl.measuredruns import PricedRun

FOLDER = Path(__file__).parent


def main() -> None:
    predictions = autoddl.price_runs("published", fit=True)
    print(predictions.text)
    print()
    for line in compared(predictions.result.runs):
        print(line)


def compared(runs: tuple[PricedRun, ...]) -> list[str]:
    """Our errors beside those of other tools, on the runs for which they published predictions."""
    by_name = {one.run.name: one for one in runs}
    with open(FOLDER / "others_predictions.csv", newline="", encoding="utf-8") as file:
        others = list(csv.DictReader(file))
    lines = ["Beside the predictions that other tools published for the same runs"]
    for tool in dict.fromkeys(row["tool"] for row in others):
        pairs = [(by_name[row["id"]], float(row["predicted_s"])) for row in others if row["tool"] == tool]
        theirs = [abs(predicted / one.run.measured_s - 1) for one, predicted in pairs]
        ours = [abs(one.error) for one, _ in pairs if one.error is not None]
        lines += [
            f"  {tool:32} {one.run.name:36} {predicted / one.run.measured_s - 1:+6.1%}, AutoDDL {one.error:+6.1%}"
            for one, predicted in pairs
            if one.error is not None
        ]
        lines.append(
            f"  {tool}: mean error {sum(theirs) / len(theirs):.1%} of {len(theirs)} runs, AutoDDL {sum(ours) / len(ours):.1%}"
        )
    return lines


if __name__ == "__main__":
    main()
