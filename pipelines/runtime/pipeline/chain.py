"""A model as a chain of layers, and the cut of a chain into pipeline stages.

A *chain* is a list of layers and a loss. Each layer is a function of one tensor, the output of the layer before it. The loss is a
function of the last layer's output and the targets. `module_chain_of` returns the chain of a built-in model or ``nn.Sequential``.
For other models, construct a `ModuleChain`.

Parameters are identified by their names in the whole model. A parameter that several layers use (such as an embedding that is also
the output projection) is identified by its first name. If these layers are in different stages, the parameter is *tied* between the
stages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoddl.costmodel.errors import UserError

from ..load import load_oneflow
from ..models import GPT, MLP, Bert, Llama, token_loss
from ..userparameters import first_names
from .actions import BoundaryTensor

flow: Any = load_oneflow()

__all__ = [
    "BoundaryTensor",
    "ChainLayer",
    "ModuleChain",
    "ParameterPlace",
    "StageModule",
    "boundary_tensors",
    "cut_into_stages",
    "even_stage_sizes",
    "module_chain_of",
    "tied_stages",
]

Tensor = Any


@dataclass(frozen=True)
class ChainLayer:
    """A layer of a chain.

    Attributes:
        run: Computes the layer's output from the output of the layer before it; the first layer takes the model's input.
        modules: Paths of the submodules that ``run`` uses. Their parameters are the parameters of the layer.
    """

    run: Callable[[Tensor], Tensor]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class ModuleChain:
    """A model as a chain of layers.

    Attributes:
        model: The module that contains all layers.
        layers: The layers in order.
        loss: Computes the loss from the last layer's output and the targets: the mean over their rows (samples).
    """

    model: Any
    layers: tuple[ChainLayer, ...]
    loss: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ParameterPlace:
    """A place of a parameter: attribute ``attribute`` of the module ``owner``."""

    owner: Any
    attribute: str


@dataclass(frozen=True)
class StageModule:
    """A stage: consecutive layers of a chain.

    Attributes:
        number: Number of the stage.
        layers: Layers of the stage, in order.
        places: Places of each parameter in the stage's modules, by its name in the model.
        loss: Loss of the chain in the last stage, None in the others.
    """

    number: int
    layers: tuple[ChainLayer, ...]
    places: dict[str, tuple[ParameterPlace, ...]]
    loss: Callable[[Tensor, Tensor], Tensor] | None

    def initial_values(self) -> dict[str, Tensor]:
        """Return the parameters that the model was constructed with, by name."""
        return {name: getattr(places[0].owner, places[0].attribute) for name, places in self.places.items()}

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """Return the stage's output.

        Args:
            x: Output of the previous stage; the model's input in the first stage.
            weights: Values of the parameters, in the order of ``places``.
        """
        for places, weight in zip(self.places.values(), weights):
            for place in places:
                place.owner._parameters[place.attribute] = weight
        for layer in self.layers:
            x = layer.run(x)
        return x


# ---- Chains ------------------------------------------------------------------------------------------------------------


def module_chain_of(model: Any, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> ModuleChain:
    """Return the chain of a built-in transformer or MLP, or of an ``nn.Sequential``.

    Args:
        model: The model.
        loss: Loss of an ``nn.Sequential``, the mean over the rows. Built-in models have their own.

    Raises:
        UserError: the model is neither built-in nor an ``nn.Sequential``, or it is an ``nn.Sequential`` without ``loss``.
    """
    for family, build in ((GPT, _gpt), (Bert, _bert), (Llama, _llama), (MLP, _mlp)):
        if isinstance(model, family):
            return build(model)
    if not isinstance(model, flow.nn.Sequential):
        raise UserError(
            f"a {type(model).__name__} is not a chain of layers; give an nn.Sequential or a ModuleChain, "
            "or make a plan for the model and train the plan"
        )
    if loss is None:
        raise UserError("an nn.Sequential has no loss of its own; give one, such as nn.functional.mse_loss")
    return ModuleChain(model, tuple(ChainLayer(module, (name,)) for name, module in model._modules.items()), loss)


def _gpt(model: GPT) -> ModuleChain:
    """Return the chain of a GPT: embedding, blocks, head."""

    def embed(tokens: Tensor) -> Tensor:
        return model.wte(tokens) + model.wpe(flow.arange(tokens.shape[1], device=tokens.device))

    blocks = tuple(ChainLayer(block, (f"h.{i}",)) for i, block in enumerate(model.h))
    head = ChainLayer(lambda x: model.lm_head(model.ln_f(x)), ("ln_f", "lm_head"))
    return ModuleChain(model, (ChainLayer(embed, ("wte", "wpe")), *blocks, head), token_loss)


def _bert(model: Bert) -> ModuleChain:
    """Return the chain of a BERT: embeddings, layers, head of the masked-language model."""
    blocks = tuple(ChainLayer(block, (f"encoder.layer.{i}",)) for i, block in enumerate(model.encoder.layer))
    return ModuleChain(
        model, (ChainLayer(model.embeddings, ("embeddings",)), *blocks, ChainLayer(model.cls, ("cls",))), token_loss
    )


def _llama(model: Llama) -> ModuleChain:
    """Return the chain of a Llama: embedding, blocks (each computes the rotary angles of its positions), head."""

    def run(block: Any, x: Tensor) -> Tensor:
        return block(x, *model.angles(x.shape[1], x.device))

    blocks = tuple(ChainLayer(functools.partial(run, block), (f"layers.{i}",)) for i, block in enumerate(model.layers))
    head = ChainLayer(lambda x: model.lm_head(model.norm(x)), ("norm", "lm_head"))
    return ModuleChain(model, (ChainLayer(model.embed_tokens, ("embed_tokens",)), *blocks, head), token_loss)


def _mlp(model: MLP) -> ModuleChain:
    """Return the chain of an MLP: linear layers, all but the last one followed by a relu."""

    def linear(name: str, is_last: bool, x: Tensor) -> Tensor:
        y = getattr(model, name)(x)
        return y if is_last else flow.nn.functional.relu(y)

    names = [f"fc{i + 1}" for i in range(model.num_layers)]
    layers = tuple(ChainLayer(functools.partial(linear, name, name == names[-1]), (name,)) for name in names)
    return ModuleChain(model, layers, flow.nn.functional.mse_loss)


# ---- Stages ------------------------------------------------------------------------------------------------------------


def even_stage_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible.

    Later stages have the additional layers, because the first stage has the embedding.

    Raises:
        UserError: ``num_stages`` is less than 1 or greater than ``num_layers``.
    """
    if not 1 <= num_stages <= num_layers:
        raise UserError(f"{num_layers} layers cannot be cut into {num_stages} stages; give 1 to {num_layers}")
    each, extra = divmod(num_layers, num_stages)
    return tuple(each + (stage >= num_stages - extra) for stage in range(num_stages))


