"""The weights of one replica of a stage: versions of their values, gradients of each update, and the optimizer.

The optimizer owns the newest values. Computations read a version through separate autograd leaves that share its storage, so the
newest version needs no memory of its own. If a version still has readers when it is updated, the newest values are first copied to
new storage (``parameter.data = copy``), and the old storage stays with the leaves of the version. So there are never more copies
than versions.

Gradients are kept separately for each update, since backward passes of micro-batches of two updates may alternate.

**Sharded weights** (ZeRO).  Of a weight that is divided among ranks, the optimizer owns this rank's shard.  What computations read
is gathered when a version begins, for all weights that are divided along the same axes at once: the whole part of the rank, which
accumulates whole gradients (``zero`` = 1), the whole part and a shard that accumulates gradients (2), or the shard alone, which
every layer gathers (3).  With ``hybrid``, shards of gradients and of what is read are those inside a node.

In mixed precision the optimizer owns master weights. The leaves of a version are copies in the compute type, with storage of their
own, so an older version costs no further copy of the masters. Gradients have the compute type, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..backend import HOST, Backend
from ..comm.parameter_layouts import ParameterLayout
from ..load import load_oneflow
from ..shards import HeldWeight, gradient_shape, readable_weights
from ..stepping import Ranks
from ..updates import are_finite, step_masters
from .checkpoint import Entry

flow: Any = load_oneflow()

__all__ = ["LocalParameter", "OptimizerFactory", "ReplicaWeights", "WeightVersions"]

Tensor = Any
OptimizerFactory = Callable[[Sequence[Tensor]], Any]
"""Returns an optimizer for a list of parameters, such as ``lambda weights: flow.optim.SGD(weights, lr=0.1)``."""


class LocalParameter:
    """A weight stored as a local tensor of this rank.

    Args:
        value: Initial value; copied.
        backend: Device and types.

    Attributes:
        tensor: The ``nn.Parameter`` that the optimizer updates, of the master type.
    """

    def __init__(self, value: Tensor, backend: Backend) -> None:
        self._backend = backend
        self.tensor = flow.nn.Parameter(value.detach().to(backend.device, backend.master).clone())

    def local(self) -> Tensor:
        """Return the value without autograd history; it shares the parameter's storage."""
        return self.tensor.detach()

    def new_leaf(self) -> Tensor:
        """Return an autograd leaf with the present value in the compute type."""
        value = self.local().to(self._backend.compute) if self._backend.has_masters else self.local()
        return value.requires_grad_(True)

    def copy_storage(self) -> None:
        """Copy the value to new storage; the old storage stays with tensors that share it."""
        self.tensor.data = self.tensor.detach() + 0

    def set_gradient(self, gradient: Tensor | None) -> None:
        """Set the gradient that the optimizer reads; None: no gradient."""
        self.tensor.grad = gradient


