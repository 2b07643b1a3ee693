"""Plans that the graph executor runs: Megatron's layouts for small models of every family."""

from __future__ import annotations

from typing import Any

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.planfile import PlanFile, unpipelined_plan
from autoddl.zoo import resolve_model
from autoddl.zoo.feedforward import vgg

__all__ = ["MODELS", "plan_of", "strategies"]

_SMALL = {"heads": 4, "sequence": 32, "vocabulary": 512}
MODELS = {
    "mlp": resolve_model("mlp:256,512,512,256"),
    "gpt": resolve_model("gpt:1x128", **_SMALL),
    "bert": resolve_model("bert:1x128", **_SMALL),
    "llama": resolve_model("llama:1x128", **_SMALL),
    "gpt of two blocks": resolve_model("gpt:2x64", **_SMALL),
    "gpt of one head": resolve_model("gpt:1x64", **{**_SMALL, "heads": 1}),
    "vgg": vgg(11, image=32, classes=64, hidden=128),
}
#: Layers whose weights are split by rows; those of the others are split by columns.
_ROWS = ("fc2", "c_proj", "output.dense", "o_proj", "down_proj", "classifier.3")


def strategies(graph: LayerGraph, *levels: tuple[int, int]) -> dict[str, Strategy]:
    """(samples, model) parts at each level; layers that cannot be split are data parallel."""
    chosen = {}
    for layer in graph.layers:
        by_rows = layer.kind == "embedding" or layer.name.endswith(_ROWS)
        is_whole = layer.is_image or layer.kind == "opaque"
        splits = [(dp * mp, 1, 1) if is_whole else (dp, 1, mp) if by_rows else (dp, mp, 1) for dp, mp in levels]
        chosen[layer.name] = Strategy(tuple(splits))
    return chosen


def plan_of(name: str, *levels: tuple[int, int], batch: int = 8, given: Any = None, **workload: Any) -> PlanFile:
    """The plan of a model at these levels, or at given strategies."""
    graph, sizes = MODELS[name], [dp * mp for dp, mp in levels]
    cluster = load_cluster("local-cpu").resized(*((1, *sizes) if len(sizes) == 1 else sizes))
    asked = Workload(batch, workload.pop("micro_batch", batch), "float32", **workload)
    return unpipelined_plan(graph, cluster, asked, given or strategies(graph, *levels))
