"""`price`: the plan of a configuration that the user runs, and how far it is from the best one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypedDict

from autoddl.costmodel.cluster import Cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.limits import MAX_SECONDS
from autoddl.costmodel.recomputation import check_recomputation
from autoddl.costmodel.units import format_seconds
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint.partition import chain_of
from autoddl.pipelines.joint.uniform import UniformLayout
from autoddl.search.planner import Options

from ..measuredruns import RECOMPUTATIONS
from .files import FilePath
from .inputs import ClusterLike, ModelLike, cluster_of, graph_of
from .options import takes
from .planning import plan_of_result
from .plans import Plan
from .results import Result

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from autoddl.costmodel.graph import LayerGraph
    from autoddl.costmodel.stopping import Stop
    from autoddl.pipelines.joint.neighbours import Change

    from ..megatronflags import MegatronRun
    from ..text.tables import Text

__all__ = ["RECOMPUTE_WORDS", "PlanDistance", "PricingOptions", "UniformPlan", "distance", "nearest_uniform", "price"]

#: The words of ``recompute``: those of Megatron-LM, and ours; with the way of recomputation that each stands for.
RECOMPUTE_WORDS: Mapping[str, str] = {**RECOMPUTATIONS, "layers": "layers", "blocks": "blocks"}


class PricingOptions(TypedDict, total=False):
    """Options of the model, the cluster and the training.

    Attributes:
        nodes, devices_per_node: Size of the cluster; by default as many nodes as tp, pp and dp need, or without dp that of the
            cluster's description.
        latency_s, bandwidth: Latency [s] and bandwidth per device [bytes/s] of every link; by default those of the cluster.
        capacity_factor, batch_norm: As in :func:`autoddl.plan`.
        heads, sequence, vocabulary: Number of attention heads, sequence length and vocabulary size of a built-in transformer; by
            default those of the model.
        batch: Samples per training step over all devices; by default 8 per device.
        precision: ``float32``, ``mixed``, ``bfloat16`` or ``fp8``; by default the usual precision of the device.
        optimizer: ``adam``, ``momentum`` or ``sgd``.
        attention: ``fused`` (no scores are kept, masked ones are skipped) or ``dense``.
        gradients: Type of gradients that are accumulated and summed over devices: ``compute`` or ``master`` (float32).
        zero: What the devices that hold the same parameters divide (ZeRO): 0 nothing, 1 optimizer states, 2 also gradients, 3
            also parameters.
        overlap: ``none``, ``gradients`` (all-reduces of gradients run beside the backward pass) or ``all`` (also the
            communication of linear layers, under their products).
        bucket_bytes: Gradients of layers with fewer bytes on a device are summed together, in buckets of at least so many bytes;
            0: layer by layer.
        memory_limit_bytes: Memory limit per device; by default the device's memory without the framework's share.  A configuration
            that needs more is priced, too, with a note.
    """

    nodes: int | None
    devices_per_node: int | None
    latency_s: float | None
    bandwidth: float | None
    heads: int | None
    sequence: int | None
    vocabulary: int | None
    capacity_factor: float | None
    batch_norm: str | None
    batch: int | None
    precision: str | None
    optimizer: str
    attention: str
    gradients: str
    zero: int
    overlap: str
    bucket_bytes: int
    memory_limit_bytes: float | None


_PLANNER_DEFAULTS = {option.name: option.default for option in fields(Options)}
#: What the plans that a configuration is compared with have in common with it.
_KEPT = (
    "batch",
    "precision",
    "optimizer",
    "attention",
    "gradients",
    "zero",
    "activations",
    "overlap",
    "bucket_bytes",
)
#: Defaults of `PricingOptions`: those of the planner where it chooses nothing; None for options that are not listed.
PRICING_DEFAULTS: Mapping[str, Any] = {
    **{name: _PLANNER_DEFAULTS[name] for name in PricingOptions.__annotations__ if name in _PLANNER_DEFAULTS},
    "zero": 0,
}


@takes(PricingOptions, PRICING_DEFAULTS)
def price(
    model: ModelLike | None = None,
    inputs: Any = None,
    *,
    cluster: ClusterLike,
    tp: int = 1,
    pp: int = 1,
    dp: int | None = None,
    interleave: int = 1,
    schedule: str = "1f1b",
    ep: int = 1,
    micro_batch: int = 1,
    recompute: str = "none",
    sequence_parallel: bool | None = None,
    from_megatron: FilePath | None = None,
    **options: Unpack[PricingOptions],
) -> Plan:
    """Price a configuration that you run: one tensor, pipeline and data parallel degree for the whole model.  Nothing is searched.

    The result is a plan.  It can be explained, compared, exported, verified and launched as one that `plan` has found, but it has
    no certificate: ``status`` is ``priced``, ``lower_bound_s`` is None.

    Args:
        model, inputs, cluster: As in :func:`autoddl.plan`.
        tp, pp, dp: Tensor parallel degree, number of pipeline stages, number of replicas.  By default ``dp`` takes the rest of
            the cluster.  Devices are in Megatron-LM's order: tensor parallel groups are neighbours, stages are outermost.
        interleave: Chunks of the model on each stage's devices.
        schedule: ``1f1b``, ``gpipe``, ``zero-bubble`` or ``chimera``.
        ep: Parts that the experts of a mixture are divided into, over neighbours among the replicas (expert parallelism).
        micro_batch: Samples per forward pass and replica, as Megatron-LM's; a forward pass over all replicas has dp times as many.
        recompute: ``none``, ``selective`` (attention) or ``full`` (blocks), as Megatron-LM's; or ``layers``, ``blocks`` or
            ``blocks:K`` (the first K blocks of each stage; with ``interleave`` of each chunk).
        sequence_parallel: True for Megatron-LM's sequence parallelism (inputs are gathered again in the backward pass), False for
            Megatron-LM without it (all features on all devices between layers).  By default features are split between layers and
            gathered inputs are kept, which ranks of AutoDDL can execute.
        from_megatron: A file of Megatron-LM's flags (:mod:`autoddl.megatronflags`), in place of the model, the degrees and the
            training options.
        options: see `PricingOptions`.

    Raises:
        UserError: If a name is unknown, a value is out of range, or the configuration does not fit the model or the cluster.

    >>> import autoddl
    >>> plan = autoddl.price("gpt3-13b", cluster="dgx-a100", nodes=4, tp=8, pp=2, batch=64, micro_batch=2, recompute="full")
    >>> plan.status, plan.num_stages, plan.workload.micro_batch
    ('priced', 2, 4)
    >>> 0.2 < plan.model_flops_utilisation < plan.hardware_flops_utilisation < 0.7
    True
    """
    if from_megatron is not None:
        degrees = {"tp": tp, "pp": pp, "dp": dp, "interleave": interleave, "schedule": schedule, "ep": ep}
        words = {"micro_batch": micro_batch, "recompute": recompute, "sequence_parallel": sequence_parallel}
        return _price_megatron(from_megatron, cluster, (model, inputs), {**degrees, **words, **options})
    if model is None:
        raise UserError("price needs a model, or the flags of Megatron-LM: from_megatron='args.txt'")
    check_recomputation(recompute, tuple(RECOMPUTE_WORDS))
    graph = graph_of(
        model,
        inputs,
        heads=options["heads"],
        sequence=options["sequence"],
        vocabulary=options["vocabulary"],
        capacity_factor=options["capacity_factor"],
        batch_norm=options["batch_norm"],
    )
    devices = _devices(cluster, tp, pp, dp, options)
    layout = UniformLayout(tp, pp, _replicas(devices, tp, pp) if dp is None else dp, interleave, schedule, ep)
    chosen: dict[str, Any] = {
        name: options[name] for name in ("optimizer", "attention", "gradients", "zero", "overlap", "bucket_bytes")
    }  # type: ignore[literal-required]
    chosen["precision"] = options["precision"] or devices.default_precision
    chosen["recompute"] = RECOMPUTE_WORDS.get(recompute, recompute)
    chosen["activations"] = {None: "kept", True: "regathered", False: "copied"}[sequence_parallel]
    batch = options["batch"] or 8 * devices.num_devices
    return _priced(graph, devices, layout, _workload(batch, micro_batch, layout, chosen), options["memory_limit_bytes"])


def _price_megatron(
    path: FilePath, cluster: ClusterLike, model_and_inputs: tuple[object, object], given: Mapping[str, Any]
) -> Plan:
    """Price the configuration of a file of Megatron-LM's flags; ``given`` are all other arguments."""
    from ..megatronflags import read_megatron_flags

    if model_and_inputs != (None, None):
        raise UserError("leave out the model: the flags of Megatron-LM describe it")
    allowed = ("dp", "nodes", "devices_per_node", "latency_s", "bandwidth", "memory_limit_bytes")
    defaults = {
        **PRICING_DEFAULTS,
        "tp": 1,
        "pp": 1,
        "interleave": 1,
        "schedule": "1f1b",
        "ep": 1,
        "micro_batch": 1,
        "recompute": "none",
    }
    for name, value in given.items():
        if name not in allowed and value != defaults.get(name):
            raise UserError(f"leave out {name}={value!r}: the flags of Megatron-LM decide it")
    run: MegatronRun = read_megatron_flags(path)
    devices = _devices(cluster, run.tensor_parallel, run.num_stages, given["dp"], given)
    replicas = _replicas(devices, run.tensor_parallel, run.num_stages) if given["dp"] is None else given["dp"]
    layout = UniformLayout(run.tensor_parallel, run.num_stages, replicas, run.interleave)
    workload = _workload(run.batch, run.micro_batch, layout, run.words)
    return _priced(run.graph(), devices, layout, workload, given["memory_limit_bytes"], run.notes)


