"""Training runs that were measured, and what the cost model predicts for them.

A file of runs is a CSV file with a row per run.  Columns:

====================================  ==========================================================================================
column                                value
====================================  ==========================================================================================
id, group                             name of the run; group of hardware and software that shares one efficiency
hardware                              name of a built-in cluster, or a cluster file; with ``-fp8`` behind a name: in FP8
family                                of the model: gpt, llama or bert
layers, hidden, heads, seq, vocab     its sizes
kv_heads, intermediate                0 for as many as heads, and for 4 hidden
tied                                  whether the output projection is the token table
gpus, tp, pp, vp, dp                  devices; tensor parallel, stages, chunks per stage (interleaving), data parallel
mbs, gbs                              samples per micro-batch and replica, and per step
recompute                             full (every block keeps its input), selective (attention), none
seq_parallel, zero, flash             Megatron-LM's sequence parallelism; ZeRO stage (0 or 1); fused attention
measured_s                            seconds per step
memory_gib                            peak memory per device [GiB], where it was measured
====================================  ==========================================================================================

Columns ``precision`` and ``overlap`` (:class:`autoddl.costmodel.workload.Workload`) may follow; other columns are ignored.  A
run in FP8 overlaps communication if it does not say otherwise, as Transformer Engine does.  Gradients are accumulated and summed in
float32, as Megatron-LM does.  The vocabulary is padded to a multiple of 128 that tensor parallelism divides.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from autoddl.calib import runfit
from autoddl.calib.runfit import FACTORS, GroupFit, fit_group, run_times
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.reading import csv_rows, parse_figure, read_text, shown_path
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.configuration import Configuration
from autoddl.pipelines.joint.evaluation import Evaluation, evaluate
from autoddl.pipelines.joint.partition import Chain, chain_of
from autoddl.pipelines.joint.uniform import UniformLayout, uniform_configuration

from .zoo.named import FAMILIES
from .zoo.transformers import Transformer, pad_vocabulary

__all__ = [
    "MeasuredRun",
    "PricedRun",
    "PricedRuns",
    "RunGroup",
    "RunRanking",
    "price_runs",
    "rank_runs",
    "read_runs",
]

#: Ways of recomputation by Megatron-LM's words.
RECOMPUTATIONS = {"none": "none", "selective": "selective", "full": "blocks"}
_FP8 = "-fp8"
#: The name and the file of the published runs that come with the package.
PUBLISHED, PUBLISHED_RUNS = "published", Path(runfit.__file__).with_name("published_runs.csv")
#: The columns that a file of runs must have.
COLUMNS = (
    *(
        "id",
        "group",
        "hardware",
        "family",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "intermediate",
        "seq",
        "vocab",
        "tied",
    ),
    *("gpus", "tp", "pp", "vp", "dp", "mbs", "gbs", "recompute", "seq_parallel", "zero", "flash", "measured_s"),
)


@dataclass(frozen=True)
class MeasuredRun:
    """A row of a file of runs.

    Attributes:
        name, group: of the run.
        hardware: name of a built-in cluster, or path of a cluster file.
        family, model: family and sizes of the model.
        num_devices: number of devices.
        layout: degrees of parallelism.
        workload: batch, micro-batch over all replicas, precision, recomputation and so on.
        measured_s: seconds per step.
        memory_bytes: peak memory per device; None if it was not measured.
    """

    name: str
    group: str
    hardware: str
    family: str
    model: Transformer
    num_devices: int
    layout: UniformLayout
    workload: Workload
    measured_s: float
    memory_bytes: float | None

    def cluster(self) -> Cluster:
        """The cluster of the run: as many of its nodes as the devices need, or a part of one node.

        Raises:
            UserError: there is no such cluster, or the devices do not fill its nodes.
        """
        cluster = load_cluster(self.hardware)
        per_node = min(self.num_devices, cluster.devices_per_node)
        if self.num_devices % per_node:
            raise UserError(f"{self.num_devices} gpus do not fill nodes of {per_node}")
        return cluster.resized(self.num_devices // per_node, per_node)


@dataclass(frozen=True)
class PricedRun:
    """A run with its prediction.

    Attributes:
        run: the run.
        efficiency: efficiency relative to that of the cluster, at which the run was predicted.
        predicted_s: predicted seconds per step; None if the run cannot be priced.
        memory_bytes: predicted peak memory per device, with that of the framework; None if the run cannot be priced.
        capacity_bytes: memory of the device.
        fault: why the run cannot be priced; empty if it can.
    """

    run: MeasuredRun
    efficiency: float = 1.0
    predicted_s: float | None = None
    memory_bytes: float | None = None
    capacity_bytes: float = math.inf
    fault: str = ""

    @property
    def error(self) -> float | None:
        """The relative error of the predicted step; positive if it is too slow."""
        return None if self.predicted_s is None else self.predicted_s / self.run.measured_s - 1

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted memory; None if either is not known."""
        if self.memory_bytes is None or self.run.memory_bytes is None:
            return None
        return self.memory_bytes / self.run.memory_bytes - 1

    @property
    def is_infeasible(self) -> bool:
        """Whether the run would need more memory than the device has."""
        return self.memory_bytes is not None and self.memory_bytes > self.capacity_bytes


