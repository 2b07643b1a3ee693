"""A user's plain model: how it is made, its values, and whether the annotated one computes the same."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.facts import module_at

from .parameters import all_parameters


def plain_model(file: str, function: str) -> tuple[Any, tuple[Any, ...]]:
    """The module and the example inputs that the function of a file (found from here or from beside this one) returns, with the
    first rank's values; all ranks call."""
    path = Path(file) if Path(file).is_file() else Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(f"_plain_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{file}: there is no such Python file; it makes the plain model")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        model, *rest = getattr(module, function)()
    finally:
        sys.path.remove(str(path.parent))
    take_first_ranks_values(model)
    inputs = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return model, tuple(tensor.numpy() for tensor in inputs)


def take_plain_values(model: Any, plain: Any, is_whole: bool = True) -> None:
    """Begin with the plain model's values, and train what it trains.

    Args:
        is_whole: False of a stage of a pipeline, which has some of the parameters, and trains them all.
    """
    by_tensor = {}
    for name, tensor in plain.named_parameters():
        by_tensor[id(tensor)] = name
        if not (is_whole or tensor.requires_grad):
            raise ValueError(f"{name} is frozen (requires_grad is False), which pipelines cannot keep")
    for stored in all_parameters(model):
        parts = []
        for name, rows in stored.layout.sources:
            owner, _, own = name.rpartition(".")
            tensor = module_at(plain, owner)._parameters.get(own)
            if tensor is None or tuple(tensor.shape) != (rows, *stored.layout.shape[1:]):
                raise ValueError(
                    f"the plain model's {name} is not {(rows, *stored.layout.shape[1:])}: this file was made for another"
                )
            by_tensor.pop(id(tensor), None)
            parts.append(tensor.detach().numpy())
            stored.tensor.requires_grad_(stored.tensor.requires_grad and tensor.requires_grad)
        stored.assign(np.concatenate(parts))
    for name in by_tensor.values() if is_whole else ():
        raise ValueError(f"the plain model has {name}, which this file was not made for")


def take_first_ranks_values(plain: Any) -> None:
    """Let all ranks begin with the first one's values, where ranks differ; all ranks call."""
    if flow.env.get_world_size() > 1:
        for tensor in plain.parameters():
            value = flow.tensor(np.ascontiguousarray(tensor.detach().numpy()))
            flow.comm.broadcast(value, 0)
            tensor.data.copy_(value)


def check_against_plain(model: Any, plain: Any, samples: Sequence[np.ndarray], tolerance: float = 1e-4) -> None:
    """Whether the annotated model computes what the plain one does: a layer graph does not say everything.

    Raises:
        ValueError: the two losses differ.
    """
    modes = plain.training
    plain.eval()
    with flow.no_grad():
        expected = float(plain(*map(flow.tensor, samples)).numpy())
        found = float(model(samples[0], samples[-1]).numpy())
    plain.train(modes)
    check_loss(found, expected, tolerance)


def plain_loss(plain: Any, batches: Sequence[Sequence[np.ndarray]]) -> float:
    """The plain model's mean loss of some micro-batches."""
    with flow.no_grad():
        losses = [float(plain(*map(flow.tensor, samples)).numpy()) for samples in batches]
    return sum(losses) / len(losses)


def check_loss(found: float, expected: float, tolerance: float = 1e-4) -> None:
    """Raise ValueError where the annotated model's loss is not the plain one's."""
    if not abs(found - expected) <= tolerance * max(abs(expected), 1e-30):
        raise ValueError(f"the annotated model's loss is {found:.7g}, the plain one's {expected:.7g}: they differ")