def _devices(cluster: ClusterLike, tp: int, pp: int, dp: int | None, options: Mapping[str, Any]) -> Cluster:
    """The cluster; with all degrees and without a number of nodes, as much of it as they need."""
    nodes, per_node = options["nodes"], options["devices_per_node"]
    if nodes is None and dp is not None and min(tp, pp, dp) >= 1:
        whole, total = cluster_of(cluster, None, per_node), tp * pp * dp
        if total < whole.devices_per_node and per_node is None:
            nodes, per_node = 1, total
        elif total % whole.devices_per_node == 0:
            nodes = total // whole.devices_per_node
    return cluster_of(cluster, nodes, per_node, options["latency_s"], options["bandwidth"])


def _replicas(cluster: Cluster, tp: int, pp: int) -> int:
    """The data parallel degree that uses all devices."""
    if min(tp, pp) < 1 or cluster.num_devices % (tp * pp):
        raise UserError(f"tp {tp} x pp {pp} does not divide the {cluster.num_devices} devices of {cluster.name}")
    return cluster.num_devices // (tp * pp)


def _workload(batch: int, micro_batch: int, layout: UniformLayout, words: Mapping[str, Any]) -> Workload:
    """The workload of a micro-batch per replica."""
    if micro_batch < 1:
        raise UserError(f"micro-batch {micro_batch} should be at least 1")
    if batch % (micro_batch * layout.data_parallel):
        raise UserError(
            f"batch {batch} does not divide into micro-batches of {micro_batch} for each of {layout.data_parallel} replicas; "
            f"it should be a multiple of {micro_batch * layout.data_parallel}"
        )
    return Workload(batch, micro_batch * layout.data_parallel, **words)


