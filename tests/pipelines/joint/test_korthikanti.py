"""Activation memory of published models: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models
(arXiv 2205.05198), four models of table 3 with the formulas of table 2.

With s tokens, a micro-batch of b, h features, a heads, tensor parallelism of t, p stages with m chunks each, and L layers, a device
of the first stage keeps the activations of L (1 + (p - 1) / (p m)) layers (without interleaving: L), each of

    sequence parallelism                                     s b h / t (34 + 5 a s / h)     bytes
    sequence parallelism, selective recomputation            s b h / t 34
    full recomputation, every device with whole layer inputs  2 s b h

The formulas leave out the embedding, the head, and the layer that full recomputation is just running again.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import chain_of, evaluate
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.uniform import UniformLayout, uniform_configuration
from autoddl.pipelines.memory import activations_alive
from autoddl.zoo import Transformer, gpt

SEQUENCE, VOCABULARY, TENSOR_PARALLEL = 2048, 51200, 8
GIB = 2**30


@dataclass(frozen=True)
class Published:
    """A model of table 3; a step has ``num_micro_batches``.

    Attributes:
        gib: activations of a device of the first stage, by way of recomputation.
    """

    layers: int
    hidden: int
    heads: int
    num_stages: int
    interleave: int
    micro_batch: int
    num_micro_batches: int
    gib: dict[str, float]


MODELS = {
    "22B": Published(48, 6144, 64, 1, 1, 4, 1, {"none": 39.6, "selective": 9.6, "full": 4.5}),
    "175B": Published(96, 12288, 96, 8, 3, 1, 64, {"none": 41.5, "selective": 12.4, "full": 5.8}),
    "530B": Published(105, 20480, 128, 35, 3, 1, 280, {"none": 66.5, "selective": 23.1, "full": 10.7}),
    "1T": Published(128, 25600, 160, 64, 1, 1, 512, {"none": 76.5, "selective": 26.6, "full": 12.4}),
}
#: Our words for the ways: recomputation, and how activations lie between products.
WAYS = {"none": ("none", "regathered"), "selective": ("selective", "regathered"), "full": ("blocks", "copied")}


@cache
def evaluation_of(name: str, way: str) -> Evaluation:
    model, (recompute, activations) = MODELS[name], WAYS[way]
    sizes = Transformer(name, model.layers, model.hidden, model.heads, SEQUENCE, VOCABULARY, dropout=True)
    chain, cluster = chain_of(gpt(sizes)), load_cluster("dgx-a100").resized(model.num_stages, TENSOR_PARALLEL)
    batch = model.num_micro_batches * model.micro_batch
    workload = Workload(
        batch, model.micro_batch, "mixed", recompute=recompute, attention="dense", activations=activations
    )
    layout = UniformLayout(TENSOR_PARALLEL, model.num_stages, 1, model.interleave)
    return evaluate(chain, cluster, uniform_configuration(chain, cluster, layout, workload))


def alive_bytes(evaluation: Evaluation, in_blocks: bool) -> float:
    """Most activations at a time on a device of the first worker, of the layers in blocks or of all layers."""
    kept = [
        sum(layer.work.kept_bytes for layer in stage.assessment.layers if layer.layer.block or not in_blocks)
        for stage in evaluation.stages
    ]
    return float(activations_alive(evaluation.schedule, kept)[0].max()) if evaluation.has_pipeline else kept[0]


def formula_bytes(name: str, way: str) -> float:
    model = MODELS[name]
    sbh = SEQUENCE * model.micro_batch * model.hidden
    of_layer = {
        "none": sbh / TENSOR_PARALLEL * (34 + 5 * model.heads * SEQUENCE / model.hidden),
        "selective": sbh / TENSOR_PARALLEL * 34,
        "full": 2 * sbh,
    }[way]
    extra = (model.num_stages - 1) / (model.num_stages * model.interleave) if model.interleave > 1 else 0.0
    return of_layer * model.layers * (1 + extra)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_keep_what_is_published(name: str, way: str) -> None:
    """Within 10 %; the formulas, which are rounded in print, are met exactly."""
    found = alive_bytes(evaluation_of(name, way), in_blocks=True)
    assert found / GIB == pytest.approx(MODELS[name].gib[way], rel=0.1)
    assert found == pytest.approx(formula_bytes(name, way), rel=1e-9)


@pytest.mark.parametrize("way", ["none", "selective"])
@pytest.mark.parametrize("name", MODELS)
def test_devices_keep_what_is_published(name: str, way: str) -> None:
    """With the mask of the embedding and, of a model without a pipeline, the head: within 10 %, too."""
    (first, *_) = evaluation_of(name, way).worker_memory
    assert first.activation_bytes / GIB == pytest.approx(MODELS[name].gib[way], rel=0.1)
    assert first.activation_bytes >= formula_bytes(name, way) * (1 - 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_full_recomputation_runs_one_block_at_a_time(name: str) -> None:
    """Besides what is kept there are the activations of one layer without sequence parallelism: s b h (10 + 24/t + 5 a s / (h t))
    of table 2."""
    model, evaluation = MODELS[name], evaluation_of(name, "full")
    sbh = SEQUENCE * model.micro_batch * model.hidden
    scores = 5 * model.heads * SEQUENCE / model.hidden
    of_layer = sbh * (10 + (24 + scores) / TENSOR_PARALLEL)
    kept = alive_bytes(evaluation, in_blocks=False)
    assert evaluation.worker_memory[0].activation_bytes == pytest.approx(kept + of_layer, rel=1e-9)
