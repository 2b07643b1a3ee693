"""How ranks of tests train any plan of a built-in model: from the same initial values, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["losses_alone", "run_steps", "trainer_of"]


def trainer_of(plan: Any, make: Callable[..., Any]) -> Any:
    """What ``make``, such as `autoddl.launched().trainer`, makes for a plan, with a pipeline or without."""
    import oneflow as flow

    from autoddl.pipelines.runtime.models import initialize
    from autoddl.zoo.builtin import recognise
    from autoddl.zoo.modules import build_module, make_batch

    built_in = recognise(plan.graph)
    assert built_in is not None
    return make(
        initialize(build_module(built_in), 1),
        lambda weights: flow.optim.Adam(weights, lr=0.01, eps=1e-3),
        lambda number: make_batch(built_in, plan.workload.micro_batch, np.random.default_rng([3, number])),
    )


def run_steps(trainer: Any, plan: Any, num_steps: int, after_each: Callable[[], None] = lambda: None) -> list[float]:
    """Steps until there have been so many; the losses, which are printed too, on the ranks that know them."""
    means = []
    while trainer.num_updates < num_steps:
        if losses := trainer.run().losses:
            means.append(sum(losses.values()) / plan.workload.num_micro_batches)
            print("step", trainer.num_updates, f"{means[-1]:.7f}", flush=True)
        after_each()
    return means


def losses_alone(path: str, num_steps: int) -> list[float]:
    """The losses of a plan of one rank; a job of a pool."""
    from autoddl.planfile import load_plan
    from autoddl.training import plan_trainer

    plan = load_plan(path)
    trainer = trainer_of(plan, lambda module, *others: plan_trainer(module, plan, *others))
    return run_steps(trainer, plan, num_steps)
