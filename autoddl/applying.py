"""Applying a plan to a OneFlow model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .planfile import PlanFile
from .staging import stage_plans

if TYPE_CHECKING:
    from autoddl.pipelines.runtime.applied import AppliedModule

__all__ = ["apply"]


def apply(
    module: Any,
    plan: PlanFile,
    *,
    graph: LayerGraph | None = None,
    feeds: Mapping[str, int | None] | None = None,
    check: bool = True,
) -> AppliedModule:
    """A module that trains like ``module`` on the ranks of this job, at the plan's layouts.

    Every rank calls it with the same module (where initial values differ, the first rank's are taken) and plan.  It runs in
    float32 whatever the plan's precision.  Element-wise optimizers (SGD, Adam, AdamW) work on it as on any module, and
    ``clip_grad_norm_`` is a method; LAMB, which needs norms of whole tensors, does nothing on OneFlow's split tensors.

        applied = autoddl.apply(module, autoddl.load_plan("plan.json"))
        optimizer = oneflow.optim.AdamW(applied.parameters())
        loss = applied.train_step(inputs, targets)      # or: applied(inputs, targets).backward()
        optimizer.step()

    Args:
        module: the unmodified model, on the host.
        plan: made for it and for as many ranks as this job has.
        graph: the model's layer graph, if at hand: a plan of another one, an older one say, is then refused before anything else.
        feeds: which input (0 for the first; None for zeros) each layer that reads the data reads. By default the first one reads
            the first input, and tables that are looked up besides it (token types) read zeros.
        check: whether the first pass begins by comparing loss and gradients with ``module``'s own, on a few samples: a graph does
            not say everything (a scale of attention scores, say). It sends next to nothing, but every rank runs ``module`` once.

    Raises:
        UserError: the plan is for another model or another number of ranks, or a layer cannot be run; it names the difference.

    >>> import autoddl
    >>> flow = autoddl.load_oneflow()
    >>> module = flow.nn.Sequential(flow.nn.Linear(8, 16), flow.nn.ReLU(), flow.nn.Linear(16, 8))
    >>> plan = autoddl.plan(module, flow.zeros(4, 8), cluster="local-cpu", devices_per_node=1, batch=4)
    >>> trained = autoddl.apply(module, plan)
    >>> trained(flow.zeros(4, 8)).shape
    oneflow.Size([4, 8])
    """
    from autoddl.pipelines.runtime.applied import AppliedModule

    stage, *others = stage_plans(plan)
    if others:
        raise UserError(
            f"the plan is a pipeline of {plan.num_stages} stages, which no single module runs; train it with a PipelineTrainer of "
            "autoddl.staging.planned_model(module, plan)"
        )
    if graph is not None:
        plan.check_graph(graph)
    workload = replace(plan.workload, recompute=stage.recompute)
    return AppliedModule(module, plan.graph, stage.strategies, workload, feeds, check)