class WeightVersions:
    """The weights of one (pipeline, stage): versions of their values, and their gradients.

    Args:
        names: Names of the weights.
        parameters: The newest values: `LocalParameter` objects or, in exported files, global tensors (`StoredParameter`).
        make_optimizer: Called once with the parameters' tensors; not called if there are no parameters.
        backend: Device and types.
        layouts: Layouts of the weights; None if none is divided.
        ranks: The ranks of the stage; None if no weight is divided.

    Attributes:
        names: Names of the weights.
        parameters: The newest values, in the order of ``names``.
        optimizer: Optimizer of the parameters; None if there are none.
    """

    def __init__(
        self,
        names: Sequence[str],
        parameters: Sequence[Any],
        make_optimizer: OptimizerFactory,
        backend: Backend,
        layouts: Sequence[ParameterLayout] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.backend = backend
        self._layouts: list[ParameterLayout | None] = (
            [None] * len(names) if layouts is None else [each if each.zero else None for each in layouts]
        )
        self._ranks = ranks
        self.names = tuple(names)
        self.parameters = list(parameters)
        tensors = [parameter.tensor for parameter in self.parameters]
        self.optimizer = make_optimizer(tensors) if tensors else None
        self._versions: dict[int, list[Any]] = {}
        # What computations read of the present values, if some weight is divided: it is gathered once per update.
        self._present: list[Any] | None = None
        self._gradients: dict[int, list[Tensor | None]] = {}

    @property
    def num_versions(self) -> int:
        """Number of versions in memory, including the newest one."""
        return len(self._versions)

    def begin(self) -> None:
        """Begin a run of the schedule: the present values become version 0."""
        if self._present is None:
            self.renew()
        self._versions = {0: self._leaves() if self._present is None else self._present}
        self._gradients = {}

    def renew(self) -> None:
        """Gather divided weights, after the parameters were changed otherwise than by `update`; all ranks of the stage call."""
        is_divided = any(layout is not None for layout in self._layouts)
        self._present = self._leaves() if is_divided else None

    def version(self, number: int) -> list[Any]:
        """Return what computations read of a version, in the order of ``names``: autograd leaves, or `HeldWeight` objects."""
        return self._versions[number]

    def collect(self, number: int, update: int) -> Tensor | None:
        """Move the gradients from the leaves of version ``number`` to the sums of ``update``, after a backward pass.

        Returns:
            The first weight's gradient sum, which the backward pass computes last: when it is ready, all are. None if no weight
            has a gradient.
        """
        sums = self._gradients.setdefault(update, [None] * len(self.parameters))
        for i, weight in enumerate(self._versions[number]):
            leaf = weight.shard if isinstance(weight, HeldWeight) else weight
            gradient, leaf.grad = leaf.grad, None
            if gradient is not None:
                sums[i] = gradient if sums[i] is None else sums[i].add_(gradient)  # type: ignore[union-attr]
        return next((gradient for gradient in sums if gradient is not None), None)

    def gradient(self, update: int, names: Sequence[str]) -> Tensor | None:
        """Return this rank's gradient sums of some weights for an update, concatenated to one vector.

        Weights without a gradient contribute zeros. The result is None if ``names`` is empty.
        """
        gradients = self.gradients(update, names)
        if not gradients:
            return None
        return flow.cat([gradient.reshape(-1) for gradient in gradients], dim=0).to(self.backend.communication)

    def gradients(self, update: int, names: Sequence[str]) -> list[Tensor]:
        """Return this rank's gradient sums of some weights for an update; zeros of weights without a gradient."""
        sums = self._gradients.get(update, [None] * len(self.parameters))
        gradients = []
        for index in map(self.names.index, names):
            gradient, layout = sums[index], self._layouts[index]
            if gradient is None:
                shape = self.parameters[index].local().shape if layout is None else gradient_shape(layout)
                gradient = flow.zeros(*shape, dtype=self.backend.compute, device=self.backend.device)
            gradients.append(gradient)
        return gradients

    def set_gradient(self, update: int, names: Sequence[str], vector: Tensor) -> None:
        """Replace this rank's gradient sums of some weights by those over all ranks, given as one vector (see `gradient`)."""
        sums = self._gradients.setdefault(update, [None] * len(self.parameters))
        position = 0
        for name in names:
            index = self.names.index(name)
            value = self.parameters[index].local()
            sums[index] = flow.narrow(vector, 0, position, value.numel()).reshape(*value.shape)
            position += value.numel()

    def are_finite(self, update: int) -> bool:
        """Return whether this rank's gradient sums of an update are finite."""
        return are_finite(self._gradients.get(update, []))

    def update(self, number: int, keeps: bool, scale: float = 1.0, is_skipped: bool = False) -> None:
        """Make an optimizer step from version ``number`` to the next one, with the gradients of update ``number``.

        Args:
            number: Number of the version and of the update.
            keeps: Whether computations still read the version after the update, until `drop`.
            scale: Factor that the gradients contain.
            is_skipped: Whether the next version has the same values, since the gradients of some rank are not finite.
        """
        if not keeps:
            del self._versions[number]
        elif not self.backend.has_masters:
            for parameter in self.parameters:
                parameter.copy_storage()
        gradients = self._gradients.pop(number, [None] * len(self.parameters))
        self._before_step(number, gradients, scale)
        if self.optimizer is not None and not is_skipped:
            if self.backend.has_masters:
                step_masters(self.optimizer, self.parameters, gradients, scale)
            else:
                for parameter, gradient in zip(self.parameters, gradients):
                    parameter.set_gradient(gradient)
                self.optimizer.step()
                for parameter in self.parameters:
                    parameter.set_gradient(None)
        leaves = self._leaves()
        self._versions[number + 1] = leaves
        if self._present is not None:
            self._present = leaves

    def _before_step(self, update: int, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Called before each optimizer step with its gradients, times ``scale``; subclasses may copy them."""

    def drop(self, number: int) -> None:
        """Free a version that no computation reads any more."""
        del self._versions[number]

    def _leaves(self) -> list[Any]:
        return readable_weights([parameter.new_leaf() for parameter in self.parameters], self._layouts, self._ranks)


class ReplicaWeights(WeightVersions):
    """The weights of one (pipeline, stage) on this rank as local tensors, which can be saved and restored.

    Args:
        values: Initial values by name; copied. Of a divided weight this rank's shard.
        make_optimizer, backend, ranks: As for `WeightVersions`.
        layouts: Layouts of the weights by name; None if none is divided.

    Attributes:
        keeps_gradients: Whether the gradients of every update of a run are kept for `kept_gradients`.
    """

    def __init__(
        self,
        values: dict[str, Tensor],
        make_optimizer: OptimizerFactory,
        backend: Backend = HOST,
        layouts: Mapping[str, ParameterLayout] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        parameters = [LocalParameter(value, backend) for value in values.values()]
        of_values = None if layouts is None else [layouts[name] for name in values]
        super().__init__(tuple(values), parameters, make_optimizer, backend, of_values, ranks)
        self.keeps_gradients = False
        self._kept_gradients: dict[int, list[Tensor | None]] = {}  # by update
        self.renew()

    def begin(self) -> None:
        super().begin()
        self._kept_gradients = {}

    def _before_step(self, update: int, gradients: Sequence[Tensor | None], scale: float) -> None:
        if self.keeps_gradients:  # as copies: an optimizer may change the tensors in place
            master = self.backend.master
            self._kept_gradients[update] = [
                None if gradient is None else gradient.clone().to(master) * (1.0 / scale) for gradient in gradients
            ]

    # ---- Saving ------------------------------------------------------------------------------------------------------

    def entries(self) -> dict[str, Entry]:
        """Return the newest values with the optimizer's state, by name; see `checkpoint.Entry`."""
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
        """Return the gradients of an update of the last run, in the form of `entries`; zeros for weights without a gradient."""
        return {
            name: {"value": np.array((flow.zeros_like(parameter.local()) if gradient is None else gradient).numpy())}
            for name, parameter, gradient in zip(self.names, self.parameters, self._kept_gradients[update])
        }

    def restore(self, entries: Mapping[str, Entry]) -> None:
        """Restore values and optimizer states from the `entries` of any replica of these weights."""
        if self.optimizer is None:
            return
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        for index, (name, parameter) in enumerate(zip(self.names, self.parameters)):
            entry = dict(entries[name])
            parameter.tensor.data.copy_(self.backend.tensor(entry.pop("value"), self.backend.master))
            for key in [key for key in entry if key.startswith("all.")]:
                saved["state"][key[len("all.") :]] = entry.pop(key).item()
            # States of the optimizer have the type of the weights, apart from counts.
            saved["state"][index] = {
                key: self.backend.tensor(
                    value, self.backend.master if np.issubdtype(value.dtype, np.floating) else None
                )
                for key, value in entry.items()
            }
        self.optimizer.load_state_dict(saved)
        self.renew()
