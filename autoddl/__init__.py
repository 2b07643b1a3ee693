"""AutoDDL finds the fastest way to train a large model on a cluster, proves it, and runs, exports and verifies it.

    import autoddl

    plan = autoddl.plan("gpt2-xl", cluster="dgx-a100", nodes=2, batch=256)
    plan.step_s, plan.layers, plan.alternatives("h.*.mlp.c_fc")
    plan.save("plan.json")
    autoddl.load("plan.json").verify(ranks=16)

- **Plans**: `plan` searches for the best plan, `compare` compares search methods and baselines, and `load` reads a plan from a
  file.  A `Plan` can be printed, explained, exported and verified.  `models` and `clusters` list the built-in models and clusters;
  `extract` builds the layer graph of a OneFlow module, and `load_graph` reads a saved one.
- **Prices**: `price` prices a configuration that you run, without a search, as a plan; `distance` compares it with the best plan
  and names the single change that gains most; `nearest_uniform` finds the best configuration that Megatron-LM's flags can describe.
  `price_runs` predicts training runs that were measured.
- **Schedules**: `schedule` generates a pipeline schedule, and `schedule_families` lists the families.  `pipeline` runs the planners
  of DAPPLE, Chimera and WPipe on profiled models.
- **Clusters**: `calibrate` measures this system, `fit` fits a cluster to measurements, and `predict` and `rank` test a cluster.
- **Training**: `train` trains a plan, or a model with a schedule, on ranks of this machine.  `launch` runs a script on all ranks of
  a plan; in that script, `launched` returns the job of the rank, and `apply` makes a module train with the layouts of the plan.
  `load_oneflow` imports OneFlow together with the CUDA libraries that OneFlow needs.

Every command of the command line calls one of these functions.  Errors in arguments and input files are raised as `UserError`.
The module of a name is imported when the name is first used; OneFlow is imported only by functions that run on it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for true; `typing` is not imported here, before Ctrl-C is handled
if TYPE_CHECKING:
    from typing import Any

    from autoddl.costmodel.cluster import Cluster
    from autoddl.costmodel.errors import UserError
    from autoddl.costmodel.graph import LayerGraph, load_graph
    from autoddl.costmodel.stopping import Stop, StopRequestedError
    from autoddl.pipelines.runtime.load import load_oneflow
    from autoddl.search.planner import InfeasibleError

    from .api.catalogue import BuiltInModel, clusters, models
    from .api.configured import PlanDistance, UniformPlan, distance, nearest_uniform, price
    from .api.figures import PlannedLayer, PlannedStage
    from .api.frames import MissingPackageError
    from .api.inputs import extract
    from .api.measuring import Calibration, Ranking, calibrate, fit, predict, rank
    from .api.planning import compare, load, load_plan, plan
    from .api.plans import Plan
    from .api.pricing import RunPredictions, fit_runs, price_runs
    from .api.profiled import PipelinePlan, pipeline
    from .api.results import Comparison, Difference, Explanation, Verification
    from .api.running import launch
    from .api.schedules import Schedule, Timeline, schedule, schedule_families
    from .api.training import Training, train
    from .applying import apply
    from .launching.context import launched

    __version__: str

__all__ = [
    "BuiltInModel",
    "Calibration",
    "Cluster",
    "Comparison",
    "Difference",
    "Explanation",
    "InfeasibleError",
    "LayerGraph",
    "MissingPackageError",
    "PipelinePlan",
    "Plan",
    "PlanDistance",
    "PlannedLayer",
    "PlannedStage",
    "Ranking",
    "RunPredictions",
    "Schedule",
    "Stop",
    "StopRequestedError",
    "Timeline",
    "Training",
    "UniformPlan",
    "UserError",
    "Verification",
    "__version__",
    "apply",
    "calibrate",
    "clusters",
    "compare",
    "distance",
    "extract",
    "fit",
    "fit_runs",
    "launch",
    "launched",
    "load",
    "load_graph",
    "load_oneflow",
    "load_plan",
    "models",
    "nearest_uniform",
    "pipeline",
    "plan",
    "predict",
    "price",
    "price_runs",
    "rank",
    "schedule",
    "schedule_families",
    "train",
]

#: The module that defines each public name.
_MODULE_OF = {
    name: module
    for module, names in {
        "api.catalogue": ("BuiltInModel", "clusters", "models"),
        "api.configured": ("PlanDistance", "UniformPlan", "distance", "nearest_uniform", "price"),
        "api.figures": ("PlannedLayer", "PlannedStage"),
        "api.frames": ("MissingPackageError",),
        "api.inputs": ("extract",),
        "api.measuring": ("Calibration", "Ranking", "calibrate", "fit", "predict", "rank"),
        "api.planning": ("compare", "load", "load_plan", "plan"),
        "api.plans": ("Plan",),
        "api.pricing": ("RunPredictions", "fit_runs", "price_runs"),
        "api.profiled": ("PipelinePlan", "pipeline"),
        "api.results": ("Comparison", "Difference", "Explanation", "Verification"),
        "api.running": ("launch",),
        "api.schedules": ("Schedule", "Timeline", "schedule", "schedule_families"),
        "api.training": ("Training", "train"),
        "applying": ("apply",),
        "costmodel.cluster": ("Cluster",),
        "costmodel.errors": ("UserError",),
        "costmodel.graph": ("LayerGraph", "load_graph"),
        "costmodel.stopping": ("Stop", "StopRequestedError"),
        "launching.context": ("launched",),
        "pipelines.runtime.load": ("load_oneflow",),
        "search.planner": ("InfeasibleError",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("autoddl")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
