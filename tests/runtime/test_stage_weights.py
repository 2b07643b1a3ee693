"""Which weights the ranks of a stage store; one process, no ranks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.zoo import Transformer, gpt, llama

available = is_available()
pytestmark = pytest.mark.skipif(not available, reason=available.reason)

GPT = Transformer("gpt", layers=2, width=16, heads=4, sequence=8, vocabulary=32)
#: Keys of 4 features cannot be divided into slices for 3 query heads.
LLAMA = Transformer("llama", 2, 24, 6, 8, 32, intermediate=24, kv_heads=2, activation="silu", tied=False)
QKV = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkv"]


def stage(graph: LayerGraph, splits: Sequence[tuple[int, int, int]], **others: tuple[int, int, int]) -> StagePlan:
    """Every layer at the first of some strategies that divides it."""
    strategies = [Strategy((one,)) for one in splits]
    chosen = {layer.name: next(one for one in strategies if one.divides(layer)) for layer in graph.layers}
    return StagePlan({**chosen, **{name: Strategy((one,)) for name, one in others.items()}})


def gpt_module() -> Any:
    from autoddl.pipelines.runtime import models

    return models.GPT(2, 16, 4, 32, 8)


def llama_module() -> Any:
    from autoddl.pipelines.runtime import models

    return models.Llama(2, 24, 6, 32, 24, kv_heads=2)


def weights_of(module: Any, graph: LayerGraph, plan: StagePlan) -> Any:
    from autoddl.pipelines.runtime.stage.model import PlannedModel

    (weights,) = PlannedModel(module, graph, (plan,)).weights()
    return weights


def test_a_weight_of_two_layers_is_stored_once():
    graph = gpt(GPT)
    weights = weights_of(gpt_module(), graph, stage(graph, [(1, 2, 1)], wte=(1, 1, 2)))
    assert weights.positions["lm_head"] == weights.positions["wte"] == (0,)
    assert "lm_head.weight" not in weights.stored
    assert weights.stored["wte.weight"].layer == "wte"
    shapes = {name: tuple(value.shape) for name, value in gpt_module().named_parameters()}
    assert weights.shapes() == shapes


def test_a_weight_of_two_layers_lies_alike_in_both():
    graph = gpt(GPT)
    message = "(1,2,1) needs other shards of lm_head.weight than the ranks store for wte.weight"
    with pytest.raises(UserError, match=re.escape(message)):
        weights_of(gpt_module(), graph, stage(graph, [(1, 2, 1)]))


def test_parameters_stored_as_one_are_frozen_together():
    """Two key-value heads on four ranks: no rank's block has as much of q as of k."""
    graph, module = llama(LLAMA), llama_module()
    plan = stage(graph, [(1, 4, 1), (2, 2, 1), (4, 1, 1)])
    name = "layers.0.self_attn.q_proj+k_proj+v_proj.weight"
    assert [source for source, _ in weights_of(module, graph, plan).stored[name].sources] == QKV
    parameters = dict(module.named_parameters())
    parameters[QKV[0]].requires_grad_(False)
    with pytest.raises(UserError, match=re.escape(f"{QKV[0]} is frozen (requires_grad is False), and stored in one")):
        weights_of(module, graph, plan)
    for source in QKV:
        parameters[source].requires_grad_(False)
    stored = weights_of(module, graph, plan).stored
    assert [name for name, one in stored.items() if not one.is_trained] == [name]


def test_parameters_stored_as_one_are_shared_together():
    """The second block has the first one's q, with k and v of its own."""
    graph, module = llama(LLAMA), llama_module()
    module.layers[1].self_attn.q_proj.weight = module.layers[0].self_attn.q_proj.weight
    first, second = (layer for layer in graph.layers if layer.kind == "linear" and "q_proj" in layer.parameters[0].name)
    q, *others = second.parameters
    tied = replace(second, parameters=(replace(q, tied_to=first.name), *others))
    graph = replace(graph, layers=tuple(tied if layer is second else layer for layer in graph.layers))
    with pytest.raises(UserError, match="is not stored as one tensor by all layers that share its parameters"):
        weights_of(module, graph, stage(graph, [(1, 4, 1), (2, 2, 1), (4, 1, 1)]))