@dataclass(frozen=True)
class RunGroup:
    """The runs of one group, and the efficiency that fits them.

    Attributes:
        name: of the group.
        num_runs: number of its runs that can be priced.
        fit: the efficiency and its errors.
        base_efficiency: the efficiency of products of the cluster, which the fitted one is relative to.
    """

    name: str
    num_runs: int
    fit: GroupFit
    base_efficiency: float

    @property
    def efficiency(self) -> float:
        """The fitted part of the peak that large products reach."""
        return self.fit.efficiency * self.base_efficiency


@dataclass(frozen=True)
class PricedRuns:
    """The predictions of a file of runs.

    Attributes:
        runs: the runs, in the order of the file.
        groups: the groups, in the order of their first runs.
        is_fitted: whether the runs were predicted with the efficiencies of their groups, not with those of the clusters.
    """

    runs: tuple[PricedRun, ...]
    groups: tuple[RunGroup, ...]
    is_fitted: bool

    @property
    def mean_abs_error(self) -> float:
        """Mean of the relative errors of the predicted steps."""
        errors = [abs(run.error) for run in self.runs if run.error is not None]
        return sum(errors) / len(errors) if errors else math.nan

    @property
    def leave_one_out(self) -> float:
        """Mean of the relative errors of runs that are predicted with the efficiency of the other runs of their group."""
        total = sum(group.num_runs for group in self.groups)
        return sum(group.num_runs * group.fit.leave_one_out for group in self.groups) / total if total else math.nan

    @property
    def median_memory_error(self) -> float | None:
        """Median of the relative errors of the predicted memory; None if no memory was measured."""
        errors = sorted(abs(run.memory_error) for run in self.runs if run.memory_error is not None)
        middle = len(errors) // 2
        return (errors[middle] + errors[-1 - middle]) / 2 if errors else None


def read_runs(path: str | os.PathLike[str]) -> tuple[MeasuredRun, ...]:
    """Read a file of runs; the name ``published`` stands for the runs that come with the package.

    Raises:
        UserError: the file cannot be read, a column is missing, or a value is out of range; the message names the row.
    """
    if os.fspath(path) == PUBLISHED:
        path = PUBLISHED_RUNS
    where = shown_path(path)
    (_, header), *rows = list(csv_rows(read_text(path), where)) or [(0, [])]
    columns = [name.strip() for name in header]
    missing = [name for name in COLUMNS if name not in columns]
    if missing:
        raise UserError(f"{where}: lacks the columns {', '.join(missing)}; a file of runs has {', '.join(COLUMNS)}")
    runs = []
    for line, cells in rows:
        if len(cells) != len(columns):
            raise UserError(f"{where}: line {line} has {len(cells)} values, the header has {len(columns)} columns")
        runs.append(_run_of(_Row(dict(zip(columns, cells)), f"{where}: line {line}")))
    if not runs:
        raise UserError(f"{where}: has no runs, should have a row for each")
    return tuple(runs)


class _Row:
    """The values of a row by column, with checks."""

    def __init__(self, values: Mapping[str, str], where: str):
        self.values, self.where = values, where

    def text(self, column: str, default: str = "") -> str:
        return self.values.get(column, "").strip() or default

    def whole(self, column: str, minimum: int = 1) -> int:
        text = self.text(column)
        if not (text.isascii() and text.isdigit()) or not minimum <= int(text) < 2**40:
            raise UserError(f"{self.where}: {column} is {quote(text)}, should be a whole number of at least {minimum}")
        return int(text)

    def flag(self, column: str) -> bool:
        text = self.text(column)
        if text.lower() not in ("true", "false", "0", "1"):
            raise UserError(f"{self.where}: {column} is {quote(text)}, should be True or False")
        return text.lower() in ("true", "1")

    def choice(self, column: str, words: Sequence[str], default: str = "") -> str:
        text = self.text(column, default)
        if text not in words:
            raise UserError(f"{self.where}: {column} is {quote(text)}, should be one of {', '.join(words)}")
        return text

    def figure(self, column: str) -> float:
        value = parse_figure(self.text(column))
        if not 0 < value < math.inf:
            raise UserError(f"{self.where}: {column} is {quote(self.text(column))}, should be a number of more than 0")
        return value