def _priced(
    graph: LayerGraph,
    cluster: Cluster,
    layout: UniformLayout,
    workload: Workload,
    memory_limit_bytes: float | None,
    notes: tuple[str, ...] = (),
) -> Plan:
    from autoddl.pipelines.joint.result import priced

    return plan_of_result(priced(chain_of(graph), cluster, layout, workload, memory_limit_bytes, notes))


# ---- The distance to the best plan ---------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class PlanDistance(Result):
    """How far a priced configuration is from the best plan, and what single changes of it gain.

    Attributes:
        plan: The configuration.
        best: The best plan that the search found, with the same batch and training options.
        changes: The single changes with which the configuration fits in memory, the fastest first.
    """

    plan: Plan
    best: Plan
    changes: tuple[Change, ...]

    @property
    def excess(self) -> float:
        """By which part the step of the configuration is longer than that of the best plan."""
        return self.plan.step_s / self.best.step_s - 1

    @property
    def best_change(self) -> Change | None:
        """The single change that gains most; None if none gains anything."""
        first = next(iter(self.changes), None)
        return first if first is not None and first.step_s < self.plan.step_s * (1 - 1e-9) else None

    @property
    def document(self) -> dict[str, Any]:
        return {
            "format": "autoddl-distance",
            "version": 1,
            "step_s": self.plan.step_s,
            "best_step_s": self.best.step_s,
            "best_optimal": self.best.optimal,
            "best_lower_bound_s": self.best.lower_bound_s,
            "excess": self.excess,
            "changes": [
                {"change": change.name, "step_s": change.step_s, "memory_bytes": change.memory_bytes}
                for change in self.changes
            ],
        }

    @property
    def text(self) -> Text:
        from ..text.prices import distance_text

        return distance_text(self)

    def __repr__(self) -> str:
        change = self.best_change
        gain = "" if change is None else f", {change.name} gains most"
        return f"<PlanDistance: {format_seconds(self.plan.step_s)}, {self.excess:.1%} above the best{gain}>"


