"""What the ranks do in the test of training on text; run by ranks, never collected."""

from __future__ import annotations

from typing import Any

import numpy as np

import autoddl
from autoddl.pipelines.runtime.load import load_oneflow

flow = load_oneflow()
#: High, so that few steps show that it learns.
LEARNING_RATE = 1e-2


def train_on_text(plan_path: str, sizes: Any, batches: list[np.ndarray]) -> dict[str, list[float]]:
    """The losses of every step: applied at the plan, on one device (rank 0), and on one that sums in another order (rank 1).

    ``batches``: (samples, sequence + 1) characters each.
    """
    applied = autoddl.apply(made(sizes), autoddl.load_plan(plan_path))
    optimizer = flow.optim.AdamW(applied.parameters(), lr=LEARNING_RATE, eps=1e-6)
    losses: dict[str, list[float]] = {"plan": []}
    for batch in batches:
        losses["plan"].append(applied.train_step(batch[:, :-1], batch[:, 1:]))
        optimizer.step()
        optimizer.zero_grad()
    if flow.env.get_rank() == 0:
        losses["one device"] = on_one_device(made(sizes), batches, 1)
    elif flow.env.get_rank() == 1:
        losses["one device, halved"] = on_one_device(made(sizes), batches, 2)
    return losses


def made(sizes: Any) -> Any:
    from autoddl.pipelines.runtime import models

    module = models.GPT(sizes.layers, sizes.width, sizes.heads, sizes.vocabulary, sizes.sequence)
    return models.initialize(module, seed=3)


def on_one_device(module: Any, batches: list[np.ndarray], num_parts: int) -> list[float]:
    optimizer = flow.optim.AdamW(module.parameters(), lr=LEARNING_RATE, eps=1e-6)
    losses = []
    for batch in batches:
        total = 0.0
        for part in np.split(batch, num_parts):
            loss = module(flow.tensor(part[:, :-1]), flow.tensor(part[:, 1:])) / num_parts
            loss.backward()
            total += float(loss.numpy())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
