"""Experiment "ways": our plan, OneFlow's auto-parallel, and the families, each tuned over its own freedom, in one job.

What every rank does is in `cluster_job`.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from cluster_common import ClusterSize, EmulatedCluster, agreement, calibrated, launch_words, run, show, started
from cluster_job import Result, Specification, Way
from cluster_pictures import Bars, draw_bars

import autoddl
from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import format_bytes, format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.search.baselines import baselines
from autoddl.zoo import Transformer
from autoddl.zoo.builtin import BuiltIn, MLPSizes, VGGSizes

__all__ = ["CASES", "Case", "best_of_family", "measured", "plan_of", "ways", "ways_of"]

#: Ranks sum the gradients of several layers together, in vectors of at least so many bytes; prices know it.
BUCKET_BYTES = 4 * 2**20
JOB = Path(__file__).with_name("cluster_job.py")


@dataclass(frozen=True)
class Case:
    """A model with its batch."""

    name: str
    built_in: BuiltIn
    batch: int


def _gpt(width: int) -> BuiltIn:
    return BuiltIn("gpt", Transformer("gpt", layers=2, width=width, heads=4, sequence=64, vocabulary=512))


#: On two hosts the best plan of the first GPT is data parallel: there, no way can be better than a family.
CASES = (
    Case("perceptron 1024-2048-2048-1024", BuiltIn("mlp", MLPSizes((1024, 2048, 2048, 1024))), 64),
    Case("perceptron 512-1024-1024-512", BuiltIn("mlp", MLPSizes((512, 1024, 1024, 512))), 1024),
    Case("GPT of 2 blocks of width 256", _gpt(256), 16),
    Case("GPT of 2 blocks of width 512", _gpt(512), 4),
    Case("VGG-11 of 32 x 32 pixels", BuiltIn("vgg", VGGSizes(depth=11, image=32, classes=64, hidden=512)), 32),
)


# ---- Ways ----------------------------------------------------------------------------------------------------------------


def best_of_family(graph: LayerGraph, cluster: Cluster, name: str, batch: int) -> tuple[Assessment, Way] | None:
    """The best member of a family on a cluster, over its meshes and micro-batches; None if none divides the model."""
    best: tuple[float, Assessment, Way] = (inf, None, None)  # type: ignore[assignment]
    for member in baselines(graph, cluster.level_sizes):
        if member.name != name:
            continue
        for micro_batch in (size for size in (batch, batch // 2, batch // 4) if size):
            workload = Workload(batch, micro_batch, "float32", optimizer="sgd", bucket_bytes=BUCKET_BYTES)
            try:
                found = assess(graph, cluster, workload, member.strategies)
            except UserError:
                continue
            if found.step_s < best[0]:
                best = found.step_s, found, Way(f"{name} ({member.mesh})", "autoddl", workload, member.strategies)
    return None if best[1] is None else best[1:]


def plan_of(case: Case, path: Path, **options: Any) -> autoddl.Plan:
    """Our plan for a cluster, by default with gradients in buckets; ``options`` are those of `autoddl.plan`."""
    chosen = {"optimizer": "sgd", "precision": "float32", "bucket_bytes": BUCKET_BYTES, "quiet": True, **options}
    return autoddl.plan(case.built_in.graph(), cluster=path, batch=case.batch, **chosen)


def ways_of(case: Case, path: Path) -> tuple[autoddl.Plan, list[Way], dict[str, Assessment]]:
    """Our plan, all ways, and the price of each that has one."""
    graph, cluster = case.built_in.graph(), load_cluster(path)
    plan = plan_of(case, path)
    ours = Way("AutoDDL", "autoddl", plan.workload, plan.strategies)
    ways, prices = [ours], {ours.name: assess(graph, cluster, plan.workload, plan.strategies)}
    ways.append(replace(ours, name="AutoDDL, nn.Graph", runtime="graph"))
    for family in ("data parallel", "megatron", "summa"):
        found = best_of_family(graph, cluster, family, case.batch)
        if found is not None:
            price, way = found
            ways += [way, replace(way, name=f"{family}, nn.Graph", runtime="graph")]
            prices[way.name] = price
    ways.append(Way("OneFlow auto-parallel", "auto-parallel", Workload(case.batch, case.batch, "float32")))
    return plan, ways, prices


def measured(
    cluster: EmulatedCluster, case: Case, plan: autoddl.Plan, ways: Sequence[Way], folder: Path, rounds: int, steps: int
) -> dict[str, Result]:
    """Run all ways in one job."""
    plan.save(folder / "plan.json")
    script = [str(JOB), *launch_words(cluster), "--", "specification", "result"]
    aborted: dict[str, Result] = {}
    while True:
        running = tuple(way for way in ways if way.name not in aborted)
        specification = Specification(case.built_in, running, rounds, steps)
        (folder / "specification").write_bytes(pickle.dumps(specification))
        try:
            run(cluster, "launch", "plan.json", *script, folder=folder)
        except RuntimeError as error:
            # Where OneFlow's own graphs cannot be compiled, the process aborts; the others then run without them.
            suspects = [way.name for way in running if way.runtime == "auto-parallel"] or [
                way.name for way in running if way.runtime == "graph"
            ]
            if not suspects:
                raise
            fault = str(error).strip().splitlines()[-1]
            aborted.update((name, Result([], [], f"the job fails: {fault}")) for name in suspects)
            continue
        results = pickle.loads((folder / "result").read_bytes())
        return {**{name: Result(**fields) for name, fields in results.items()}, **aborted}


def rows_of(
    ways: Sequence[Way], prices: Mapping[str, Assessment], results: Mapping[str, Result]
) -> list[tuple[str, ...]]:
    """A row for each way, with its times as multiples of our plan's."""
    own, losses = results["AutoDDL"].median_s, results["AutoDDL"].losses
    rows = []
    for way in ways:
        result, price = results[way.name], prices.get(way.name)
        if result.fault:
            rows.append((way.name, "-", "-", "cannot run", "-", "-"))
            continue
        assert all(abs(loss / other - 1) < 1e-4 for loss, other in zip(result.losses, losses)), (
            way.name,
            result.losses,
        )
        seconds = result.median_s
        rows.append(
            (
                way.name,
                format_bytes(price.sent_bytes) if price else "-",
                format_seconds(price.step_s) if price else "-",
                format_seconds(seconds),
                f"{seconds / price.step_s:.2f}" if price else "-",
                f"{seconds / own:.2f}x",
            )
        )
    return rows


