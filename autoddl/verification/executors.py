"""What can execute a plan in a verification: AutoDDL's collectives in eager mode, or OneFlow's ``nn.Graph``.

Inside an ``nn.Graph`` only the bytes of whole steps can be counted, and no log of communication steps can be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.kinds.registry import kind_of
from autoddl.costmodel.layerwork import is_recomputed_alone, layer_work
from autoddl.costmodel.units import format_bytes
from autoddl.pipelines.runtime.comm.parameter_layouts import product_order
from autoddl.pipelines.runtime.graph.meshes import check_graph_plan
from autoddl.pipelines.runtime.pipeline.stage_traffic import sent_messages

from ..executors import EAGER, GRAPH, check_executor
from .comparing import compare
from .fitting import FittedPlan
from .prediction import Prediction
from .result import PhaseCheck, Verification
from .task import RankResult

__all__ = ["Executor", "executor_of"]

#: Bytes that an ``nn.Graph`` sends for itself with every message (510 to 517, measured over changes of layout on 4 ranks).
_MESSAGE_BYTES = 512
#: Messages that sum the gradient of a vector (a bias, the scale of a norm), relative to a matrix; measured on 2 and 4 ranks.
_VECTOR_MESSAGES = 1.8
#: Note on the bytes of `_unpriced_repeats`.
_REPEATS = "nn.Graph repeats the reduce-scatters of recomputed layers too: {} a step are predicted beside the price"


@dataclass(frozen=True)
class Executor:
    """An executor.

    Attributes:
        check: Checks that it can execute a fitted plan; raises a `UserError` otherwise.
        run_job, count_job: Jobs of the ranks that execute the plan, and that only count its bytes again.
        compare: Compares the results of the ranks, as `comparing.compare`.
        num_attempts: How often a plan is run at most, on new ranks, until no rank crashes.  A thread of OneFlow's own was seen to
            crash in an nn.Graph on CPU ranks, by SIGSEGV, with a plan that runs otherwise.
    """

    check: Callable[[FittedPlan], Any]
    run_job: str
    count_job: str
    compare: Callable[..., Verification]
    num_attempts: int = 1


def executor_of(name: str) -> Executor:
    """Return an executor.

    Raises:
        UserError: There is none of this name.
    """
    check_executor(name)
    return _EXECUTORS[name]


def _check_graph(fitted: FittedPlan) -> None:
    check_executor(GRAPH, len(fitted.stages))
    check_graph_plan(fitted.scaled.graph, fitted.scaled.strategies)


def _compare_graph(
    plan: Any,
    fitted: FittedPlan,
    prediction: Prediction,
    reference: Any,
    results: Any,
    **options: Any,
) -> Verification:
    """Compare the results of the graph executor: values, and the bytes of a whole step; see `comparing.compare`."""
    own: list[RankResult] = [
        replace(result, run_bytes=None, run_steps=prediction.workers[0].priced) for result in results
    ]
    verification = compare(plan, fitted, prediction, reference, own, executor=GRAPH, **options)
    # Layers show their predicted bytes.
    stages = tuple(
        replace(stage, layers=tuple(replace(layer, phases=_without_steps(layer.phases)) for layer in stage.layers))
        for stage in verification.stages
    )
    counted = results[0].run_bytes
    repeated = _unpriced_repeats(fitted)
    predicted = verification.step.predicted_bytes + repeated
    sent = None if counted is None else counted - _MESSAGE_BYTES * _num_messages(fitted, prediction)
    reason = "" if counted is None else "only whole steps can be counted inside nn.Graph"
    return replace(
        verification,
        stages=stages,
        step=PhaseCheck(predicted, sent, may_be_less=True),
        notes=(*verification.notes, _REPEATS.format(format_bytes(repeated))) if repeated else verification.notes,
        executor=GRAPH,
        layers_not_counted_because=options["not_counted_because"] or reason,
    )


def _without_steps(phases: Mapping[str, PhaseCheck]) -> dict[str, PhaseCheck]:
    return {name: PhaseCheck(phase.predicted_bytes, None) for name, phase in phases.items()}


def _unpriced_repeats(fitted: FittedPlan) -> float:
    """Return the bytes that all ranks send in a step because nn.Graph runs recomputed layers again completely.

    What is priced, and what the eager executor repeats, ends with the product if the rest of the layer keeps nothing.
    """
    graph, workload, sent = fitted.scaled.graph, fitted.scaled.workload, 0.0
    kept = replace(workload, recompute="none")
    for layer in graph.layers:
        place, strategy = graph.place(layer.name, workload.recompute), fitted.scaled.strategies[layer.name]
        if is_recomputed_alone(kind_of(layer.kind), place, workload.recompute):
            work, without = (layer_work(layer, strategy, w, workload.micro_batch, place) for w in (workload, kept))
            num_repeated = len(work.backward) - len(without.backward)
            sent += sum(step.sent_bytes for step in work.forward[num_repeated:])
    return sent * fitted.stages[0].num_ranks * workload.num_micro_batches


def _num_messages(fitted: FittedPlan, prediction: Prediction) -> float:
    """Return the number of messages of a step: of the priced steps, of the sums of gradients, and of the mean loss.

    Gradients are summed parameter by parameter, and the sections of a fused weight are parameters of their own.
    """
    graph: LayerGraph = fitted.scaled.graph
    num_ranks, passes = fitted.stages[0].num_ranks, fitted.scaled.workload.num_micro_batches
    num_messages = 0.0
    for (name, phase), steps in prediction.sections.items():
        layer = graph[name]
        num_sections = len(product_order(graph, layer).section_widths) if layer.kind == "linear" else 1
        if phase != "gradient":
            num_messages += num_ranks * passes * num_sections * sum(map(sent_messages, steps.priced))
        elif steps.priced:
            p0 = fitted.scaled.strategies[name].p0
            weights = [1.0 if len(parameter.shape) > 1 else _VECTOR_MESSAGES for parameter in layer.parameters]
            num_tensors = sum(weights) * num_sections / max(1, len(layer.modules) if layer.kind == "linear" else 1)
            num_messages += num_tensors * 2 * (p0 - 1) * num_ranks
    # Cross entropy also sums the number of targets.
    loss_sums = 1 + any(kind_of(layer.kind).is_loss for layer in graph.layers)
    return num_messages + passes * loss_sums * 2 * num_ranks * (num_ranks - 1)


_EXECUTORS = {
    EAGER: Executor(
        lambda fitted: None,
        "autoddl.verification.rank_job:run_plan",
        "autoddl.verification.rank_job:count_again",
        compare,
    ),
    GRAPH: Executor(
        _check_graph,
        "autoddl.verification.graph_job:run_graph",
        "autoddl.verification.graph_job:count_graph_again",
        _compare_graph,
        num_attempts=2,
    ),
}