def _run_of(row: _Row) -> MeasuredRun:
    hardware, family = row.text("hardware"), row.choice("family", tuple(FAMILIES))
    is_fp8 = hardware.endswith(_FP8)
    tensor_parallel, data_parallel = row.whole("tp"), row.whole("dp")
    precision = row.text("precision", "fp8" if is_fp8 else "mixed")
    memory = row.figure("memory_gib") * 2**30 if row.text("memory_gib") else None
    try:
        model = Transformer(
            row.text("id"),
            row.whole("layers"),
            row.whole("hidden"),
            row.whole("heads"),
            row.whole("seq"),
            _padded_vocabulary(row.whole("vocab"), tensor_parallel),
            intermediate=row.whole("intermediate", 0),
            kv_heads=row.whole("kv_heads", 0) if family == "llama" else 0,
            activation="silu" if family == "llama" else "gelu",
            tied=row.flag("tied"),
        )
        layout = UniformLayout(tensor_parallel, row.whole("pp"), data_parallel, row.whole("vp"))
        workload = Workload(
            batch=row.whole("gbs"),
            micro_batch=row.whole("mbs") * data_parallel,
            precision=precision,
            recompute=RECOMPUTATIONS[row.choice("recompute", tuple(RECOMPUTATIONS))],
            attention="fused" if row.flag("flash") else "dense",
            gradients="master",
            zero=min(row.whole("zero", 0), 1),
            activations="regathered" if row.flag("seq_parallel") else "copied",
            overlap=row.text("overlap", "all" if precision == "fp8" else "none"),
        )
    except UserError as error:
        raise error if str(error).startswith(row.where) else UserError(f"{row.where}: {error}") from None
    return MeasuredRun(
        name=row.text("id"),
        group=row.text("group"),
        hardware=hardware[: -len(_FP8)] if is_fp8 else hardware,
        family=family,
        model=model,
        num_devices=row.whole("gpus"),
        layout=layout,
        workload=workload,
        measured_s=row.figure("measured_s"),
        memory_bytes=memory,
    )


