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

__all__ = ["LocalParameter", "OptimizerFactory", "ReplicaWeights", "WeightVersions"]

Tensor = Any
OptimizerFactory = Callable[[Sequence[Tensor]], Any]
"""Makes an optimizer of a list of parameters, such as ``lambda weights: flow.optim.SGD(weights, lr=0.1)``."""


class LocalParameter:
    """A weight that this rank has alone.

    Attributes:
        tensor: for the optimizer.
    """

    def __init__(self, value: Tensor) -> None:
        self.tensor = flow.nn.Parameter(value.detach().clone())

    def local(self) -> Tensor:
        """Its value, without history, sharing the storage."""
        return self.tensor.detach()

    def renew(self) -> None:
        """Move the value to new storage."""
        self.tensor.data = self.tensor.detach() + 0

    def give(self, gradient: Tensor | None) -> None:
        """Let the optimizer have a gradient, or none."""
        self.tensor.grad = gradient


class WeightVersions:
    """Weights of one (pipeline, stage): versions of their values, and gradients.

    Args:
        names: of the weights.
        parameters: the newest values: `LocalParameter` or, in exported files, parts of global tensors (`StoredParameter`).
        make_optimizer: called once, with the tensors of the parameters (not at all where there are none).
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Any], make_optimizer: OptimizerFactory) -> None:
        self.names = tuple(names)
        self.parameters = list(parameters)
        tensors = [parameter.tensor for parameter in self.parameters]
        self.optimizer = make_optimizer(tensors) if tensors else None
        self._versions: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    @property
    def num_versions(self) -> int:
        """Versions alive, the newest included."""
        return len(self._versions)

    def begin(self) -> None:
        """The present values are version 0 of a new run."""
        self._versions = {0: self._leaves()}
        self._gradients = {}

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
        vectors = [flow.zeros_like(self.parameters[i].local()) if (own := sums[i]) is None else own for i in wanted]
        return flow.cat([vector.reshape(-1) for vector in vectors], dim=0)

    def set_gradient(self, update: int, names: Sequence[str], vector: Tensor) -> None:
        """Put a sum over ranks, in the form of `gradient`, in the place of what this rank has collected."""
        sums = self._gradients.setdefault(update, [None] * len(self.parameters))
        position = 0
        for name in names:
            i = self.names.index(name)
            own = self.parameters[i].local()
            sums[i] = flow.narrow(vector, 0, position, own.numel()).reshape(*own.shape)
            position += own.numel()

    def update(self, number: int, keeps: bool) -> None:
        """Turn version ``number`` into the next one with the gradients of update ``number``.

        Args:
            keeps: whether the version is still needed after that, until `drop`.
        """
        if keeps:
            for parameter in self.parameters:
                parameter.renew()
        else:
            del self._versions[number]
        gradients = self._gradients.pop(number, [None] * len(self.parameters))
        self._use(number, gradients)
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.give(gradient)
        if self.optimizer is not None:
            self.optimizer.step()
        for parameter in self.parameters:
            parameter.give(None)
        self._versions[number + 1] = self._leaves()

    def _use(self, update: int, gradients: Sequence[Tensor | None]) -> None:
        """An update is about to be made with these."""

    def drop(self, number: int) -> None:
        """Nobody needs this version any more."""
        del self._versions[number]

    def _leaves(self) -> list[Tensor]:
        return [parameter.local().requires_grad_(True) for parameter in self.parameters]


class ReplicaWeights(WeightVersions):
    """Weights of one (pipeline, stage) that can be saved.

    Args:
        values: initial ones by name; copied.
        make_optimizer: as of `WeightVersions`.

    Attributes:
        keeps_gradients: whether the gradients of every update of a run can be asked for afterwards.
    """

    def __init__(self, values: dict[str, Tensor], make_optimizer: OptimizerFactory) -> None:
        super().__init__(tuple(values), list(map(LocalParameter, values.values())), make_optimizer)
        self.keeps_gradients = False
        self._kept: dict[int, list[Tensor | None]] = {}

    def begin(self) -> None:
        super().begin()
        self._kept = {}

    def _use(self, update: int, gradients: Sequence[Tensor | None]) -> None:
        if self.keeps_gradients:  # as copies: optimizers may work on the tensors themselves
            self._kept[update] = [None if gradient is None else gradient.clone() for gradient in gradients]

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Entry]:
        """The newest values and the optimizer's state, by name."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state_dict()["state"]
        common = {f"all.{key}": np.array(value) for key, value in state.items() if isinstance(key, str)}
        return {
            name: {
                "value": np.array(parameter.local().numpy()),
                **{key: np.array(value.numpy()) for key, value in state.get(index, {}).items()},
                **common,
            }
            for index, (name, parameter) in enumerate(zip(self.names, self.parameters))
        }

    def kept_gradients(self, update: int) -> dict[str, Entry]:
        """What an update of the last run was made with, by name, in the form of `entries` (zeros where nothing was collected)."""
        return {
            name: {"value": np.array((flow.zeros_like(parameter.local()) if gradient is None else gradient).numpy())}
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
            parameter.tensor.data.copy_(flow.tensor(entry.pop("value")))
            for key in [key for key in entry if key.startswith("all.")]:
                saved["state"][key[len("all.") :]] = entry.pop(key).item()
            saved["state"][index] = {key: flow.tensor(value) for key, value in entry.items()}
        self.optimizer.load_state_dict(saved)