HEADINGS = ("way", "sent by a rank", "predicted", "measured", "measured / predicted", "to AutoDDL")


def ways(
    size: ClusterSize,
    only: str,
    calibration: Path | None,
    budget_s: float,
    sizes: str,
    rounds: int,
    steps: int,
    picture: Path | None = None,
) -> None:
    """Run all ways of the models whose name holds a text."""
    groups: list[Bars] = []
    with started(size) as (cluster, folder):
        path = (calibration or calibrated(cluster, folder, budget_s, sizes)).resolve()
        for case in (case for case in CASES if only in case.name):
            plan, found, prices = ways_of(case, path)
            results = measured(cluster, case, plan, found, folder, rounds, steps)
            title = f"{case.name}, batch {case.batch}: {size.described()}"
            show(title, HEADINGS, rows_of(found, prices, results))
            for way in found:
                if fault := results[way.name].fault:
                    print(f"{way.name}: {fault}")
            print(agreement([(price.step_s, results[name].median_s) for name, price in prices.items()]))
            bars = [
                (way.name, results[way.name].median_s, prices[way.name].step_s if way.name in prices else None)
                for way in found
                if not results[way.name].fault
            ]
            groups.append((f"{case.name}, batch {case.batch}", bars))
    if picture is not None:
        draw_bars(picture, groups)
