"""A model that trains at a plan: the module that users hold.

The user's module is read, not changed: its parameters' values, and what the graph does not say (a norm's eps, a dropout's
probability, the base of rotary positions).  Its ``forward`` is not called, since views with sizes in them would not fit local
tensors: the graph's layers are run by the runtime's own (:mod:`program`), opaque ones by a copy of the submodule.

Collectives go through local tensors and eager autograd, so the module does not run inside ``nn.Graph``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from .comparing import check_same_function
from .dropouts import check_dropouts
from .feeding import feeds_of, inputs_of
from .load import load_oneflow
from .parameters import StoredParameter
from .program import Program
from .setting import Batch
from .statements import LOSSES
from .stepping import Stepper
from .tracing import Measure, TracedSection, trace
from .userparameters import check_parameters

flow: Any = load_oneflow()

__all__ = ["AppliedModule"]

Tensor = Any


class AppliedModule(flow.nn.Module):
    """A model at a plan's strategies; made by :func:`autoddl.apply`, on every rank.

    ``module(*batch)`` takes the whole micro-batch, the same on every rank (OneFlow tensors on the host, or numpy arrays): the
    inputs and, where the graph ends in a loss, the targets.  It returns the mean loss of the micro-batch on every rank; without
    a loss the whole output, of which every rank should compute the same loss.  After ``loss.backward()`` gradients are right.

    Args:
        module, graph, strategies, workload: the user's model, and what the plan says.
        feeds: which input each layer that reads the data reads; see :func:`autoddl.apply`.
        check: whether the first pass begins by comparing this module with the user's (:mod:`comparing`).
    """

    def __init__(
        self,
        module: Any,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        workload: Workload,
        feeds: Mapping[str, int | None] | None = None,
        check: bool = False,
    ):
        super().__init__()
        world = flow.env.get_world_size()
        check_parameters(module, graph, strategies, world)
        check_dropouts(module, graph)
        self._graph = graph
        self._workload = workload
        self._program = Program(module, graph, strategies, Stepper(world), workload.recompute)
        # Not as an attribute, which would make its parameters this module's.
        self._to_be_compared = [module] if check else []
        self._is_summing = True
        self._num_passes = 0
        self._feeds = feeds_of(graph, feeds or {})
        self._names = tuple(module.state_dict().keys())
        self._kept_buffers = _buffers(module)
        for path, stored in self._program.stored.items():
            _register(self, path, stored.tensor)
        self.train(module.training)

    # ---- Running -----------------------------------------------------------------------------------------------------

    def forward(self, *batch: Any) -> Tensor:
        """The mean loss of a micro-batch (see the class)."""
        if self._to_be_compared:
            self._compare(batch)
        moment = self._batch(batch)
        value = self._program.run(moment, self._is_summing)
        return value if moment.targets is not None else self._program.whole(value, moment.num_samples)

    def _compare(self, batch: Sequence[Any]) -> None:
        module = self._to_be_compared.pop()  # the comparison itself runs this module
        try:
            with self._program.stepper.not_logging(), flow.enable_grad():
                check_same_function(self, self._program, module, batch)
        except BaseException:
            self._to_be_compared.append(module)
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Micro-batches whose forward pass runs inside only add to this rank's gradients; the first backward pass of one that
        ran outside sums them over the ranks, once."""
        before, self._is_summing = self._is_summing, False
        try:
            yield
        finally:
            self._is_summing = before

    def train_step(self, *batch: Any, loss_of: Callable[[Tensor], Tensor] | None = None) -> float:
        """Forward and backward passes of a whole batch in the plan's micro-batches; gradients are those of the batch's mean
        loss, which is returned.

        They are added to what ``grad`` holds. Between steps call ``optimizer.zero_grad(set_to_none=True)``: OneFlow adds to
        gradients of zero by sending bytes that no plan has promised.

        Args:
            loss_of: the mean loss of a micro-batch, made of the output of a model without one.
        """
        samples = len(batch[0])
        num = self._workload.num_micro_batches
        if samples % num:
            raise UserError(f"a batch of {samples} does not divide into the plan's {num} micro-batches")
        width, total = samples // num, 0.0
        for i in range(num):
            part = [argument[i * width : (i + 1) * width] for argument in batch]
            with contextlib.nullcontext() if i == num - 1 else self.no_sync():
                value = self(*part)
                loss = (loss_of(value) if loss_of else value) / num
                loss.backward()
            total += float(loss.numpy())
        return total

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients so that their Euclidean norm, taken of all as one vector, is ``max_norm`` at most; the norm before.

        All ranks call.  ``nn.utils.clip_grad_norm_`` gathers every gradient for it; here one number is sent.
        """
        program = self._program
        trained = [stored for stored in program.stored.values() if stored.tensor.grad is not None]
        locals_ = [stored.tensor.grad.to_local() for stored in trained]
        squares = sum(float((g * g).sum().numpy()) / stored.num_copies for stored, g in zip(trained, locals_))
        total = program.stepper.reduce(flow.tensor([squares]), [Axis(program.stepper.num_ranks, 1)])
        norm = float(total.numpy()[0]) ** 0.5
        if norm > max_norm:
            for gradient in locals_:
                gradient.mul_(max_norm / norm)
        return norm

    def _batch(self, batch: Sequence[Any]) -> Batch:
        if flow._oneflow_internal.lazy_mode.is_enabled():
            raise UserError("an applied module runs in eager mode only, not inside nn.Graph: its collectives are eager")
        arrays = [_to_numpy(argument) for argument in batch]
        num_inputs = len(arrays) - (1 if _has_loss(self._graph) else 0)
        if num_inputs < 1:
            raise UserError(f"{len(arrays)} arguments are too few, should be the inputs and then the targets")
        samples = len(arrays[0])
        for ready in self._program.layers:
            if samples % ready.strategy.p0:
                raise UserError(
                    f"{ready.layer.describe()}: {samples} samples do not divide over the {ready.strategy.p0} of {ready.strategy}"
                )
        inputs = inputs_of(self._graph, self._feeds, arrays[:num_inputs])
        self._num_passes += 1
        targets = arrays[-1] if len(arrays) > num_inputs else None
        return Batch(inputs, targets, samples, self._num_passes if self.training else None)

    # ---- Looking inside ----------------------------------------------------------------------------------------------

    def trace(self, *batch: Any, measure: Measure | None = None) -> tuple[Tensor, list[TracedSection]]:
        """The loss, and one forward and backward pass run layer by layer, so that each phase of each layer can be measured.

        Gradients are added to the parameters' as ``backward`` would.  A model without a loss gives this rank's part of its
        output, and the gradients are those of the sum of all its elements.

        Args:
            measure: called with every section to run, on all ranks in the same order.
        """
        return trace(self._program, self._batch(batch), measure)

    @property
    def stepper(self) -> Stepper:
        """The ranks, and the log of steps."""
        return self._program.stepper

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def logical_gradients(self) -> dict[str, np.ndarray]:
        """The gradients by the model's own names and shapes, on every rank; all ranks call."""
        return self._logical(lambda stored: stored.tensor.grad)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The plain model's: its names, shapes and values, as local tensors on every rank; all ranks call."""
        values = self._logical(lambda stored: stored.tensor)
        values.update({name: buffer for name, buffer in self._kept_buffers.items() if name not in values})
        return {name: flow.tensor(values[name]) for name in self._names if name in values}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Take the values of a plain model's ``state_dict`` (local tensors or numpy arrays), the same on every rank.

        Raises:
            UserError: (if strict) a name is missing or unknown, or a shape differs.
        """
        self._to_be_compared.clear()  # its values are others now
        known = {name: rows for stored in self._program.stored.values() for name, rows in stored.layout.sources}
        names = set(known) | set(self._program.aliases) | set(self._kept_buffers)
        missing = [name for name in known if name not in state_dict]
        unknown = [name for name in state_dict if name not in names]
        if strict and (missing or unknown):
            what = f"lacks {missing[0]!r}" if missing else f"holds {unknown[0]!r}, which the model has not"
            raise UserError(f"the state_dict {what}")
        for stored in self._program.stored.values():
            given = {name: state_dict[name] for name, _ in stored.layout.sources if name in state_dict}
            current = {} if len(given) == len(stored.layout.sources) else dict(stored.parts(stored.logical()))
            parts = []
            for name, rows in stored.layout.sources:
                parts.append(_to_numpy(given[name]) if name in given else current[name])
                shape = (rows, *stored.layout.shape[1:])
                if parts[-1].shape != shape:
                    raise UserError(f"the state_dict's {name} has shape {parts[-1].shape}, should have {shape}")
            stored.assign(np.concatenate(parts))
        for name in self._kept_buffers:
            if name in state_dict:
                self._kept_buffers[name] = _to_numpy(state_dict[name])

    def _logical(self, tensor_of: Callable[[StoredParameter], Tensor | None]) -> dict[str, np.ndarray]:
        values: dict[str, np.ndarray] = {}
        for stored in self._program.stored.values():
            tensor = tensor_of(stored)
            if tensor is not None:
                values.update(stored.parts(stored.logical(tensor)))
        values.update({alias: values[name] for alias, name in self._program.aliases.items() if name in values})
        return values


# ---- Helpers -----------------------------------------------------------------------------------------------------------


def _has_loss(graph: LayerGraph) -> bool:
    last = graph.layers[-1]
    return last.kind == "loss" or bool(LOSSES & set(last.epilogue))


def _register(module: Any, path: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter at a path, in plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, flow.nn.Module())
        module = module._modules[parent]
    module.register_parameter(name, tensor)


def _buffers(module: Any) -> dict[str, np.ndarray]:
    trained = {name for name, _ in module.named_parameters()}
    return {name: _to_numpy(value) for name, value in module.named_buffers() if name not in trained}


def _to_numpy(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.detach().numpy()
