"""Makes clusters from measurements, and tests their predictions.

`calibrate` measures this system and fits a cluster, `fit` fits a cluster to existing measurements, `predict` compares a cluster
with further measurements, and `rank` compares predicted and measured times of strategies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoddl.calib.campaign import CampaignOptions, counts_in, measure_in_job, measure_locally
from autoddl.calib.clusterfile import Fit, calibrated_document, fit_samples
from autoddl.calib.devices import (
    device_type,
    elementwise_on,
    precisions_on,
    shapes_on,
    sizes_on,
)
from autoddl.calib.measurements import COLLECTIVES, Sample, SampleFile, numbered, read_samples
from autoddl.calib.pictures import draw
from autoddl.costmodel.cluster import Cluster, from_document
from autoddl.costmodel.devices import GPU
from autoddl.costmodel.workload import Workload
from autoddl.costmodel.writing import write_document
from autoddl.pipelines.runtime.ranks.gpus import sees_gpus

from .files import FilePath
from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .measuredjobs import member_of_job, place_on_hosts, place_on_member, run_measuring_job
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

        return fit_text(self.result, self.cluster)

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
    hosts: Sequence[str] | None = None,
    device: str | None = None,
    precisions: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    collectives: Sequence[str] = COLLECTIVES,
    repetitions: int = 100,
    budget_s: float | None = None,
    communication_only: bool = False,
    base: ClusterLike = "local-cpu",
    name: str = "",
    seed: int = 0,
    quiet: bool = False,
    ssh: str | None = None,
    python: str | None = None,
    master_address: str | None = None,
    environment: Mapping[str, str] | None = None,
    log_dir: FilePath | None = None,
) -> Calibration | None:
    """Measure collectives, transfers and matrix products on ranks, and fit a cluster to them.  Requires OneFlow.

    ``hosts`` says where the ranks run.  Without it, a process that Slurm's ``srun``, ``mpirun`` or another launcher started as one
    of several ranks measures in its job, as this rank; otherwise the function starts ranks on this machine.  A job over several
    hosts measures both network levels: groups inside a host, groups with one rank on each host, and the group of all ranks.

    Args:
        samples: A CSV file.  Every sample is added to it as soon as it is measured; samples that it already contains are not
            measured again.
        ranks: Numbers of ranks on this machine.  Each number is measured in a job of its own.
        hosts: Hosts with their numbers of ranks, such as ``["a:8", "b:8"]``, which are reached over ssh.  All ranks form one job.
        device: Type of device, ``"cuda"`` or ``"cpu"``; by default GPUs, if the base cluster has GPUs and OneFlow sees one.
        precisions: Precisions in which products are measured; by default all that the device of the base has a speed for.
        sizes: Message sizes, in bytes; by default 4 KiB to 16 MiB, on GPUs to 256 MiB.
        collectives: Names of the collectives to measure.
        repetitions: Number of repetitions of each measurement.
        budget_s: Stop measuring after this time, in seconds.
        communication_only: Measure no matrix products; the device is then that of the base.
        base, name: As in :func:`autoddl.fit`.
        seed: Seed of the order of the measurements and of the bootstrap.
        quiet: Show no progress bar.
        ssh, python, master_address, environment, log_dir: With ``hosts`` or in a job, as in :func:`autoddl.launch`.

    Returns:
        The calibrated cluster.  In a job that a launcher started, all ranks except rank 0 return None.

    Raises:
        UserError: If a number is out of range, a file cannot be read or written, a host cannot be used, or OneFlow is not
            installed.
        RankError: If a rank failed.
        Interrupted: If ranks on hosts or in a job were ended by SIGINT, SIGTERM or SIGHUP.

    >>> import autoddl, os, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     samples = os.path.join(folder, "samples.csv")
    ...     calibration = autoddl.calibrate(
    ...         samples, ranks=[2], sizes=[4096, 65536, 1 << 20], repetitions=2, communication_only=True, name="here"
    ...     )
    >>> calibration.cluster.name, calibration.cluster.devices_per_node
    ('here', 2)
    """
    base_cluster = cluster_of(base)
    kind = device_type(device, base_cluster, lambda: bool(hosts) or sees_gpus())
    options = CampaignOptions(
        ranks=tuple(ranks),
        sizes=sizes_on(kind) if sizes is None else tuple(sizes),
        collectives=tuple(collectives),
        shapes=() if communication_only else shapes_on(kind),
        elementwise=() if communication_only else elementwise_on(kind),
        precisions=precisions_on(kind, base_cluster, precisions),
        device=kind,
        repetitions=repetitions,
        budget_s=budget_s,
        seed=seed,
        quiet=quiet,
    )
    job_options = {
        "ssh": ssh,
        "python": python,
        "master_address": master_address,
        "environment": environment,
        "log_dir": log_dir,
    }
    file = _measure(options, samples, hosts, base_cluster, job_options)
    return None if file is None else _calibration(fit_samples(numbered(file.samples), seed), base_cluster, name)


def _measure(
    options: CampaignOptions,
    samples: FilePath,
    hosts: Sequence[str] | None,
    base: Cluster,
    job_options: Mapping[str, Any],
) -> SampleFile | None:
    """Measure where `calibrate` says, and return the file of samples; None on ranks of a job other than rank 0."""
    if not hosts and _is_rank():
        return _measure_as_rank(options, samples)
    member = None if hosts else member_of_job(os.environ)
    place = place_on_hosts(hosts) if hosts else None if member is None else place_on_member(member)
    file = SampleFile(samples) if place is None or place.has_rank_0 else None
    if place is not None:
        run_measuring_job(options, file, place, base, **job_options)
    elif file is not None:
        measure_locally(options, file)
    return file


def _is_rank() -> bool:
    """Whether this process has joined other ranks already, as a script of :func:`autoddl.launch` has."""
    flow = sys.modules.get("oneflow")
    return flow is not None and flow.env.get_world_size() > 1


def _measure_as_rank(options: CampaignOptions, samples: FilePath) -> SampleFile | None:
    """Measure on the ranks that this process has joined; all of them call."""
    environment = sys.modules["oneflow"].env
    if environment.get_rank() > 0:
        measure_in_job(options, None, lambda taken: None)
        return None
    file = SampleFile(samples)
    measure_in_job(options, counts_in(file.samples, options, environment.get_world_size()), file.append)
    return file


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
    device: str | None = None,
    precision: str | None = None,
    heads: int | None = None,
    sequence: int | None = None,
    vocabulary: int | None = None,
    dropout: bool = False,
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
        model, inputs, heads, sequence, vocabulary, dropout: As in :func:`autoddl.plan`.
        ranks: Number of ranks.
        cluster: The cluster that predicts the times, usually one that was calibrated on this machine.
        device: Type of device, ``"cuda"`` or ``"cpu"``; by default GPUs, if the cluster has GPUs and OneFlow sees one.
        precision: Precision of the training step; by default float32, on GPUs that of the cluster's device.
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

    devices = cluster_of(cluster, 1, ranks)
    kind = device_type(device, devices, sees_gpus)
    settings = RankSettings(strategies, rounds, repetitions, budget_s, not communication_only, seed, quiet, kind)
    graph = graph_of(model, inputs, heads=heads, sequence=sequence, vocabulary=vocabulary, dropout=dropout)
    samples = 8 * ranks if batch is None else batch
    chosen = precision or (devices.default_precision if kind == GPU else "float32")
    (types,) = precisions_on(kind, devices, [chosen])
    return Ranking(rank_locally(graph, devices, Workload(samples, samples, types, "sgd"), settings))
