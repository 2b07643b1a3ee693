"""Clusters from measurements: `calibrate` takes them, `fit` makes a cluster of them, `rank` tests it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from autoddl.calib.campaign import CampaignOptions, is_in_job, measure_in_job, measure_locally
from autoddl.calib.clusterfile import Fit, calibrated_document, fit_samples
from autoddl.calib.measurements import COLLECTIVES, SampleFile, numbered, read_samples
from autoddl.calib.pictures import draw
from autoddl.costmodel.cluster import Cluster, from_document
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document

from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .results import Result

if TYPE_CHECKING:
    from autoddl.calib.ranked import MeasuredRanking as Ranked

    from ..text.tables import Text

__all__ = ["Calibration", "Ranking", "calibrate", "fit", "predict", "rank"]

Path = Union[str, "os.PathLike[str]"]


@dataclass(frozen=True, repr=False)
class Calibration(Result):
    """A cluster that was fitted to measurements.

    Attributes:
        cluster: what :func:`autoddl.plan` takes.
        found: the fits of all network levels and of the device, with their intervals.
    """

    cluster: Cluster
    found: Fit

    def save(self, path: Path) -> None:
        """Write the cluster file."""
        write_document(path, self.document)

    def draw(self, path: Path) -> None:
        """Draw measured points and fitted lines; needs matplotlib."""
        draw(self.found, path)

    @property
    def document(self) -> dict[str, Any]:
        return self.cluster.document

    @property
    def text(self) -> Text:
        from ..text.fits import fit_text

        return fit_text(self.found)

    def __repr__(self) -> str:
        levels = ", ".join(level.level for level in self.found.levels)
        return f"<Calibration {self.cluster.name}: {levels}; {len(self.found.samples):,} samples>"


def fit(
    measurements: Path | Sequence[Path], *, base: ClusterLike = "local-cpu", name: str = "", seed: int = 0
) -> Calibration:
    """Fit a cluster to measurements.

    Args:
        measurements: files: CSV of :func:`autoddl.calibrate`, any CSV with the columns collective, ranks, bytes and seconds, or the
            output of nccl-tests.
        base: the cluster that what was not measured is taken from.
        name: of the cluster; by default the base's with "calibrated".
        seed: of the bootstrap.

    Raises:
        UserError: a file cannot be read, or there are too few measurements.

    >>> import autoddl, os, tempfile
    >>> rows = ["collective,ranks,bytes,seconds"]
    >>> rows += [f"all-reduce,{n},{b},{1e-5 * n + b / 1e10}" for n in (2, 4, 8) for b in (4096, 65536, 1048576, 16777216)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "measured.csv")
    ...     _ = open(path, "w").write("\\n".join(rows))
    ...     found = autoddl.fit(path, base="dgx-a100", name="ours")
    >>> found.cluster.name, found.cluster.devices_per_node
    ('ours', 8)
    """
    paths = [measurements] if isinstance(measurements, (str, os.PathLike)) else list(measurements)
    samples = numbered([sample for path in paths for sample in read_samples(path)])
    known = cluster_of(base)
    return _calibration(fit_samples(samples, seed), known, name)


def _calibration(found: Fit, base: Cluster, name: str) -> Calibration:
    name = name or f"{base.name} calibrated"
    return Calibration(from_document(calibrated_document(found, base, name), name), found)


def predict(measurements: Path | Sequence[Path], *, cluster: ClusterLike) -> Text:
    """How well a cluster predicts measurements that it was not fitted to: a table of its errors, to be printed.

    Raises:
        UserError: a file cannot be read, or there are no collectives in it.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "measured.csv")
    ...     _ = open(path, "w").write("collective,ranks,bytes,seconds\\nall-reduce,4,4096,3e-5\\nall-reduce,4,1048576,4e-4\\n")
    ...     print(str(autoddl.predict(path, cluster="dgx-a100")).splitlines()[0])
    dgx-a100 against these samples, intra-node
    """
    from ..text.fits import errors_text

    paths = [measurements] if isinstance(measurements, (str, os.PathLike)) else list(measurements)
    samples = numbered([sample for path in paths for sample in read_samples(path)])
    return errors_text(cluster_of(cluster), samples)


def calibrate(
    samples: Path,
    *,
    ranks: Sequence[int] = (2, 4),
    sizes: Sequence[int] = CampaignOptions.sizes,
    collectives: Sequence[str] = COLLECTIVES,
    repetitions: int = 100,
    budget_s: float | None = None,
    communication_only: bool = False,
    base: ClusterLike = "local-cpu",
    name: str = "",
    seed: int = 0,
    quiet: bool = False,
) -> Calibration | None:
    """Measure collectives, transfers and products on ranks of this machine, and fit a cluster to them; needs OneFlow.

    Started by a cluster's launcher on every rank of a job, it measures on those ranks.

    Args:
        samples: the file that keeps the samples as they are taken; what it has already is not measured again.
        ranks: numbers of ranks, one job for each.
        sizes: of messages [bytes].
        collectives: which ones.
        repetitions: of each measurement.
        budget_s: stop measuring after this time.
        communication_only: no products: leave the device as it is in the base.
        base, name, seed: as of :func:`autoddl.fit`; the seed also orders the measurements.
        quiet: no progress bar.

    Returns:
        The calibrated cluster; None on all ranks of a job but the first.

    Raises:
        UserError: a number is out of range, a file cannot be read or written, or OneFlow is not there.
        RankError: a rank failed.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     samples = os.path.join(folder, "samples.csv")
    ...     found = autoddl.calibrate(
    ...         samples, ranks=[2], sizes=[4096, 65536, 1 << 20], repetitions=2, communication_only=True, name="here"
    ...     )
    >>> found.cluster.name, found.cluster.devices_per_node
    ('here', 2)
    """
    work: dict[str, Any] = {"shapes": (), "elementwise": ()} if communication_only else {}
    options = CampaignOptions(
        ranks=tuple(ranks),
        sizes=tuple(sizes),
        collectives=tuple(collectives),
        repetitions=repetitions,
        budget_s=budget_s,
        seed=seed,
        quiet=quiet,
        **work,
    )
    known = cluster_of(base)
    path = os.fspath(samples)
    if is_in_job():
        if measure_in_job(options, path) is None:
            return None
        file = SampleFile(path)
    else:
        file = SampleFile(path)
        measure_locally(options, file)
    return _calibration(fit_samples(numbered(file.samples), seed), known, name)


# ---- Ranking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Ranking(Result):
    """Strategies that ran on real ranks: predicted against measured times.

    Attributes:
        found: strategies, times and scores.
    """

    found: Ranked

    def draw(self, path: Path) -> None:
        """Draw predicted against measured times; needs matplotlib."""
        from autoddl.calib.ranked import draw_ranking

        draw_ranking([self.found], os.fspath(path))

    @property
    def document(self) -> dict[str, Any]:
        from autoddl.calib.ranked import ranking_document

        return ranking_document(self.found)

    @property
    def text(self) -> Text:
        from ..text.rankings import ranking_text

        return ranking_text(self.found)

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.found.strategies)} strategies of {self.found.graph.name}>"


def rank(
    model: ModelLike,
    inputs: Any = None,
    *,
    ranks: int,
    cluster: ClusterLike = "local-cpu",
    heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
    batch: int | None = None,
    strategies: int = 40,
    rounds: int = 6,
    repetitions: int = 3,
    budget_s: float | None = None,
    communication_only: bool = False,
    seed: int = 0,
    quiet: bool = False,
) -> Ranking:
    """Run strategies of a model on local ranks, and compare their times with what was predicted; needs OneFlow.

    Args:
        model, inputs, heads, sequence, vocabulary: as of :func:`autoddl.plan`.
        ranks: local ranks.
        cluster: what to predict with: a calibrated one.
        batch: samples per step over all ranks; 8 for each by default.
        strategies: how many to run.
        rounds, repetitions: interleaved visits of each strategy, and repetitions in a visit.
        budget_s: begin no more rounds after this time.
        communication_only: no whole training steps.
        seed: of the choice of strategies and their order.
        quiet: no progress bar.

    Raises:
        UserError: a number is out of range, the model does not divide over the ranks, or OneFlow is not there.
        RankError: a rank failed.

    >>> import autoddl
    >>> autoddl.rank("mlp:64,64", ranks=2, strategies=3, rounds=2, repetitions=1, communication_only=True)
    <Ranking of 3 strategies of mlp:64,64>
    """
    from autoddl.calib.ranked import RankSettings, rank_locally

    settings = RankSettings(strategies, rounds, repetitions, budget_s, not communication_only, seed, quiet)
    graph = graph_of(model, inputs, heads=heads, sequence=sequence, vocabulary=vocabulary)
    devices = cluster_of(cluster, 1, ranks)
    samples = 8 * ranks if batch is None else batch
    return Ranking(rank_locally(graph, devices, Workload(samples, samples, "float32", "sgd"), settings))
