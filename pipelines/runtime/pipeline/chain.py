"""A model as a chain of layers, and its cut in stages.

A *chain* is a list of layers, each a function of the one tensor that the layer before gives, and a loss of the last one's output
and the targets. The built-in families and every ``nn.Sequential`` have one (`chain_of`); others can be given as a `ModuleChain`.

Parameters are known by their names in the whole model. One that several layers use (an embedding that is also the head) is known
by its first name; where its layers come into different stages it is *tied* between these stages.
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
    "ParameterSlot",
    "StageModule",
    "boundaries",
    "chain_of",
    "cut",
    "even_sizes",
    "tied_stages",
]

Tensor = Any


@dataclass(frozen=True)
class ChainLayer:
    """One link of a chain."""

    run: Callable[[Tensor], Tensor]
    modules: tuple[str, ...]
    """Paths in the model of the submodules that ``run`` uses, whose parameters are the layer's."""


@dataclass(frozen=True)
class ModuleChain:
    """A model as a chain of layers."""

    model: Any
    """The module that all layers are parts of."""
    layers: tuple[ChainLayer, ...]
    loss: Callable[[Tensor, Tensor], Tensor]
    """Of the last layer's output and the targets: the mean over their rows (samples)."""


@dataclass(frozen=True)
class ParameterSlot:
    """Where a module keeps a parameter."""

    owner: Any
    attribute: str