def _padded_vocabulary(vocabulary: int, tensor_parallel: int) -> int:
    """The least multiple of 128 and of the tensor parallel degree that is not below the vocabulary."""
    multiple = math.lcm(pad_vocabulary(1), tensor_parallel)
    return -(-vocabulary // multiple) * multiple


@lru_cache(maxsize=256)
def _chain(family: str, model: Transformer) -> Chain:
    return chain_of(FAMILIES[family](model))


@dataclass(frozen=True)
class _Configured:
    """A run as the cost model sees it: its model, its part of the cluster, and its configuration."""

    chain: Chain
    cluster: Cluster
    configuration: Configuration

    def at(self, efficiency: float) -> Evaluation:
        """Evaluate the run at an efficiency relative to that of the cluster.

        Raises:
            UserError: the configuration does not fit the model or the cluster.
        """
        device = self.cluster.device
        inside = device.efficiency if device.core_efficiency is None else device.core_efficiency
        scaled = replace(device, efficiency=efficiency * device.efficiency, core_efficiency=efficiency * inside)
        return evaluate(self.chain, replace(self.cluster, device=scaled), self.configuration)


def _configured(run: MeasuredRun) -> _Configured:
    """Prepare a run for its evaluations.

    Raises:
        UserError: the configuration does not fit the model or the cluster.
    """
    cluster = run.cluster()
    chain = _chain(run.family, replace(run.model, name=""))
    return _Configured(chain, cluster, uniform_configuration(chain, cluster, run.layout, run.workload))


def price_runs(runs: Sequence[MeasuredRun], is_fitted: bool = False) -> PricedRuns:
    """Predict the step and the memory of runs, and fit the efficiency of every group.

    Args:
        runs: the runs.
        is_fitted: predict every run with the efficiency that fits its group, in place of that of its cluster.
    """
    steps: dict[int, tuple[float, float]] = {}
    faults: dict[int, str] = {}
    configured: dict[int, _Configured] = {}
    for number, run in enumerate(runs):
        try:
            configured[number] = _configured(run)
            low, high = (configured[number].at(factor).step_s for factor in FACTORS)
            steps[number] = (low, high)
        except UserError as error:
            faults[number] = str(error)
    members: dict[str, list[int]] = {}
    for number in steps:
        members.setdefault(runs[number].group, []).append(number)
    groups = tuple(
        RunGroup(
            name,
            len(numbers),
            fit_group([run_times(steps[number], runs[number].measured_s) for number in numbers]),
            configured[numbers[0]].cluster.device.efficiency,
        )
        for name, numbers in members.items()
    )
    efficiencies = {group.name: group.fit.efficiency for group in groups}
    priced = []
    for number, run in enumerate(runs):
        if number in faults:
            priced.append(PricedRun(run, fault=faults[number]))
            continue
        efficiency = efficiencies[run.group] if is_fitted else 1.0
        found = configured[number].at(efficiency)
        device = configured[number].cluster.device
        memory = found.memory_bytes + device.framework_bytes
        priced.append(PricedRun(run, efficiency, found.step_s, memory, device.memory_bytes))
    return PricedRuns(tuple(priced), groups, is_fitted)


# ---- The order of configurations ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRanking:
    """How well predictions order the configurations of one model on one number of devices with one batch.

    Attributes:
        name: the model, the devices and the batch.
        num_pairs: pairs of configurations whose measured steps differ by more than the scatter.
        num_ordered: those that are predicted in the order in which they were measured.
        num_undecided: pairs whose measured steps differ by less than the scatter: measurements do not order them.
        scatter: the largest relative difference of two measurements of the same configuration on the same hardware; None if none
            was measured twice.  Then pairs are undecided only if their measurements are equal.
    """

    name: str
    num_pairs: int
    num_ordered: int
    num_undecided: int
    scatter: float | None


def rank_runs(priced: PricedRuns) -> tuple[RunRanking, ...]:
    """Compare the predicted order of configurations with the measured one, for models with several configurations."""
    same: dict[object, list[PricedRun]] = {}
    for one in priced.runs:
        if one.predicted_s is not None:
            run = one.run
            key = (run.hardware, replace(run.model, name=""), run.num_devices, run.workload.batch)
            same.setdefault(key, []).append(one)
    scatters = _scatters(priced)
    rankings = []
    for members in same.values():
        if len({(one.run.layout, one.run.workload) for one in members}) < 2:
            continue
        run, scatter = members[0].run, scatters.get(members[0].run.hardware)
        num_pairs = num_ordered = num_undecided = 0
        for number, first in enumerate(members):
            for second in members[:number]:
                measured, predicted = _log_ratio(first, second)
                if abs(measured) <= math.log1p(scatter or 0.0):
                    num_undecided += 1
                else:
                    num_pairs += 1
                    num_ordered += measured * predicted > 0
        model = f"{run.family}:{run.model.layers}x{run.model.width}"
        name = f"{model} on {run.num_devices} x {run.hardware}, batch {run.workload.batch}"
        rankings.append(RunRanking(name, num_pairs, num_ordered, num_undecided, scatter))
    return tuple(rankings)


def _log_ratio(first: PricedRun, second: PricedRun) -> tuple[float, float]:
    """The logarithms of the ratios of the measured and of the predicted steps."""
    assert first.predicted_s is not None and second.predicted_s is not None
    return math.log(first.run.measured_s / second.run.measured_s), math.log(first.predicted_s / second.predicted_s)


def _scatters(priced: PricedRuns) -> dict[str, float]:
    """Per hardware, the largest relative difference of two measurements of the same configuration."""
    repeats: dict[str, dict[object, list[float]]] = {}
    for one in priced.runs:
        run = one.run
        key = (replace(run.model, name=""), run.num_devices, run.layout, run.workload)
        repeats.setdefault(run.hardware, {}).setdefault(key, []).append(run.measured_s)
    scatters: dict[str, float] = {}
    for hardware, of_configurations in repeats.items():
        for steps in (steps for steps in of_configurations.values() if len(steps) > 1):
            scatters[hardware] = max(scatters.get(hardware, 0.0), max(steps) / min(steps) - 1)
    return scatters
