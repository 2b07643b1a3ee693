"""`GraphExecutor`: trains a model at the strategies of a plan in an ``nn.Graph`` with forward pass, backward pass and optimizer.

OneFlow's compiler lowers every change of layout to transfers and overlaps them with computation. It also brings accumulation over
micro-batches (gradients are summed over ranks once per step), recomputation of activations, and mixed precision on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from autoddl.costmodel.devices import CPU, GPU
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload

from ..backend import Backend
from ..feeding import feeds_of, inputs_of
from ..load import load_oneflow
from ..loss_scaling import GROWTH_INTERVAL, INITIAL_SCALE
from ..model_constants import LEARNING_RATES
from ..train_steps import make_optimizer
from ..userparameters import check_parameters, first_names
from .kept import KeptGraph
from .model import GlobalModel, InputLayout, global_tensor

flow: Any = load_oneflow()

__all__ = ["GraphExecutor", "MakeOptimizer"]

Tensor = Any
#: Makes the optimizer of some parameters.
MakeOptimizer = Callable[[Iterable[Any]], Any]


class _TrainingGraph(KeptGraph):
    """Forward pass, backward pass and optimizer step of a batch; returns the losses of its micro-batches.

    Args:
        model: The model.
        optimizer: The optimizer of its parameters.
        workload: Micro-batches, recomputation and precision.
        backend: The devices.
        loss_of: Computes the loss from the output of a model without a loss.
    """

    def __init__(
        self,
        model: GlobalModel,
        optimizer: Any,
        workload: Workload,
        backend: Backend,
        loss_of: Callable[[Tensor], Tensor] | None,
    ):
        super().__init__()
        self.model = model
        self._loss_of = loss_of
        self.add_optimizer(optimizer)
        if workload.num_micro_batches > 1:
            self.config.set_gradient_accumulation_steps(workload.num_micro_batches)
        for number in model.recomputed_layers(workload.recompute):  # of the graph's proxies of layers
            self.model._layers[number].to(flow.nn.graph.GraphModule).activation_checkpointing = True
        if backend.device == GPU and backend.has_masters:
            self.config.enable_amp(True, dtype=backend.compute)
            if backend.compute == flow.float16:
                self.set_grad_scaler(flow.amp.GradScaler(init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL))

    def build(self, *tensors: Tensor) -> Tensor:
        output = self.model(*tensors)
        loss = output if self._loss_of is None else self._loss_of(output)
        loss.backward()
        return loss


class GraphExecutor:
    """A model that trains in an ``nn.Graph``; ``autoddl.apply(..., executor="graph")`` makes it on every rank.

    Args:
        module: The user's model, in host memory.
        graph: Layer graph of the plan.
        strategies: Strategies of the plan, by layer.
        workload: Workload of the plan.
        backend: Devices and types.
        feeds: Index of the model's input that each input layer reads; see :func:`autoddl.apply`.
        optimizer: Makes the optimizer of some parameters. Default: the optimizer of the plan.
        loss_of: Computes the mean loss from the output; required for a model without a loss, and only for such.

    Raises:
        UserError: The plan is for another number of ranks or another model, or the graph executor cannot run it.
    """

    def __init__(
        self,
        module: Any,
        graph: LayerGraph,
        strategies: Mapping[str, Strategy],
        workload: Workload,
        backend: Backend,
        feeds: Mapping[str, int | None] | None = None,
        optimizer: MakeOptimizer | None = None,
        loss_of: Callable[[Tensor], Tensor] | None = None,
    ):
        num_ranks = next(iter(strategies.values())).num_devices
        if num_ranks != flow.env.get_world_size():
            raise UserError(f"the plan is for {num_ranks} ranks, this job has {flow.env.get_world_size()}")
        if workload.num_micro_batches > 1 and backend.device == CPU:
            raise UserError(
                f"the plan has {workload.num_micro_batches} micro-batches, whose gradients nn.Graph accumulates; on CPU "
                "ranks it sometimes loses some of them; plan with micro_batch equal to the batch, or use the eager executor"
            )
        if graph.has_loss == (loss_of is not None):
            raise UserError(
                f"loss_of is {'given, but the model has' if loss_of else 'required, since the model has no'} a loss"
            )
        check_parameters(module, graph)
        self.model = GlobalModel(graph, strategies, module, backend)
        self._graph, self._workload, self._backend, self._loss_of = graph, workload, backend, loss_of
        self._make_optimizer = optimizer or self._default_optimizer
        self._feeds = feeds_of(graph, feeds or {})
        # All names in the user's module, each with the first name of the same parameter.
        first, parameters = first_names(module), dict(_all_parameters(module))
        self._names = {name: first[id(parameter)] for name, parameter in parameters.items()}
        self.load_state_dict({name: parameters[name].detach() for name in self.model.parameter_names})
        self._training: Any = None

    def _default_optimizer(self, parameters: Iterable[Any]) -> Any:
        name = self._workload.optimizer
        return make_optimizer(parameters, name, LEARNING_RATES[name])

    # ---- Training ------------------------------------------------------------------------------------------------------------

    def train_step(self, *batch: Any) -> float:
        """Run forward and backward passes of a batch in the plan's micro-batches, and the optimizer; return the mean loss.

        The first call compiles the graph.

        Args:
            batch: Inputs and, if the model has a loss, targets of the whole batch, the same on every rank.

        Raises:
            UserError: The batch has another number of samples than the plan's, or arguments are missing.
        """
        losses = self.training_graph(*self.tensors(*batch))
        return float(np.mean(losses.to_local().numpy(), dtype=np.float64))

    @property
    def training_graph(self) -> Any:
        """The graph; it is called with the result of `tensors`, and returns the losses of the micro-batches."""
        if self._training is None:
            self.set_optimizer(self._make_optimizer)
        return self._training

    def set_optimizer(self, make_optimizer: MakeOptimizer) -> None:
        """Train with another optimizer from now on; the graph is compiled anew."""
        for parameter in self.model.parameters():
            parameter.grad = None  # a compiled graph leaves the symbol of a gradient there
        optimizer = make_optimizer(self.model.parameters())
        self._training = _TrainingGraph(self.model, optimizer, self._workload, self._backend, self._loss_of)

    def tensors(self, *batch: Any) -> list[Tensor]:
        """Return the global tensors of a batch, which `training_graph` takes; nothing is sent.

        Raises:
            UserError: As `train_step`.
        """
        arrays = [value if isinstance(value, np.ndarray) else value.detach().numpy() for value in batch]
        targets = self.model.target_layout
        num_inputs = len(arrays) - (targets is not None)
        if num_inputs < 1:
            raise UserError(f"a step takes the inputs and then the targets; it was given {len(arrays)} argument(s)")
        if len(arrays[0]) != self._workload.batch:
            raise UserError(f"the batch has {len(arrays[0])} samples, should have {self._workload.batch}, as the plan")
        inputs = inputs_of(self._graph, self._feeds, arrays[:num_inputs])
        tensors = [self._tensor(inputs[name], layout) for name, layout in self.model.input_layouts.items()]
        return tensors + ([] if targets is None else [self._tensor(arrays[-1], targets)])

    def _tensor(self, values: np.ndarray, layout: InputLayout) -> Tensor:
        is_float = np.issubdtype(values.dtype, np.floating)
        values = values.reshape(len(values), *layout.shape)
        return global_tensor(values, layout.mesh.placement, layout.sbp, flow.float32 if is_float else flow.int64)

    # ---- Parameters ----------------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterable[Any]:
        """Return the parameters, which are global tensors."""
        return self.model.parameters()  # type: ignore[no-any-return]

    def state_dict(self) -> dict[str, Tensor]:
        """Return present values with the names and shapes of the user's module, as local tensors on every rank; all ranks call."""
        values = self.logical_values()
        return {name: self._backend.tensor(values[first]) for name, first in self._names.items()}

    def logical_values(self) -> dict[str, np.ndarray]:
        """Return present values by the first names of the user's module, on every rank; all ranks call."""
        return self.model.values()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set parameters to the values of a plain module's ``state_dict``, the same on every rank.

        Raises:
            UserError: A parameter is missing, or has another shape.
        """
        shapes = {p.name: p.shape for layer in self._graph.layers for p in layer.parameters}
        values = {}
        for name in self.model.parameter_names:
            if name not in state_dict:
                raise UserError(f"the state_dict lacks {name!r}")
            value = state_dict[name]
            values[name] = value if isinstance(value, np.ndarray) else value.numpy()
            if values[name].shape != shapes[name]:
                raise UserError(f"the state_dict's {name} has shape {values[name].shape}, should have {shapes[name]}")
        self.model.load_values(values)


def _all_parameters(module: Any) -> Iterable[tuple[str, Any]]:
    """Yield all names of parameters in a module; a shared parameter has several."""
    for path, part in module.named_modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), parameter