def distance(
    plan: Plan, *, time_limit_s: float | None = None, quiet: bool = False, stop: Stop | None = None
) -> PlanDistance:
    """Search for the best plan with the batch and the training options of a priced configuration, and try single changes of it.

    A single change moves a factor of 2 between two of tp, pp and dp, doubles or halves the micro-batch or the interleaving, or
    takes another way of recomputation, schedule, sequence parallelism, attention or ZeRO stage.

    Args:
        plan: A plan of :func:`autoddl.price`.
        time_limit_s, quiet, stop: As in :func:`autoddl.plan` with a pipeline.  The configuration is the search's first incumbent.

    Raises:
        UserError: If the plan is not of :func:`autoddl.price`.

    >>> import autoddl
    >>> plan = autoddl.price("gpt:4x256", cluster="v100-c", tp=1, dp=2, batch=8, sequence=128)
    >>> found = autoddl.distance(plan, quiet=True)
    >>> found.excess >= 0, found.best.optimal
    (True, True)
    """
    from autoddl.pipelines.joint.neighbours import single_changes

    from .planning import plan as search

    result = plan.search
    if result is None or result.layout is None:
        raise UserError(
            "distance is for plans of autoddl.price, which has their degrees; price the configuration again"
        )
    changes = single_changes(
        chain_of(plan.graph), plan.cluster, result.layout, plan.workload, result.memory_limit_bytes
    )
    base = replace(result.options.base, recompute=None, micro_batch=None)
    names = (*_KEPT, "memory_limit_bytes")
    best = search(
        plan.graph,
        cluster=plan.cluster,
        pipeline="auto",
        start=plan,
        time_limit_s=time_limit_s,
        quiet=quiet,
        stop=stop,
        **{name: getattr(base, name) for name in names},
    )
    return PlanDistance(plan, best, changes)


