"""Makes clusters from measurements, and tests their predictions.

`calibrate` measures this system and fits a cluster, `fit` fits a cluster to existing measurements, `predict` compares a cluster
with further measurements, and `rank` compares predicted and measured times of strategies.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.calib.campaign import CampaignOptions, is_in_job, measure_in_job, measure_locally
from autoddl.calib.clusterfile import Fit, calibrated_document, fit_samples
from autoddl.calib.measurements import COLLECTIVES, Sample, SampleFile, numbered, read_samples
from autoddl.calib.pictures import draw
from autoddl.costmodel.cluster import Cluster, from_document
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document

from .files import FilePath
from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .results import Result

if TYPE_CHECKING:
    from autoddl.calib.ranked import MeasuredRanking

    from ..text.tables import Text

__all__ = ["Calibration", "Ranking", "calibrate", "fit", "predict", "rank"]


@dataclass(frozen=True, repr=False)
class Calibration(Result):
    """A cluster that was fitted to measurements.

    Attributes:
        cluster: The fitted cluster, for :func:`autoddl.plan`.
        result: Fits of all network levels and of the device, with confidence intervals.
    """

    cluster: Cluster
    result: Fit

    def save(self, path: FilePath) -> None:
        """Write the cluster to a file, which :func:`autoddl.plan` accepts as ``cluster``.

        >>> import autoddl, os, tempfile
        >>> rows = ["collective,ranks,bytes,seconds"]
        >>> rows += [f"all-reduce,{n},{b},{1e-5 * n + b / 1e10}" for n in (2, 4, 8) for b in (4096, 65536, 1 << 20, 1 << 24)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     measured, path = os.path.join(folder, "measured.csv"), os.path.join(folder, "ours.json")
        ...     _ = open(measured, "w").write("\\n".join(rows))
        ...     autoddl.fit(measured, base="dgx-a100", name="ours").save(path)
        ...     autoddl.plan("mlp:256,1024,256", cluster=path, nodes=1, batch=64).cluster.name
        'ours'
        """
        write_document(path, self.document)

    def draw(self, path: FilePath) -> None:
        """Draw the measured points and the fitted lines to a file.  Requires matplotlib.

        >>> import autoddl, os, tempfile
        >>> rows = ["collective,ranks,bytes,seconds"]
        >>> rows += [f"all-reduce,{n},{b},{1e-5 * n + b / 1e10}" for n in (2, 4, 8) for b in (4096, 65536, 1 << 20, 1 << 24)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     measured, picture = os.path.join(folder, "measured.csv"), os.path.join(folder, "fit.svg")
        ...     _ = open(measured, "w").write("\\n".join(rows))
        ...     autoddl.fit(measured, base="dgx-a100", name="ours").draw(picture)
        ...     os.path.getsize(picture) > 0
        True
        """
        draw(self.result, path)

    @property
    def document(self) -> dict[str, Any]:
        return self.cluster.document

    @property
    def text(self) -> Text:
        from ..text.fits import fit_text

        return fit_text(self.result)

    def __repr__(self) -> str:
        levels = ", ".join(level.level for level in self.result.levels)
        return f"<Calibration {self.cluster.name}: {levels}; {len(self.result.samples):,} samples>"


def fit(
    measurements: FilePath | Sequence[FilePath], *, base: ClusterLike = "local-cpu", name: str = "", seed: int = 0
) -> Calibration:
    """Fit a cluster to measurements.

    Args:
        measurements: One or more files: CSV files of :func:`autoddl.calibrate`, any CSV files with the columns ``collective``,
            ``ranks``, ``bytes`` and ``seconds``, or outputs of nccl-tests.
        base: The cluster that supplies every parameter that was not measured.
        name: Name of the fitted cluster; by default the name of the base and "calibrated".
        seed: Seed of the bootstrap, which estimates the confidence intervals.

    Raises:
        UserError: If a file cannot be read, or there are too few measurements.

    >>> import autoddl, os, tempfile
    >>> rows = ["collective,ranks,bytes,seconds"]
    >>> rows += [f"all-reduce,{n},{b},{1e-5 * n + b / 1e10}" for n in (2, 4, 8) for b in (4096, 65536, 1048576, 16777216)]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "measured.csv")
    ...     _ = open(path, "w").write("\\n".join(rows))
    ...     calibration = autoddl.fit(path, base="dgx-a100", name="ours")
    >>> calibration.cluster.name, calibration.cluster.devices_per_node
    ('ours', 8)
    """
    samples = _read_measurements(measurements)
    base_cluster = cluster_of(base)
    return _calibration(fit_samples(samples, seed), base_cluster, name)


def _read_measurements(measurements: FilePath | Sequence[FilePath]) -> list[Sample]:
    """Return the samples of one or more files, with repetitions of a measurement numbered in order."""
    paths = [measurements] if isinstance(measurements, (str, os.PathLike)) else list(measurements)
    return numbered([sample for path in paths for sample in read_samples(path)])


def _calibration(result: Fit, base: Cluster, name: str) -> Calibration:
    """Return the cluster of a fit; ``base`` supplies the parameters that were not measured."""
    name = name or f"{base.name} calibrated"
    return Calibration(from_document(calibrated_document(result, base, name), name), result)


def predict(measurements: FilePath | Sequence[FilePath], *, cluster: ClusterLike) -> Text:
    """Compare the predictions of a cluster with measurements that it was not fitted to.

    Args:
        measurements: One or more files, as in :func:`autoddl.fit`.
        cluster: The cluster that predicts.

    Returns:
        A table of the prediction errors, for ``print``.

    Raises:
        UserError: If a file cannot be read, or contains no collectives.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "measured.csv")
    ...     _ = open(path, "w").write("collective,ranks,bytes,seconds\\nall-reduce,4,4096,3e-5\\nall-reduce,4,1048576,4e-4\\n")
    ...     print(str(autoddl.predict(path, cluster="dgx-a100")).splitlines()[0])
    dgx-a100 against these samples, intra-node
    """
    from ..text.fits import errors_text

    samples = _read_measurements(measurements)
    return errors_text(cluster_of(cluster), samples)


def calibrate(
    samples: FilePath,
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
    """Measure collectives, transfers and matrix products on ranks, and fit a cluster to them.  Requires OneFlow.

    The function starts ranks on this machine.  If a launcher (such as Slurm) runs it on every rank of a job, it measures on the
    ranks of that job.

    Args:
        samples: A CSV file.  Every sample is added to it as soon as it is measured; samples that it already contains are not
            measured again.
        ranks: Numbers of ranks.  Each number is measured in a job of its own.
        sizes: Message sizes, in bytes.
        collectives: Names of the collectives to measure.
        repetitions: Number of repetitions of each measurement.
        budget_s: Stop measuring after this time, in seconds.
        communication_only: Measure no matrix products; the device is then that of the base.
        base, name: As in :func:`autoddl.fit`.
        seed: Seed of the order of the measurements and of the bootstrap.
        quiet: Show no progress bar.

    Returns:
        The calibrated cluster.  In a job that a launcher started, all ranks except rank 0 return None.

    Raises:
        UserError: If a number is out of range, a file cannot be read or written, or OneFlow is not installed.
        RankError: If a rank failed.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     samples = os.path.join(folder, "samples.csv")
    ...     calibration = autoddl.calibrate(
    ...         samples, ranks=[2], sizes=[4096, 65536, 1 << 20], repetitions=2, communication_only=True, name="here"
    ...     )
    >>> calibration.cluster.name, calibration.cluster.devices_per_node
    ('here', 2)
    """
    no_products: dict[str, Any] = {"shapes": (), "elementwise": ()}
    options = CampaignOptions(
        ranks=tuple(ranks),
        sizes=tuple(sizes),
        collectives=tuple(collectives),
        repetitions=repetitions,
        budget_s=budget_s,
        seed=seed,
        quiet=quiet,
        **(no_products if communication_only else {}),
    )
    base_cluster = cluster_of(base)
    path = os.fspath(samples)
    if is_in_job():
        if measure_in_job(options, path) is None:
            return None
        file = SampleFile(path)
    else:
        file = SampleFile(path)
        measure_locally(options, file)
    return _calibration(fit_samples(numbered(file.samples), seed), base_cluster, name)


# ---- Ranking -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Ranking(Result):
    """Predicted and measured times of strategies that ran on ranks of this machine.

    Attributes:
        result: The strategies, their predicted and measured times, and the scores of the prediction.
    """

    result: MeasuredRanking

    def draw(self, path: FilePath) -> None:
        """Draw predicted against measured times to a file.  Requires matplotlib.

        >>> import autoddl, os, tempfile
        >>> ranking = autoddl.rank("mlp:64,64", ranks=2, strategies=3, rounds=2, repetitions=1, communication_only=True)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ranking.draw(os.path.join(folder, "ranking.svg"))
        ...     os.listdir(folder)
        ['ranking.svg']
        """
        from autoddl.calib.ranked import draw_ranking

        draw_ranking([self.result], os.fspath(path))

    @property
    def document(self) -> dict[str, Any]:
        from autoddl.calib.ranked import ranking_document

        return ranking_document(self.result)

    @property
    def text(self) -> Text:
        from ..text.rankings import ranking_text

        return ranking_text(self.result)

    def __repr__(self) -> str:
        return f"<Ranking of {len(self.result.strategies)} strategies of {self.result.graph.name}>"


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
    """Run strategies of a model on ranks of this machine, and compare measured with predicted times.  Requires OneFlow.

    Args:
        model, inputs, heads, sequence, vocabulary: As in :func:`autoddl.plan`.
        ranks: Number of ranks.
        cluster: The cluster that predicts the times, usually one that was calibrated on this machine.
        batch: Samples per training step over all ranks; by default 8 per rank.
        strategies: Number of strategies to run.
        rounds: Number of rounds.  Every round measures each strategy once, so that slow drifts of the machine affect all alike.
        repetitions: Number of repetitions of each strategy in a round.
        budget_s: Start no further round after this time, in seconds.
        communication_only: Measure the communication only, not whole training steps.
        seed: Seed of the choice of strategies and of their order.
        quiet: Show no progress bar.

    Raises:
        UserError: If a number is out of range, the model cannot be divided over the ranks, or OneFlow is not installed.
        RankError: If a rank failed.

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
