"""A user's plain model: make it, copy its values into the annotated model, and compare the losses of the two."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from autoddl.pipelines.runtime.backend import HOST
from autoddl.pipelines.runtime.facts import module_at

from .parameters import all_parameters
from .passes import PASSES

Drawing = Callable[[Sequence[Any]], Any]
"""Returns a context in which the plain model draws the numbers of some training passes; None is a pass outside of training."""


def plain_model(file: str, function: str) -> tuple[Any, tuple[Any, ...]]:
    """Make the plain model: call a function of a Python file. All ranks must call this.

    The parameters take the values of the first rank, so that all ranks begin with the same values.

    Args:
        file: path of the Python file, relative to the working directory or to the folder of this file.
        function: name of a function without arguments; it returns the module followed by its example inputs.

    Returns:
        The module, and the example inputs as arrays.

    Raises:
        SystemExit: there is no such Python file.
    """
    path = Path(file) if Path(file).is_file() else Path(__file__).parent / file
    spec = importlib.util.spec_from_file_location(f"_plain_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SystemExit(f"{file}: there is no such Python file; it should make the plain model")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
        model, *rest = getattr(module, function)()
    finally:
        sys.path.remove(str(path.parent))
    copy_values_of_first_rank(model)
    inputs = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return model, tuple(tensor.numpy() for tensor in inputs)


def stage_of_plain(stage: Callable[[Any], Any], plain: Any) -> Any:
    """Make a stage of a pipeline with the values of the plain model."""
    module = stage(plain)
    take_plain_values(module, plain, is_whole=False)
    return module


def take_plain_values(model: Any, plain: Any, is_whole: bool = True, unused: Sequence[str] = ()) -> None:
    """Set the parameters of the annotated model to the values of the plain model.

    Parameters that the plain model freezes (``requires_grad=False``) are frozen in the annotated model too.

    Args:
        model: the annotated model, or one stage of it.
        plain: the plain model.
        is_whole: whether ``model`` has all parameters; a stage of a pipeline has some of them.
        unused: names of parameters of the plain model that nothing reads.

    Raises:
        ValueError: the parameters of the two models differ in name or shape.
    """
    unused_names = {}  # by the id of the tensor: a shared parameter has several names
    for name, tensor in plain.named_parameters():
        unused_names[id(tensor)] = name
    for stored in all_parameters(model):
        parts = {}
        for name, rows in stored.layout.sources:
            path, _, attribute = name.rpartition(".")
            tensor = module_at(plain, path)._parameters.get(attribute)
            shape = stored.layout.source_shape(rows)
            if tensor is None or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"the plain model's {name} does not have the shape {shape}: this file was made for another model"
                )
            unused_names.pop(id(tensor), None)
            parts[name] = tensor.detach().numpy()
            stored.tensor.requires_grad_(stored.tensor.requires_grad and tensor.requires_grad)
        if stored.leaf is not None:
            stored.leaf.requires_grad_(stored.tensor.requires_grad)
        stored.assign(stored.layout.joined(parts))
    for name in set(unused_names.values()) - set(unused) if is_whole else ():
        raise ValueError(f"the plain model has the parameter {name}, which this file was not made for")


def copy_values_of_first_rank(plain: Any) -> None:
    """Set the parameters of a plain model to the first rank's values. All ranks must call this."""
    if flow.env.get_world_size() > 1:
        for tensor in plain.parameters():
            value = HOST.tensor(np.ascontiguousarray(tensor.detach().numpy()))
            flow.comm.broadcast(value, 0)
            tensor.data.copy_(value)


def inputs_and_targets(samples: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays that the annotated model reads: of all arguments of the plain model the first and the last."""
    return samples[0], samples[-1]


def check_against_plain(
    model: Any,
    plain: Any,
    samples: Sequence[np.ndarray],
    tolerance: float = 1e-4,
    reads_all: bool = False,
    drawing: Drawing | None = None,
    in_training: bool = False,
) -> None:
    """Check that the annotated model computes the same loss as the plain model.

    The layer graph, from which the annotated model was written, does not describe every detail of the plain model.

    Args:
        samples: the inputs and targets of a micro-batch.
        tolerance: largest relative difference of the two losses.
        reads_all: whether the annotated model gets all arguments of the plain model, not only the first and the last.
        drawing: lets the plain model draw the random numbers of the annotated one, if there are any.
        in_training: whether the two are compared in training, which the annotated model was made of; if the plain model trains.

    Raises:
        ValueError: the two losses differ.
    """
    was_training = plain.training
    is_training = in_training and was_training
    plain.train(is_training)
    model.train(is_training)
    with flow.no_grad():
        loss = float(model(*(samples if reads_all else inputs_and_targets(samples))).numpy())
        try:
            with drawing([1 if is_training else None]) if drawing else flow.no_grad():
                expected = loss_in(plain(*map(HOST.tensor, samples)))
        except RuntimeError as error:
            # OneFlow 0.9.0 runs recurrent modules on the first rank of a CPU job alone.
            if flow.env.get_rank() == 0 or "to be on the same device" not in str(error):
                raise
            expected = loss
    plain.train(was_training)
    model.train(was_training)
    PASSES.restart()
    check_loss(loss, expected, tolerance)


def plain_loss(
    plain: Any, batches: Sequence[Sequence[np.ndarray]], drawing: Drawing | None = None, slots: int = 1
) -> float | None:
    """Return the plain model's loss, averaged over some micro-batches; None if OneFlow cannot run it on this rank.

    Args:
        batches: the micro-batches, in the order of the training passes.
        drawing: lets the plain model draw the random numbers of the pipeline.
        slots: number of passes of a micro-batch.
    """
    losses = []
    for number, samples in enumerate(batches):
        steps = range(number * slots + 1, (number + 1) * slots + 1)
        try:
            with flow.no_grad(), drawing(steps) if drawing else flow.no_grad():
                losses.append(loss_in(plain(*map(HOST.tensor, samples))))
        except RuntimeError as error:
            # OneFlow 0.9.0 runs recurrent modules on the first rank of a CPU job alone.
            if flow.env.get_rank() == 0 or "to be on the same device" not in str(error):
                raise
            return None
    return sum(losses) / len(losses)


def loss_in(returned: Any) -> float:
    """Return the loss among the values that a model returns: the first single number."""
    values = returned.values() if isinstance(returned, dict) else returned
    if isinstance(values, flow.Tensor):
        return float(values.numpy())
    return float(next(value for value in values if isinstance(value, flow.Tensor) and value.numel() == 1).numpy())


def check_loss(loss: float, expected: float, tolerance: float = 1e-4) -> None:
    """Check the loss of the annotated model.

    Args:
        loss: the annotated model's loss.
        expected: the plain model's loss.
        tolerance: largest relative difference of the two.

    Raises:
        ValueError: the losses differ, or one of them is not a number.
    """
    if not abs(loss - expected) <= tolerance * max(abs(expected), 1e-30):
        raise ValueError(f"the annotated model's loss is {loss:.7g}, the plain one's {expected:.7g}: they differ")