# ---- The nearest uniform configuration -----------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class UniformPlan(Result):
    """The best uniform configuration for the training options of a plan: what Megatron-LM's flags can describe.

    Attributes:
        plan: The plan that it is compared with.
        uniform: The uniform configuration as a priced plan; None if none fits, or none was found in time.
        flags: Its flags of Megatron-LM, in groups; without those of the model's sizes if there are none.
        num_evaluated: Number of configurations that were evaluated.
        is_finished: Whether no other uniform configuration can be faster; False if the time limit ended the search.
        megatron_step_s: Step of the configuration as Megatron-LM executes it: gradients in float32, gathered inputs gathered again.
    """

    plan: Plan
    uniform: Plan | None
    flags: tuple[str, ...]
    num_evaluated: int
    is_finished: bool
    megatron_step_s: float

    @property
    def excess(self) -> float | None:
        """By which part its step is longer than that of the plan: what uniformity costs."""
        return None if self.uniform is None else self.uniform.step_s / self.plan.step_s - 1

    @property
    def document(self) -> dict[str, Any]:
        return {
            "format": "autoddl-uniform",
            "version": 1,
            "flags": list(self.flags),
            "step_s": None if self.uniform is None else self.uniform.step_s,
            "plan_step_s": self.plan.step_s,
            "excess": self.excess,
            "megatron_step_s": None if self.uniform is None else self.megatron_step_s,
            "evaluated": self.num_evaluated,
            "finished": self.is_finished,
        }

    @property
    def text(self) -> Text:
        from ..text.prices import uniform_text

        return uniform_text(self)

    def __repr__(self) -> str:
        what = "none" if self.uniform is None else f"{format_seconds(self.uniform.step_s)}, {self.excess:+.1%}"
        return f"<UniformPlan for {self.plan.model}: {what}>"


#: Default time limit of the search for the best uniform configuration, in seconds of processor time.
UNIFORM_TIME_LIMIT_S = 20.0


def nearest_uniform(plan: Plan, *, time_limit_s: float = UNIFORM_TIME_LIMIT_S, stop: Stop | None = None) -> UniformPlan:
    """Search for the best uniform configuration for the model, the batch and the training options of a plan.

    All tensor parallel degrees, numbers of stages and replicas, micro-batches and interleavings are considered, with
    the recomputations of Megatron-LM.

    Args:
        plan: A plan.
        time_limit_s: Limit on the processor time of the search, in seconds.
        stop: A `Stop`.  When it is requested, the best configuration so far is returned.

    Raises:
        UserError: If the time limit is out of range.

    >>> import autoddl
    >>> plan = autoddl.plan("gpt:4x256", cluster="v100-c", nodes=2, batch=8, sequence=128)
    >>> found = autoddl.nearest_uniform(plan)
    >>> found.is_finished, found.flags[2]
    (True, '--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2')
    """
    from autoddl.costmodel.stopping import Stop as NoStop
    from autoddl.pipelines.joint.job import job_of
    from autoddl.pipelines.joint.neighbours import best_uniform
    from autoddl.pipelines.joint.result import JointOptions, priced
    from autoddl.pipelines.planners import Clock

    from ..megatronflags import megatron_flags

    if not 0 < time_limit_s <= MAX_SECONDS:
        raise UserError(f"time_limit_s is {time_limit_s:g}, should be a positive number, at most {MAX_SECONDS:g}")
    workload = plan.workload
    options = Options(memory_limit_bytes=plan.memory_limit_bytes, **{name: getattr(workload, name) for name in _KEPT})
    job = job_of(plan.graph, plan.cluster, JointOptions(options))
    found = best_uniform(job, Clock(time_limit_s, stop or NoStop()))
    if found is None:
        return UniformPlan(plan, None, (), 0, True, 0.0)
    chain, own = job.chain, found.workload
    uniform = plan_of_result(priced(chain, plan.cluster, found.layout, own, plan.memory_limit_bytes))
    activations = "regathered" if own.activations == "kept" else own.activations
    of_megatron = replace(own, gradients="master", activations=activations)
    step_s = priced(chain, plan.cluster, found.layout, of_megatron, plan.memory_limit_bytes).evaluation.step_s
    flags = megatron_flags(plan.graph, found.layout, own)
    return UniformPlan(plan, uniform, flags, found.num_evaluated, found.is_finished, step_s)
