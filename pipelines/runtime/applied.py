"""`AppliedModule`: a user's model that trains at the strategies of a plan.

The user's module is read, not changed: the values of its parameters, and the facts that the graph does not contain (the eps of a
norm, the probability of a dropout, the base of rotary positions).  Its ``forward`` is not called, since the sizes in its views
would not fit local tensors.  Instead the layers of the graph are run as a single stage (:mod:`.stage`), opaque layers by a copy of
their submodule.

The user's script calls ``backward`` and owns the optimizer.  So gradients are summed by autograd nodes in the last backward pass
(:mod:`.parameters`), and not by the engine of :mod:`.pipeline`, whose schedule also contains the optimizer's steps.

In mixed precision the module's parameters are masters, their gradients have the compute type, and the gradient of the loss is
scaled.  So the optimizer's step is made by `AppliedModule.step`.

Collectives use local tensors and eager autograd, so the module does not run inside ``nn.Graph``.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.program import at
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from .backend import HOST, Backend
from .comparing import check_same_function
from .load import load_oneflow
from .loss_scaling import LossScaler
from .optimizergroups import check_optimizer, stored_groups
from .recording import Recorder, Tracer
from .replay.functions import unpacked
from .setting import Batch
from .stage.global_weights import GlobalWeights
from .stage.model import PlannedModel
from .stage.output import whole_output
from .stage.plan import stage_plan
from .stage.stage import Stage
from .stage.tracing import Measure, StageTracer, TracedSection
from .stepping import Stepper
from .train_steps import train_step
from .updates import scale_gradient, update_parameters
from .userparameters import find_parameter, first_names, values_of

flow: Any = load_oneflow()

__all__ = ["AppliedModule"]

Tensor = Any


class AppliedModule(flow.nn.Module):
    """A model at the strategies of a plan; :func:`autoddl.apply` creates it on every rank.

    ``module(*batch)`` takes the whole micro-batch, the same on every rank (OneFlow tensors on the host, or numpy arrays): the
    inputs and, if the graph ends in a loss, the targets.  It returns the mean loss of the micro-batch on every rank.  For a model
    without a loss it returns the whole output, from which every rank should compute the same loss.  ``loss.backward()`` computes
    the gradients of that loss.

    Args:
        module: The user's model.
        graph: Layer graph of the plan.
        strategies: Strategies of the plan, by layer.
        workload: Workload of the plan: micro-batches, recomputation and attention.
        feeds: Index of the model's input that each input layer reads; see :func:`autoddl.apply`.
        check: Whether the first forward pass begins by comparing this module with the user's (:mod:`comparing`).
        backend: Where tensors lie, and in which types the ranks compute.

    Attributes:
        graph: Layer graph of the plan.
        scaler: Scale of the loss, and the number of skipped steps; None if losses are not scaled.
        tracer: Runs each `train_step`, and decides which ones are recorded; None: none is.

    Raises:
        UserError: The plan is for another number of ranks, or the module does not fit the graph.
    """

    def __init__(
        self,
        module: Any,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        workload: Workload,
        feeds: Mapping[str, int | None] | None = None,
        check: bool = False,
        backend: Backend = HOST,
    ):
        super().__init__()
        plan = stage_plan(graph, strategies, workload)
        stepper = Stepper(flow.env.get_world_size(), backend)
        if plan.num_ranks != stepper.num_ranks:
            raise UserError(f"the plan is for {plan.num_ranks} ranks, this job has {stepper.num_ranks}")
        model = PlannedModel(module, graph, (plan,), feeds or {})
        self._has_loss, self._reads_targets = model.has_loss, graph.reads_targets
        self._workload, self.graph = workload, graph
        self._stage = Stage(model, 0, model.weights(), stepper)
        values = values_of(module, stepper)
        self._weights = GlobalWeights(self._stage, values, workload.bucket_bytes)
        self._module = weakref.ref(module)
        # In a list: as an attribute it would become a submodule, with its parameters.
        self._unchecked_module = [module] if check else []
        self._is_summing = True
        self.scaler = LossScaler() if backend.scales_losses else None
        self._num_passes = 0
        self.tracer: Tracer | None = None
        first = first_names(module)
        # All names in the user's module, each with the first name of the same parameter.
        self._names = {name: first.get(id(find_parameter(module, name)), name) for name in module.state_dict()}
        self._buffer_values = {name: _to_numpy(value) for name, value in module.named_buffers()}
        self._buffer_values.update((name, values[name]) for name in graph.unused if name in values)
        for path, parameter in self._weights.parameters.items():
            _register(self, path, parameter.tensor)
        self.train(module.training)

    # ---- Running -----------------------------------------------------------------------------------------------------

    def forward(self, *batch: Any) -> Tensor:
        """Return the mean loss of a micro-batch, or the whole output of a model without a loss; see the class."""
        if self._unchecked_module:
            self._compare(batch)
            self._num_passes = 0
        micro_batch = self._batch(batch)
        if self.stepper.recorder is not None:
            self.stepper.recorder.begin_pass("forward")
        value = self._stage.run(None, self._weights.local(self._is_summing), micro_batch)
        if not self._has_loss:
            value = whole_output(value, self._stage, micro_batch.num_samples).to(self.stepper.backend.master)
        value = scale_gradient(value, self._loss_scale)
        program = self._stage.layers[-1].layer.program
        if program is None or program.is_loss or len(program.results) == 1:
            return value
        # The output of a sample is all results of the model, one after the other.
        samples, results, first = micro_batch.num_samples, [], 0
        for result in program.results:
            shape = at(result.shape, samples)
            width = prod(shape) // samples
            results.append(unpacked(value.reshape(samples, -1)[:, first : first + width], shape, result.outer))
            first += width
        return tuple(results)

    @property
    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.scale

    def _compare(self, batch: Sequence[Any]) -> None:
        """Compare this module's loss and gradients with those of the user's module."""
        module = self._unchecked_module.pop()  # first, since the comparison itself runs this module
        try:
            with self.stepper.not_logging(), flow.enable_grad():
                check_same_function(self, self._weights, module, batch, self._loss_scale)
        except BaseException:
            self._unchecked_module.append(module)
            raise

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which gradients are accumulated without communication.

        Micro-batches whose forward pass runs inside add to the gradients of each rank only.  The first backward pass of a
        micro-batch whose forward pass ran outside sums the accumulated gradients over the ranks.
        """
        before, self._is_summing = self._is_summing, False
        try:
            yield
        finally:
            self._is_summing = before

    def train_step(self, *batch: Any, loss_of: Callable[[Tensor], Tensor] | None = None) -> float:
        """Run the forward and backward passes of a whole batch in the plan's micro-batches, and return its mean loss.

        The gradients of the mean loss are added to those in ``grad``. Between steps call ``optimizer.zero_grad(set_to_none=True)``:
        if the gradients are zero tensors instead, OneFlow sends bytes to add to them, which the plan's price does not contain.

        Args:
            batch: Inputs and, if the model has a loss, targets of the whole batch, the same on every rank.
            loss_of: Computes the mean loss of a micro-batch from the output; for a model without a loss.

        Raises:
            UserError: The number of micro-batches does not divide the batch.
        """
        if self.tracer is None:
            return self._train_step(batch, loss_of)

        def step(recorder: Recorder | None) -> float:
            if recorder is None:
                return self._train_step(batch, loss_of)
            self.stepper.recorder = recorder
            try:
                with recorder.step(), recorder.task("", "forward"):
                    return self._train_step(batch, loss_of)
            finally:
                self.stepper.recorder = None

        result: float = self.tracer.run(step)
        return result

    def _train_step(self, batch: Sequence[Any], loss_of: Callable[[Tensor], Tensor] | None) -> float:
        """Run the forward and backward passes of a whole batch; see `train_step`."""
        samples = len(batch[0])
        num_micro_batches = self._workload.num_micro_batches
        if samples % num_micro_batches:
            raise UserError(f"a batch of {samples} does not divide into the plan's {num_micro_batches} micro-batches")

        def loss(*micro_batch: Any, sync: bool) -> Tensor:
            with contextlib.nullcontext() if sync else self.no_sync():
                value = self(*micro_batch)
            return loss_of(value) if loss_of else value

        size = samples // num_micro_batches
        parts = [slice(i * size, (i + 1) * size) for i in range(num_micro_batches)]
        return train_step(loss, [[argument[part] for argument in batch] for part in parts])

    def step(self, optimizer: Any) -> bool:
        """Make an optimizer step with the gradients, and remove them; all ranks call.

        In single precision this is ``optimizer.step()`` and ``optimizer.zero_grad(set_to_none=True)``. In mixed precision, where an
        optimizer's own step would use scaled gradients, the gradients are converted to the master type and divided by the scale of
        the loss. If a gradient is not finite on any rank, all ranks skip the step, and the scale is halved.

        Args:
            optimizer: Element-wise optimizer of the module's parameters, with one or several groups (`parameter_groups`).

        Returns:
            Whether the step was made, and not skipped.

        Raises:
            UserError: The optimizer has parameters of another module.
        """
        stored = list(self._weights.parameters.values())
        check_optimizer(optimizer, stored)
        return update_parameters(optimizer, stored, self.stepper, self.scaler)

    def parameter_groups(self, groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the groups of an optimizer, with the parameters of this module in place of those of the user's module.

            decayed = [p for p in module.parameters() if p.ndim > 1]
            others = [p for p in module.parameters() if p.ndim == 1]
            groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
            optimizer = oneflow.optim.AdamW(applied.parameter_groups(groups), lr=1e-3)

        Args:
            groups: Options of each group, and under ``params`` parameters of the user's module, or their names. Parameters in no
                group are not updated.

        Raises:
            UserError: A parameter is not one of the module, or is in several groups; or parameters that ranks store in one tensor
                (such as fused projections) are in groups with different options.
        """
        return stored_groups(groups, self._module(), self._names, self._weights.parameters)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all gradients, taken together as one vector, to a Euclidean norm of at most ``max_norm``; all ranks call.

        ``nn.utils.clip_grad_norm_`` gathers every gradient for the norm; this method sends one number.

        Returns:
            The norm before scaling.
        """
        trained = [parameter for parameter in self._weights.parameters.values() if parameter.tensor.grad is not None]
        shards = [parameter.tensor.grad.to_local() for parameter in trained]
        square_sum = 0.0
        for parameter, shard in zip(trained, shards):
            unscaled = shard.to(parameter.tensor.dtype) * (1.0 / self._loss_scale)
            square_sum += float((unscaled * unscaled).sum().numpy()) / parameter.num_copies
        backend = self.stepper.backend
        total = self.stepper.reduce(backend.tensor([square_sum], backend.master), [Axis(self.stepper.num_ranks, 1)])
        norm = float(total.numpy()[0]) ** 0.5
        if max_norm < norm < float("inf"):  # a step with infinite gradients is skipped
            for shard in shards:
                shard.mul_(max_norm / norm)
        return norm

    def _batch(self, batch: Sequence[Any]) -> Batch:
        """Check the arguments of a forward pass, and return them as a `Batch`."""
        if flow._oneflow_internal.lazy_mode.is_enabled():
            raise UserError("an applied module runs in eager mode only, not inside nn.Graph: its collectives are eager")
        arrays = [_to_numpy(argument) for argument in batch]
        if len(arrays) <= self._reads_targets:
            raise UserError(
                f"a forward pass takes the inputs and then the targets; it was given {len(arrays)} argument(s)"
            )
        samples = len(arrays[0])
        for ready in self._stage.layers:
            if not ready.strategy.fits(ready.layer, samples):
                raise UserError(
                    f"{ready.layer.describe()}: {samples} samples do not divide into the {ready.strategy.p0} parts of "
                    f"strategy {ready.strategy}"
                )
        self._num_passes += 1
        return self._stage.batch(arrays, samples, self._num_passes if self.training else None)

    # ---- Looking inside ----------------------------------------------------------------------------------------------

    def trace(self, *batch: Any, measure: Measure | None = None) -> tuple[Tensor, list[TracedSection]]:
        """Run one forward and backward pass layer by layer, so that each phase of each layer can be measured.

        Gradients are added to those of the parameters, as by ``backward``.  For a model without a loss they are the gradients of
        the sum of all elements of the output.

        Args:
            batch: Arguments of the forward pass.
            measure: Called with every section, on all ranks in the same order; None: sections are run without measuring.

        Returns:
            (the loss or, for a model without a loss, this rank's part of the output; the sections).
        """
        tracer = StageTracer(self._stage, self._weights.readable(), measure)
        value = tracer.run(None, self._batch(batch))
        for name, gradient in tracer.sum_gradients().items():
            self._weights.parameters[name].add_gradient(gradient)
        return value, tracer.sections

    @property
    def stepper(self) -> Stepper:
        """The ranks, with the log of the steps that they ran."""
        return self._stage.stepper

    # ---- Parameters --------------------------------------------------------------------------------------------------

    def logical_gradients(self) -> dict[str, np.ndarray]:
        """Return the gradients with the names and shapes of the user's module, on every rank; all ranks call."""
        gradients = self._weights.gradients()
        return self._named({name: value / self._loss_scale for name, value in gradients.items()})

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """Return the ``state_dict`` of the user's module with present values, as local tensors on every rank; all ranks call."""
        statistics = {
            f"{path}.{name}": value
            for path, (running, layout) in self._stage.statistics.items()
            for name, value in running.whole(layout, self.stepper).items()
        }
        values = self._named({**self._buffer_values, **statistics, **self._weights.values()})
        return {name: HOST.tensor(value) for name, value in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:  # type: ignore[override]
        """Load the values of a plain module's ``state_dict``.

        Args:
            state_dict: Local tensors or numpy arrays, the same on every rank.
            strict: Whether every parameter has to be there, and no other names.

        Raises:
            UserError: A shape differs; or, if ``strict``, a name is missing or unknown.
        """
        self._unchecked_module.clear()  # from now on the values differ from those of the user's module
        shapes = self._stage.weights.shapes()
        given = {name: _to_numpy(value) for name, value in state_dict.items()}
        missing = [name for name in shapes if name not in given]
        unknown = [name for name in given if name not in self._names and name not in self._buffer_values]
        if strict and (missing or unknown):
            problem = f"lacks {missing[0]!r}" if missing else f"holds {unknown[0]!r}, which the model has not"
            raise UserError(f"the state_dict {problem}")
        values = self._weights.values() if missing else {}
        for name, first in self._names.items():
            if name in given and first in shapes:
                values[first] = given[name]
                if given[name].shape != shapes[first]:
                    raise UserError(
                        f"the state_dict's {name} has shape {given[name].shape}, should have {shapes[first]}"
                    )
        self._weights.assign(values)
        self._buffer_values.update((name, given[name]) for name in self._buffer_values if name in given)
        for path, (running, _) in self._stage.statistics.items():
            running.load({name[len(path) + 1 :]: value for name, value in given.items() if name.startswith(f"{path}.")})

    def _named(self, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return values, given by first names, by all names in the user's module."""
        return {name: values[first] for name, first in self._names.items() if first in values}


# ---- Helpers -----------------------------------------------------------------------------------------------------------


def _register(module: Any, path: str, tensor: Tensor) -> None:
    """Register ``tensor`` as the parameter at a path, and create the modules that contain it."""
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in module._modules:
            module.add_module(parent, flow.nn.Module())
        module = module._modules[parent]
    module.register_parameter(name, tensor)


def _to_numpy(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else value.detach().numpy()
