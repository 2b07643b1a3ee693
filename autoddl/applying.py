"""Applies a plan to a OneFlow model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoddl.costmodel.devices import chosen_device
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph

from .executors import EAGER, GRAPH, check_executor
from .planfile import PlanFile
from .staging import schedule_of_plan, stage_plans

__all__ = ["apply"]


def apply(
    module: Any,
    plan: PlanFile,
    *,
    graph: LayerGraph | None = None,
    feeds: Mapping[str, int | None] | None = None,
    check: bool = True,
    device: str | None = None,
    executor: str = EAGER,
    optimizer: Callable[[Iterable[Any]], Any] | None = None,
    loss_of: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a module that trains like ``module``, distributed over the ranks of this job with the layouts of the plan.

    Every rank calls this function with the same module and the same plan; if initial values differ, those of rank 0 are used.  The
    returned module computes on the devices and in the precision of the plan.  In mixed precision its parameters are masters, and
    ``step`` unscales their gradients and skips the step if they overflowed.  Element-wise optimizers (SGD, Adam, AdamW) take its
    parameters as those of any module, and gradients are clipped by its method ``clip_grad_norm_``.  LAMB needs the norms of whole
    tensors and has no effect on OneFlow's split tensors.

        applied = autoddl.apply(module, autoddl.load_plan("plan.json"))
        optimizer = oneflow.optim.AdamW(applied.parameters())
        loss = applied.train_step(inputs, targets)      # or: applied(inputs, targets).backward()
        applied.step(optimizer)                         # in float32 also: optimizer.step()

    Args:
        module: The unmodified model, in host memory.
        plan: A plan for this model and for the number of ranks of this job.
        graph: The layer graph of the model.  If given, a plan that was made for a different graph is refused first.
        feeds: For each layer that reads input data, the index of its input, or None for zeros.  By default, the first such layer
            reads input 0, and further embedding tables (of token types, for example) read zeros.
        check: If True, the first forward pass compares loss and gradients with those of ``module`` on a few samples, because a
            layer graph does not describe everything (for example, the scale of attention scores).  The check sends almost no data,
            but runs ``module`` once on every rank.  The graph executor is not checked.
        device: ``cuda`` or ``cpu``.  By default that of the plan's cluster, or of the environment variable ``AUTODDL_DEVICE``.  CPU
            ranks have no half-precision kernels: there, mixed precision runs with float32 in place of float16 and float64 masters.
        executor: ``"eager"``, or ``"graph"``: then a `GraphExecutor` is returned, whose ``train_step(*batch)`` runs forward pass,
            backward pass and optimizer inside OneFlow's ``nn.Graph`` and returns the mean loss.
        optimizer: For the graph executor: a function that makes the optimizer of given parameters.  Default: the plan's optimizer.
        loss_of: For the graph executor: a function that computes the loss from the output of a model without a loss.

    Raises:
        UserError: If the plan is for another model, another number of ranks or a device that is not there, or if a layer cannot be
            run.  The message names the difference.

    >>> import autoddl
    >>> flow = autoddl.load_oneflow()
    >>> module = flow.nn.Sequential(flow.nn.Linear(8, 16), flow.nn.ReLU(), flow.nn.Linear(16, 8))
    >>> plan = autoddl.plan(module, flow.zeros(4, 8), cluster="local-cpu", devices_per_node=1, batch=4)
    >>> trained = autoddl.apply(module, plan)
    >>> trained(flow.zeros(4, 8)).shape
    oneflow.Size([4, 8])
    """
    from autoddl.pipelines.runtime.backend import backend_of

    check_executor(executor, plan.num_stages)
    stage, *more_stages = stage_plans(plan, executor)
    if more_stages:
        raise UserError(
            f"the plan is a pipeline of {plan.num_stages} stages, which no single module runs; train it with a PipelineTrainer of "
            "autoddl.staging.planned_model(module, plan)"
        )
    if graph is not None:
        plan.check_graph(graph)
    workload = replace(plan.workload, recompute=stage.recompute)
    backend = backend_of(workload.precision, chosen_device(plan.cluster.has_gpus, device), plan.cluster)
    if executor == GRAPH:
        from autoddl.pipelines.runtime.graph.executor import GraphExecutor

        return GraphExecutor(module, plan.graph, stage.strategies, workload, backend, feeds, optimizer, loss_of)
    if optimizer is not None or loss_of is not None:
        raise UserError(
            "optimizer and loss_of are for executor='graph'; the eager executor leaves both to the training script"
        )
    from autoddl.pipelines.runtime.applied import AppliedModule

    from .api.tracing import StepTracer

    applied = AppliedModule(module, plan.graph, stage.strategies, workload, feeds, check, backend)
    applied.tracer = StepTracer.of_job(plan, schedule_of_plan(plan))
    return applied