@dataclass(frozen=True)
class StageModule:
    """Consecutive layers of a chain.

    Attributes:
        number: of the stage.
        layers: its part of the chain.
        places: per parameter, by its name in the model, where the stage's modules keep it.
        loss: the chain's in its last stage, else None.
    """

    number: int
    layers: tuple[ChainLayer, ...]
    places: dict[str, tuple[ParameterSlot, ...]]
    loss: Callable[[Tensor, Tensor], Tensor] | None

    def initial_values(self) -> dict[str, Tensor]:
        """The parameters that the model was made with."""
        return {name: getattr(places[0].owner, places[0].attribute) for name, places in self.places.items()}

    def run(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The stage's output with these weights, one for each of ``places``."""
        for places, weight in zip(self.places.values(), weights):
            for place in places:
                place.owner._parameters[place.attribute] = weight
        for layer in self.layers:
            x = layer.run(x)
        return x


# ---- Chains ------------------------------------------------------------------------------------------------------------


def chain_of(model: Any, loss: Callable[[Tensor, Tensor], Tensor] | None = None) -> ModuleChain:
    """The chain of a built-in transformer or MLP, or of an ``nn.Sequential``.

    Args:
        loss: mean over the rows, for an ``nn.Sequential``.

    Raises:
        UserError: there is no rule for this model, or it has no loss.
    """
    for family, build in ((GPT, _gpt), (Bert, _bert), (Llama, _llama), (MLP, _mlp)):
        if isinstance(model, family):
            return build(model)
    if not isinstance(model, flow.nn.Sequential):
        raise UserError(
            f"a {type(model).__name__} is no chain of layers; give an nn.Sequential, or a Chain of your own; "
            "or plan it, and train the plan"
        )
    if loss is None:
        raise UserError("an nn.Sequential has no loss of its own; give one, such as nn.functional.mse_loss")
    return ModuleChain(model, tuple(ChainLayer(module, (name,)) for name, module in model._modules.items()), loss)


def _gpt(model: GPT) -> ModuleChain:
    """Embedding, blocks, head."""

    def embed(tokens: Tensor) -> Tensor:
        return model.wte(tokens) + model.wpe(flow.arange(tokens.shape[1]))

    blocks = tuple(ChainLayer(block, (f"h.{i}",)) for i, block in enumerate(model.h))
    head = ChainLayer(lambda x: model.lm_head(model.ln_f(x)), ("ln_f", "lm_head"))
    return ModuleChain(model, (ChainLayer(embed, ("wte", "wpe")), *blocks, head), token_loss)


def _bert(model: Bert) -> ModuleChain:
    """Embeddings, layers, the head of the masked-language model."""
    blocks = tuple(ChainLayer(block, (f"encoder.layer.{i}",)) for i, block in enumerate(model.encoder.layer))
    return ModuleChain(
        model, (ChainLayer(model.embeddings, ("embeddings",)), *blocks, ChainLayer(model.cls, ("cls",))), token_loss
    )


def _llama(model: Llama) -> ModuleChain:
    """Embedding, blocks (each with the angles of its positions), head."""

    def run(block: Any, x: Tensor) -> Tensor:
        return block(x, *model.angles(x.shape[1]))

    blocks = tuple(ChainLayer(functools.partial(run, block), (f"layers.{i}",)) for i, block in enumerate(model.layers))
    head = ChainLayer(lambda x: model.lm_head(model.norm(x)), ("norm", "lm_head"))
    return ModuleChain(model, (ChainLayer(model.embed_tokens, ("embed_tokens",)), *blocks, head), token_loss)


def _mlp(model: MLP) -> ModuleChain:
    """Matrices, each but the last with its relu."""

    def linear(name: str, is_last: bool, x: Tensor) -> Tensor:
        y = getattr(model, name)(x)
        return y if is_last else flow.nn.functional.relu(y)

    names = [f"fc{i + 1}" for i in range(model.num_layers)]
    layers = tuple(ChainLayer(functools.partial(linear, name, name == names[-1]), (name,)) for name in names)
    return ModuleChain(model, layers, flow.nn.functional.mse_loss)


# ---- Stages ------------------------------------------------------------------------------------------------------------


def even_sizes(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as can be; the later stages have the additional ones (the first one has the embedding)."""
    if not 1 <= num_stages <= num_layers:
        raise UserError(f"{num_layers} layers cannot be cut in {num_stages} stages; give 1 to {num_layers}")
    each, extra = divmod(num_layers, num_stages)
    return tuple(each + (stage >= num_stages - extra) for stage in range(num_stages))


def cut(chain: ModuleChain, sizes: Sequence[int]) -> tuple[StageModule, ...]:
    """The stages of a chain, the s-th of ``sizes[s]`` layers.

    Raises:
        UserError: the sizes are not positive, or not as many layers as there are.
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
        places: dict[str, tuple[ParameterSlot, ...]] = {}
        for layer in layers:
            for path in layer.modules:
                for _, owner in modules[path].named_modules():
                    for attribute, parameter in owner._parameters.items():
                        if parameter is not None:
                            name = names[id(parameter)]
                            places[name] = (*places.get(name, ()), ParameterSlot(owner, attribute))
        stages.append(StageModule(number, layers, places, chain.loss if number == len(sizes) - 1 else None))
    return tuple(stages)


def tied_stages(stages: Sequence[StageModule]) -> dict[str, tuple[int, ...]]:
    """Per parameter that several stages have, by name, these stages."""
    holders: dict[str, list[int]] = {}
    for stage in stages:
        for name in stage.places:
            holders.setdefault(name, []).append(stage.number)
    return {name: tuple(numbers) for name, numbers in holders.items() if len(numbers) > 1}


def boundaries(stages: Sequence[StageModule], row: Tensor) -> tuple[BoundaryTensor, ...]:
    """What passes between the stages, found by running one row (a batch of one sample) through all of them but the last."""
    result = []
    x = row
    with flow.no_grad():
        for stage in stages[:-1]:
            for layer in stage.layers:
                x = layer.run(x)
            if tuple(x.shape)[:1] != (1,):
                raise UserError(
                    f"stage {stage.number} gives a tensor of shape {tuple(x.shape)} for one sample; samples must stay the rows"
                )
            result.append(BoundaryTensor(tuple(x.shape[1:]), x.dtype))
    return tuple(result)
