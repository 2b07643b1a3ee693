"""`price_runs`: predictions for training runs that were measured."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.cluster import from_document
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import counted

from ..measuredruns import PricedRun, PricedRuns, RunGroup, read_runs
from ..measuredruns import price_runs as _price_runs
from .files import FilePath
from .results import Result

if TYPE_CHECKING:
    from autoddl.costmodel.cluster import Cluster

    from ..text.tables import Text

__all__ = ["RunPredictions", "fit_runs", "price_runs"]


@dataclass(frozen=True, repr=False)
class RunPredictions(Result):
    """Predictions for measured training runs.

    Attributes:
        result: The runs with their predictions, and the groups with the efficiencies that fit them.
    """

    result: PricedRuns

    @property
    def mean_abs_error(self) -> float:
        """Mean of the relative errors of the predicted steps."""
        return self.result.mean_abs_error

    @property
    def document(self) -> dict[str, Any]:
        return {
            "format": "autoddl-runs",
            "version": 1,
            "rows": list(map(_row, self.result.runs)),
            "groups": list(map(_group, self.result.groups)),
            "mean_abs_error": self.result.mean_abs_error,
            "leave_one_out": self.result.leave_one_out,
            "median_memory_error": self.result.median_memory_error,
            "fitted": self.result.is_fitted,
        }

    @property
    def text(self) -> Text:
        from ..text.measuredruns import runs_text

        return runs_text(self.result)

    def __repr__(self) -> str:
        return f"<RunPredictions: {counted(len(self.result.runs), 'run')}, mean error {self.mean_abs_error:.1%}>"


def _row(one: PricedRun) -> dict[str, Any]:
    return {
        "id": one.run.name,
        "group": one.run.group,
        "predicted_s": one.predicted_s,
        "measured_s": one.run.measured_s,
        "error": one.error,
        "memory_bytes": one.memory_bytes,
        "measured_memory_bytes": one.run.memory_bytes,
        "fits": not one.is_infeasible if one.memory_bytes is not None else None,
        **({"fault": one.fault} if one.fault else {}),
    }


def _group(group: RunGroup) -> dict[str, Any]:
    return {
        "name": group.name,
        "runs": group.num_runs,
        "efficiency": group.efficiency,
        "mean_abs_error": group.fit.mean_abs_error,
        "leave_one_out": group.fit.leave_one_out,
    }


def price_runs(runs: FilePath, *, fit: bool = False) -> RunPredictions:
    """Predict the step and the memory of training runs that were measured.

    Args:
        runs: A CSV file with a row per run (:mod:`autoddl.measuredruns` lists the columns).
        fit: Predict every run with the efficiency that fits its group, in place of that of its cluster.

    Raises:
        UserError: the file cannot be read, or is not a file of runs.

    >>> import autoddl, os, tempfile
    >>> columns = "id,group,hardware,family,layers,hidden,heads,kv_heads,intermediate,seq,vocab,tied,"
    >>> columns += "gpus,tp,pp,vp,dp,mbs,gbs,recompute,seq_parallel,zero,flash,measured_s"
    >>> run = "mine,ours,dgx-a100,gpt,24,2304,24,0,0,2048,51200,True,32,1,1,1,32,16,512,full,False,0,False,3.53"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "runs.csv")
    ...     _ = open(path, "w").write(f"{columns}\\n{run}\\n")
    ...     predictions = autoddl.price_runs(path, fit=True)
    >>> predictions
    <RunPredictions: 1 run, mean error 0.0%>
    """
    return RunPredictions(_price_runs(read_runs(runs), fit))


def fit_runs(runs: FilePath, *, name: str = "") -> Cluster:
    """Fit the efficiency of a cluster to training steps that were measured on it.

    Args:
        runs: A CSV file of runs, all on the same hardware; the runs count as one group.
        name: Name of the cluster; by default that of its hardware.

    Returns:
        The cluster of the runs, in which the efficiencies of products and of attention are fitted.

    Raises:
        UserError: the file cannot be read, the runs are on different hardware, or none can be priced.

    >>> import autoddl, os, tempfile
    >>> columns = "id,group,hardware,family,layers,hidden,heads,kv_heads,intermediate,seq,vocab,tied,"
    >>> columns += "gpus,tp,pp,vp,dp,mbs,gbs,recompute,seq_parallel,zero,flash,measured_s"
    >>> run = "mine,ours,dgx-a100,gpt,24,2304,24,0,0,2048,51200,True,32,1,1,1,32,16,512,full,False,0,False,3.53"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "runs.csv")
    ...     _ = open(path, "w").write(f"{columns}\\n{run}\\n")
    ...     cluster = autoddl.fit_runs(path, name="ours")
    >>> cluster.name, round(cluster.device.efficiency, 1)
    ('ours', 0.7)
    """
    measured = read_runs(runs)
    hardware = sorted({run.hardware for run in measured})
    if len(hardware) > 1:
        raise UserError(f"the runs are on {', '.join(hardware)}; a cluster is fitted to runs on one kind of hardware")
    priced = _price_runs([replace(run, group="all") for run in measured])
    if not priced.groups:
        raise UserError(f"no run can be priced: {priced.runs[0].fault}")
    (group,) = priced.groups
    largest = max((run for run in measured), key=lambda run: run.num_devices)
    document = json.loads(json.dumps(largest.cluster().document))
    source = (
        f"fitted to {counted(group.num_runs, 'measured run')}: mean error {group.fit.mean_abs_error:.1%}, "
        f"leave-one-out {group.fit.leave_one_out:.1%}"
    )
    device = document["device"]
    for figure in ("efficiency", "core_efficiency"):
        if figure in device:
            value = min(1.0, group.fit.efficiency * device[figure]["value"])
            device[figure] = {"value": float(f"{value:.4g}"), "unit": "1", "source": source}
    document["name"] = name or document["name"]
    return from_document(document, document["name"])
