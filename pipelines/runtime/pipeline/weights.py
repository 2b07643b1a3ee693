"""The weights of one replica of a stage: their versions, the gradients of each update, and the optimizer.

The optimizer owns the newest values. Computations read a version through leaves of their own that share its storage, so a version
costs nothing while it is the newest one. Before an update of a version that still has readers, the newest values move to new
storage (``parameter.data = copy``): the old storage stays with the version's leaves. So there are never more copies than versions.

Gradients are kept per update, since micro-batches of two updates may go back in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..load import load_oneflow
from .checkpoint import Entry

flow: Any = load_oneflow()

__all__ = ["OptimizerFactory", "ReplicaWeights"]

Tensor = Any
OptimizerFactory = Callable[[Sequence[Tensor]], Any]
"""Makes an optimizer of a list of parameters, such as ``lambda weights: flow.optim.SGD(weights, lr=0.1)``."""


class ReplicaWeights:
    """Weights of one (pipeline, stage).

    Args:
        values: initial ones by name; copied.
        make_optimizer: called once, with the parameters in the order of ``values`` (not at all where there are none).

    Attributes:
        keeps_gradients: whether the gradients of every update of a run can be asked for afterwards.
    """

    def __init__(self, values: dict[str, Tensor], make_optimizer: OptimizerFactory) -> None:
        self.names = tuple(values)
        self.parameters = [flow.nn.Parameter(value.detach().clone()) for value in values.values()]
        self.optimizer = make_optimizer(self.parameters) if self.parameters else None
        self._versions: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self.keeps_gradients = False
        self._kept: dict[int, list[Tensor | None]] = {}

    @property
    def num_versions(self) -> int:
        """Versions alive, the newest included."""
        return len(self._versions)

    def begin(self) -> None:
        """The present values are version 0 of a new run."""
        self._versions = {0: self._leaves()}
        self._gradients = {}
        self._kept = {}

    def version(self, number: int) -> list[Tensor]:
        """The leaves through which computations read a version."""
        return self._versions[number]

    def collect(self, number: int, update: int) -> Tensor | None:
        """Add the gradients that a backward pass left at a version's leaves to those of an update.

        Returns:
            the one that is made last, of the first weight: when it is there, all are.
        """
        sums = self._gradients.setdefault(update, [None] * len(self.parameters))
        for i, leaf in enumerate(self._versions[number]):
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                sums[i] = gradient if sums[i] is None else sums[i].add_(gradient)  # type: ignore[union-attr]
        return next((gradient for gradient in sums if gradient is not None), None)

    def gradient(self, update: int, names: Sequence[str]) -> Tensor | None:
        """What has been collected for an update, as one vector (zeros where nothing was); None for no names."""
        if not names:
            return None
        sums = self._gradients.get(update, [None] * len(self.parameters))
        wanted = [self.names.index(name) for name in names]
        parts = [(sums[i], self.parameters[i]) for i in wanted]
        vectors = [(flow.zeros_like(parameter) if part is None else part).reshape(-1) for part, parameter in parts]
        return flow.cat(vectors, dim=0)

    def set_gradient(self, update: int, names: Sequence[str], vector: Tensor) -> None:
        """Put a sum over ranks, in the form of `gradient`, in the place of what this rank has collected."""
        sums = self._gradients.setdefault(update, [None] * len(self.parameters))
        position = 0
        for name in names:
            i = self.names.index(name)
            parameter = self.parameters[i]
            sums[i] = flow.narrow(vector, 0, position, parameter.numel()).reshape(*parameter.shape)
            position += parameter.numel()

    def update(self, number: int, keeps: bool) -> None:
        """Turn version ``number`` into the next one with the gradients of update ``number``.

        Args:
            keeps: whether the version is still needed after that, until `drop`.
        """
        if keeps:
            for parameter in self.parameters:
                parameter.data = parameter.detach() + 0
        else:
            del self._versions[number]
        gradients = self._gradients.pop(number, [None] * len(self.parameters))
        if self.keeps_gradients:  # as copies: optimizers may work on the tensors themselves
            self._kept[number] = [None if gradient is None else gradient.clone() for gradient in gradients]
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = None
        self._versions[number + 1] = self._leaves()

    def drop(self, number: int) -> None:
        """Nobody needs this version any more."""
        del self._versions[number]

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Entry]:
        """The newest values and the optimizer's state, by name."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state_dict()["state"]
        common = {f"all.{key}": np.array(value) for key, value in state.items() if isinstance(key, str)}
        return {
            name: {
                "value": np.array(parameter.numpy()),
                **{key: np.array(value.numpy()) for key, value in state.get(index, {}).items()},
                **common,
            }
            for index, (name, parameter) in enumerate(zip(self.names, self.parameters))
        }

    def kept_gradients(self, update: int) -> dict[str, Entry]:
        """What an update of the last run was made with, by name, in the form of `entries` (zeros where nothing was collected)."""
        return {
            name: {"value": np.array((flow.zeros_like(parameter) if gradient is None else gradient).numpy())}
            for name, parameter, gradient in zip(self.names, self.parameters, self._kept[update])
        }

    def restore(self, entries: Mapping[str, Entry]) -> None:
        """Take what `entries` gave, of any replica of these weights."""
        if self.optimizer is None:
            return
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters)):
            entry = dict(entries[name])
            parameter.data.copy_(flow.tensor(entry.pop("value")))
            for key in [key for key in entry if key.startswith("all.")]:
                saved["state"][key[len("all.") :]] = entry.pop(key).item()
            saved["state"][index] = {key: flow.tensor(value) for key, value in entry.items()}
        self.optimizer.load_state_dict(saved)

    def _leaves(self) -> list[Tensor]:
        return [parameter.detach().requires_grad_(True) for parameter in self.parameters]
