"""A user's plain model: the facts that its layer graph does not have, its values, and its own modules."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import oneflow as flow

from .blocks import all_weights
from .ranks import NUM_RANKS, Tensor


def plain_model(file: str, function: str) -> tuple[Any, tuple[Any, ...]]:
    """The module and the example inputs that the function of a file (found from here or from beside this one) returns."""
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
    inputs = rest[0] if len(rest) == 1 and isinstance(rest[0], (tuple, list)) else rest
    return model, tuple(tensor.numpy() for tensor in inputs)


def module_at(plain: Any, path: str) -> Any:
    """The submodule at a path."""
    for name in path.split(".") if path else []:
        if name not in plain._modules:
            raise ValueError(f"the plain model has no module {path!r}: this file was made for another one")
        plain = plain._modules[name]
    return plain


def eps_of(plain: Any, path: str) -> float:
    """What a norm adds to the variance."""
    module = module_at(plain, path)
    for name in ("eps", "variance_epsilon", "epsilon"):
        if isinstance(getattr(module, name, None), (int, float)):
            return float(getattr(module, name))
    raise ValueError(f"{path}: {type(module).__name__} has no eps, which its norm should have")


def angles_base_of(plain: Any, path: str) -> float | None:
    """The base of rotary positions, of the module at a path or the nearest around it; None where there is none."""
    names = path.split(".")
    for end in range(len(names), -1, -1):
        module = plain
        for name in names[:end]:
            module = module._modules.get(name) if module is not None else None
        for name in ("rope_theta", "rotary_theta", "theta"):
            if module is not None and isinstance(getattr(module, name, None), (int, float)):
                return float(getattr(module, name))
    return None


def convolution_options(plain: Any, path: str) -> dict[str, Any]:
    """How a convolution is done."""
    module = module_at(plain, path)
    if getattr(module, "padding_mode", "zeros") != "zeros":
        raise ValueError(f"{path}: padding_mode {module.padding_mode!r} cannot be run, should be 'zeros'")
    return {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}


def table_of(plain: Any, path: str) -> str:
    """The path of an embedding, which should be a plain one."""
    module = module_at(plain, path)
    for name in ("padding_idx", "max_norm", "scale_grad_by_freq"):
        if getattr(module, name, None) not in (None, False):
            raise ValueError(f"{path}: {name} = {getattr(module, name)} cannot be run")
    return path


class OwnModule:
    """A copy of one of the plain model's modules, run on whole samples with the parameters that it is given."""

    def __init__(self, plain: Any, path: str, parameters: Sequence[str], samples_are_split: bool):
        self.module = copy.deepcopy(module_at(plain, path))
        norms = [name for name, part in self.module.named_modules() if "BatchNorm" in type(part).__name__]
        if norms and samples_are_split:
            raise ValueError(f"{path}: {norms[0] or 'it'} needs statistics of all samples, which are on several ranks")
        self.places = []
        for parameter in parameters:
            owner, _, name = parameter.rpartition(".")
            self.places.append((module_at(self.module, owner), name))

    def __call__(self, inputs: Sequence[Tensor], shapes: Sequence[Sequence[int]], *weights: Tensor) -> Tensor:
        """Its output as (samples, rows, features), images as (samples, 1, all elements)."""
        for (owner, name), weight in zip(self.places, weights):
            # Plain tensors in place of parameters: gradients flow to where the weights come from.
            owner._parameters.pop(name, None)
            object.__setattr__(owner, name, weight)
        y = self.module(*(x.reshape(x.shape[0], *shape) for x, shape in zip(inputs, shapes)))
        shape = tuple(y.shape[1:])
        return y.reshape(y.shape[0], *((prod(shape[:-1]), shape[-1]) if len(shape) <= 2 else (1, prod(shape))))


def take_plain_values(model: Any, plain: Any) -> None:
    """Begin with the plain model's values: the first rank's, where ranks differ; and train what it trains."""
    parameters = dict(plain.named_parameters())
    by_tensor = {id(tensor): name for name, tensor in parameters.items()}
    for weight in all_weights(model):
        parts = []
        for name, rows in weight.sources.items():
            owner, _, own = name.rpartition(".")
            tensor = module_at(plain, owner)._parameters.get(own)
            if tensor is None or tuple(tensor.shape) != (rows, *weight.shape[1:]):
                raise ValueError(
                    f"the plain model's {name} is not {(rows, *weight.shape[1:])}: this file was made for another"
                )
            by_tensor.pop(id(tensor), None)
            parts.append(first_ranks(tensor.detach().numpy()))
            weight.parameter.requires_grad_(weight.parameter.requires_grad and tensor.requires_grad)
        weight.assign(np.concatenate(parts))
    for name in by_tensor.values():
        raise ValueError(f"the plain model has {name}, which this file was not made for")


def first_ranks(value: np.ndarray) -> np.ndarray:
    """The first rank's value, on every rank."""
    if NUM_RANKS == 1:
        return value
    tensor = flow.tensor(np.ascontiguousarray(value))
    flow.comm.broadcast(tensor, 0)
    return tensor.numpy()


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
    if not abs(found - expected) <= tolerance * max(abs(expected), 1e-30):
        raise ValueError(f"the annotated model's loss is {found:.7g}, the plain one's {expected:.7g}: they differ")


def like(example: np.ndarray, num_samples: int, rng: np.random.Generator) -> np.ndarray:
    """Random samples in the range of an example's: normal with its mean and deviation, or integers between its extremes."""
    shape = (num_samples, *example.shape[1:])
    if np.issubdtype(example.dtype, np.floating):
        return (example.mean() + example.std() * rng.standard_normal(shape)).astype(example.dtype)
    if example.dtype == np.bool_:
        return rng.random(shape) < example.mean()
    return rng.integers(example.min(), example.max() + 1, size=shape, dtype=example.dtype)
