"""A model that trains at a plan: the module that users hold.

The user's module is read, not changed: its parameters' values, and what the graph does not say (a norm's eps, a dropout's
probability, the base of rotary positions).  Its ``forward`` is not called, since views with sizes in them would not fit local
tensors: the graph's layers are run as the one stage of a pipeline (:mod:`.stage`), opaque ones by a copy of the submodule.

Collectives go through local tensors and eager autograd, so the module does not run inside ``nn.Graph``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis, Distribution
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.pricing import edge_shape
from autoddl.costmodel.redistribution import redistribute
from autoddl.costmodel.sbp import Broadcast
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from .comparing import check_same_function
from .load import load_oneflow
from .moving import move_tensor
from .setting import Batch
from .stage.global_weights import GlobalWeights
from .stage.model import PlannedModel
from .stage.plan import StagePlan
from .stage.stage import Stage
from .stage.tracing import Measure, StageTracer, TracedSection
from .stepping import Stepper
from .userparameters import find_parameter, first_names, values_of

flow: Any = load_oneflow()
_Function = flow._oneflow_internal.autograd.AutogradFunctionBase

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
        plan = StagePlan(strategies, workload.recompute)
        stepper = Stepper(flow.env.get_world_size())
        if plan.num_ranks != stepper.num_ranks:
            raise UserError(f"the plan is for {plan.num_ranks} ranks, this job has {stepper.num_ranks}")
        model = PlannedModel(module, graph, (plan,), feeds or {})
        self._has_loss = model.has_loss
        self._workload = workload
        self._stage = Stage(model, 0, model.weights(), stepper)
        self._weights = GlobalWeights(self._stage, values_of(module, stepper))
        # Not as an attribute, which would make its parameters this module's.
        self._to_be_compared = [module] if check else []
        self._is_summing = True
        self._num_passes = 0
        first = first_names(module)
        # The plain module's names, each with the first one of the same parameter.
        self._names = {name: first.get(id(find_parameter(module, name)), name) for name in module.state_dict()}
        self._kept_buffers = {name: _to_numpy(value) for name, value in module.named_buffers()}
        for path, parameter in self._weights.parameters.items():
            _register(self, path, parameter.tensor)
        self.train(module.training)

    # ---- Running -----------------------------------------------------------------------------------------------------

    def forward(self, *batch: Any) -> Tensor:
        """The mean loss of a micro-batch (see the class)."""
        if self._to_be_compared:
            self._compare(batch)
        moment = self._batch(batch)
        value = self._stage.run(None, self._weights.local(self._is_summing), moment)
        return value if moment.targets is not None else _whole_output(value, self._stage, moment.num_samples)

    def _compare(self, batch: Sequence[Any]) -> None:
        module = self._to_be_compared.pop()  # the comparison itself runs this module
        try:
            with self.stepper.not_logging(), flow.enable_grad():
                check_same_function(self, self._weights, module, batch)
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
        trained = [one for one in self._weights.parameters.values() if one.tensor.grad is not None]
        locals_ = [parameter.tensor.grad.to_local() for parameter in trained]
        squares = sum(float((g * g).sum().numpy()) / parameter.num_copies for parameter, g in zip(trained, locals_))
        total = self.stepper.reduce(flow.tensor([squares]), [Axis(self.stepper.num_ranks, 1)])
        norm = float(total.numpy()[0]) ** 0.5
        if norm > max_norm:
            for gradient in locals_:
                gradient.mul_(max_norm / norm)
        return norm

    def _batch(self, batch: Sequence[Any]) -> Batch:
        if flow._oneflow_internal.lazy_mode.is_enabled():
            raise UserError("an applied module runs in eager mode only, not inside nn.Graph: its collectives are eager")
        arrays = [_to_numpy(argument) for argument in batch]
        num_inputs = len(arrays) - self._has_loss
        if num_inputs < 1:
            raise UserError(f"{len(arrays)} arguments are too few, should be the inputs and then the targets")
        samples = len(arrays[0])
        for ready in self._stage.layers:
            if samples % ready.strategy.p0:
                raise UserError(
                    f"{ready.layer.describe()}: {samples} samples do not divide over the {ready.strategy.p0} of {ready.strategy}"
                )
        self._num_passes += 1
        targets = arrays[-1] if self._has_loss else None
        return self._stage.batch(arrays[:num_inputs], targets, samples, self._num_passes if self.training else None)

    # ---- Looking inside ----------------------------------------------------------------------------------------------

    def trace(self, *batch: Any, measure: Measure | None = None) -> tuple[Tensor, list[TracedSection]]:
        """The loss, and one forward and backward pass run layer by layer, so that each phase of each layer can be measured.

        Gradients are added to the parameters' as ``backward`` would.  A model without a loss gives this rank's part of its
        output, and the gradients are those of the sum of all its elements.

        Args:
            measure: called with every section to run, on all ranks in the same order.
        """
        tracer = StageTracer(self._stage, self._weights.local(is_summing=False), measure)
        value = tracer.run(None, self._batch(batch))
        for layer, groups in self._weights.groups.items():
            for group in groups:
                if group.reduced:
                    tracer.section(layer, "gradient", group.sum_leaves)
                else:
                    group.sum_leaves()
        return value, tracer.sections

    @property
    def stepper(self) -> Stepper:
        """The ranks, and the log of steps."""
        return self._stage.stepper

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def logical_gradients(self) -> dict[str, np.ndarray]:
        """The gradients by the model's own names and shapes, on every rank; all ranks call."""
        return self._named(self._weights.gradients())

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """The plain model's: its names, shapes and values, as local tensors on every rank; all ranks call."""
        values = self._named({**self._kept_buffers, **self._weights.values()})
        return {name: flow.tensor(value) for name, value in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Take the values of a plain model's ``state_dict`` (local tensors or numpy arrays), the same on every rank.

        Raises:
            UserError: (if strict) a name is missing or unknown, or a shape differs.
        """
        self._to_be_compared.clear()  # its values are others now
        shapes = self._stage.weights.shapes()
        given = {name: _to_numpy(value) for name, value in state_dict.items()}
        missing = [name for name in shapes if name not in given]
        unknown = [name for name in given if name not in self._names and name not in self._kept_buffers]
        if strict and (missing or unknown):
            what = f"lacks {missing[0]!r}" if missing else f"holds {unknown[0]!r}, which the model has not"
            raise UserError(f"the state_dict {what}")
        values = self._weights.values() if missing else {}
        for name, first in self._names.items():
            if name in given and first in shapes:
                values[first] = given[name]
                if given[name].shape != shapes[first]:
                    raise UserError(
                        f"the state_dict's {name} has shape {given[name].shape}, should have {shapes[first]}"
                    )
        self._weights.assign(values)
        self._kept_buffers.update((name, given[name]) for name in self._kept_buffers if name in given)

    def _named(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Values of first names, by all names of the plain module."""
        return {name: values[first] for name, first in self._names.items() if first in values}


# ---- Helpers -----------------------------------------------------------------------------------------------------------


def _whole_output(value: Tensor, stage: Stage, samples: int) -> Tensor:
    """The model's output, gathered on every rank; of its gradient, the same on every rank, each takes its part."""
    last, stepper = stage.layers[-1], stage.stepper
    lying = last.strategy.activations
    shape = edge_shape(last.layer, samples)
    everywhere = Distribution(lying.axes, (Broadcast(),) * len(lying.axes))
    route = redistribute(lying, everywhere, shape)
    part = lying.slices(stepper.rank, shape)

    def forward(ctx: Any, x: Tensor) -> Tensor:
        return move_tensor(x, route, stepper, (0, 2)).clone()

    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy[part[0], :, part[1]].contiguous()

    whole = _Function.apply("whole", forward, backward, value)
    per_sample = last.layer.output_shape
    # Outside of sequences the one row of a sample is the sample itself.
    return whole.reshape(samples, *(per_sample[1:] if len(per_sample) == 2 and last.layer.rows == 1 else per_sample))


def _register(module: Any, path: str, tensor: Tensor) -> None:
    """Make ``tensor`` the parameter at a path, in plain modules on the way."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, flow.nn.Module())
        module = module._modules[parent]
    module.register_parameter(name, tensor)


def _to_numpy(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.detach().numpy()