def cut_into_stages(chain: ModuleChain, sizes: Sequence[int]) -> tuple[StageModule, ...]:
    """Cut a chain into stages.

    Args:
        chain: The chain.
        sizes: Number of layers of each stage.

    Raises:
        UserError: a size is less than 1, or the sizes do not add up to the number of layers.
    """
    if any(size < 1 for size in sizes) or sum(sizes) != len(chain.layers):
        raise UserError(
            f"stages of {', '.join(map(str, sizes))} layers do not make up the {len(chain.layers)} layers of the model"
        )
    names = first_names(chain.model)
    modules = dict(chain.model.named_modules())
    stages, first = [], 0
    for number, size in enumerate(sizes):
        layers = chain.layers[first : first + size]
        first += size
        places: dict[str, tuple[ParameterPlace, ...]] = {}
        for path in [path for layer in layers for path in layer.modules]:
            for _, owner in modules[path].named_modules():
                for attribute, parameter in owner._parameters.items():
                    if parameter is not None:
                        name = names[id(parameter)]
                        places[name] = (*places.get(name, ()), ParameterPlace(owner, attribute))
        stages.append(StageModule(number, layers, places, chain.loss if number == len(sizes) - 1 else None))
    return tuple(stages)


def tied_stages(stages: Sequence[StageModule]) -> dict[str, tuple[int, ...]]:
    """Return the stages of each parameter that several stages have, by its name."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.places:
            holders.setdefault(name, []).append(stage.number)
    return {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}


def boundary_tensors(stages: Sequence[StageModule], row: Tensor) -> tuple[BoundaryTensor, ...]:
    """Return the tensor at each boundary between two stages, by running one sample through all stages but the last.

    Args:
        stages: The stages in order.
        row: Inputs of one sample: a batch of size 1.

    Raises:
        UserError: dimension 0 of a stage's output is not the batch.
    """
    result = []
    x = row
    with flow.no_grad():
        for stage in stages[:-1]:
            for layer in stage.layers:
                x = layer.run(x)
            if tuple(x.shape)[:1] != (1,):
                raise UserError(
                    f"stage {stage.number} gives a tensor of shape {tuple(x.shape)} for one sample; its dimension 0 should "
                    "be the batch, of length 1"
                )
            result.append(BoundaryTensor(tuple(x.shape[1:]), x.dtype))
    return tuple(result)
