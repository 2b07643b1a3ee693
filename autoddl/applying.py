"""Applies a plan to a OneFlow model."""

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
    """Return a module that trains like ``module``, distributed over the ranks of this job with the layouts of the plan.

    Every rank calls this function with the same module and the same plan; if initial values differ, those of rank 0 are used.  The
    returned module computes in float32, whatever the precision of the plan.  Element-wise optimizers (SGD, Adam, AdamW) take its
    parameters as those of any module, and gradients are clipped by its method ``clip_grad_norm_``.  LAMB needs the norms of whole
    tensors and has no effect on OneFlow's split tensors.

        applied = autoddl.apply(module, autoddl.load_plan("plan.json"))
        optimizer = oneflow.optim.AdamW(applied.parameters())
        loss = applied.train_step(inputs, targets)      # or: applied(inputs, targets).backward()
        optimizer.step()

    Args:
        module: The unmodified model, in host memory.
        plan: A plan for this model and for the number of ranks of this job.
        graph: The layer graph of the model.  If given, a plan that was made for a different graph is refused first.
        feeds: For each layer that reads input data, the index of its input, or None for zeros.  By default, the first such layer
            reads input 0, and further embedding tables (of token types, for example) read zeros.
        check: If True, the first forward pass compares loss and gradients with those of ``module`` on a few samples, because a
            layer graph does not describe everything (for example, the scale of attention scores).  The check sends almost no data,
            but runs ``module`` once on every rank.

    Raises:
        UserError: If the plan is for another model or another number of ranks, or if a layer cannot be run.  The message names the
            difference.

    >>> import autoddl
    >>> flow = autoddl.load_oneflow()
    >>> module = flow.nn.Sequential(flow.nn.Linear(8, 16), flow.nn.ReLU(), flow.nn.Linear(16, 8))
    >>> plan = autoddl.plan(module, flow.zeros(4, 8), cluster="local-cpu", devices_per_node=1, batch=4)
    >>> trained = autoddl.apply(module, plan)
    >>> trained(flow.zeros(4, 8)).shape
    oneflow.Size([4, 8])
    """
    from autoddl.pipelines.runtime.applied import AppliedModule

    stage, *more_stages = stage_plans(plan)
    if more_stages:
        raise UserError(
            f"the plan is a pipeline of {plan.num_stages} stages, which no single module runs; train it with a PipelineTrainer of "
            "autoddl.staging.planned_model(module, plan)"
        )
    if graph is not None:
        plan.check_graph(graph)
    workload = replace(plan.workload, recompute=stage.recompute)
    return AppliedModule(module, plan.graph, stage.strategies, workload, feeds, check)
