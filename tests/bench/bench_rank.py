"""Predicted against measured times of 40 strategies (AutoDDL's Figure 4, on CPU ranks).

For each number of ranks the cost model is calibrated, then strategies of a three-layer perceptron and of one GPT block run on as
many ranks in interleaved rounds: their communication alone, and whole training steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile

from autoddl.calib.campaign import CampaignOptions, measure_locally
from autoddl.calib.clusterfile import calibrated_document, fit_samples
from autoddl.calib.measurements import SampleFile
from autoddl.calib.ranked import MeasuredRanking, RankSettings, draw_ranking, rank_locally, ranking_document
from autoddl.costmodel.cluster import Cluster, from_document, load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.workload import Workload
from autoddl.zoo.feedforward import mlp
from autoddl.zoo.transformers import Transformer, gpt

MODELS: dict[str, tuple[LayerGraph, int]] = {
    "mlp": (mlp([1024, 4096, 1024, 256]), 64),
    "gpt": (gpt(Transformer("gpt block", layers=1, width=256, heads=8, sequence=64, vocabulary=1024)), 8),
}


def calibrated(num_ranks: int, budget_s: float, quiet: bool) -> Cluster:
    """local-cpu with what ranks of this machine do now."""
    with tempfile.TemporaryDirectory() as folder:
        file = SampleFile(f"{folder}/samples.csv")
        measure_locally(CampaignOptions(ranks=(num_ranks,), repetitions=20, budget_s=budget_s, quiet=quiet), file)
        fit = fit_samples(file.samples)
    level = fit.levels[0]
    print(f"{num_ranks} ranks: {len(file.samples):,} samples, formula: {level.form.name}")
    return from_document(calibrated_document(fit, load_cluster("local-cpu"), "session"), "session")


def line(ranking: MeasuredRanking) -> None:
    """One model on one number of ranks."""
    rounds = ranking.communication.shape[1]
    print(
        f"{ranking.graph.name} on {ranking.cluster.num_devices} ranks: {len(ranking.strategies)} strategies, {rounds} rounds, "
        f"other processes in {ranking.disturbed:.0%} of the visits"
    )
    for name, own in ranking.scores.items():
        print(
            f"  {name:13} Spearman {own.spearman:.3f} (repeat-to-repeat {own.ceiling:.3f}), pairs in order {own.pairs:.1%} of "
            f"{own.num_pairs}, regret {own.regret:.1%} (repeat-to-repeat {own.floor:.1%}), median error {own.error:.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--models", default="mlp,gpt")
    parser.add_argument("--strategies", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calibration", type=float, default=60.0, help="seconds to calibrate for each number of ranks")
    parser.add_argument("--budget", type=float, default=100.0, help="seconds for each model and number of ranks")
    parser.add_argument(
        "--communication-only", action="store_true", help="no whole steps: many more rounds in the same time"
    )
    parser.add_argument("--picture", help="write the figure (needs matplotlib)")
    parser.add_argument("--output", help="write everything that was measured, as JSON")
    parser.add_argument("--quiet", action="store_true")
    arguments = parser.parse_args()
    rankings = []
    for num_ranks in (int(number) for number in arguments.ranks.split(",")):
        cluster = calibrated(num_ranks, arguments.calibration, arguments.quiet).resized(1, num_ranks)
        for name in arguments.models.split(","):
            graph, batch = MODELS[name]
            settings = RankSettings(
                arguments.strategies,
                arguments.rounds,
                2,
                arguments.budget,
                with_steps=not arguments.communication_only,
                quiet=arguments.quiet,
            )
            rankings.append(rank_locally(graph, cluster, Workload(batch, batch, "float32", "sgd"), settings))
            line(rankings[-1])
    if arguments.picture:
        draw_ranking(rankings, arguments.picture)
    if arguments.output:
        with open(arguments.output, "w", encoding="utf-8") as file:
            json.dump([ranking_document(ranking) for ranking in rankings], file)


if __name__ == "__main__":
    main()
