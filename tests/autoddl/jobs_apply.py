"""What the ranks do in the tests of applied plans; imported by ranks, never collected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoddl.costmodel.assessment import Assessment, assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.models.feedforward import mlp
from autoddl.models.transformers import Transformer, bert, gpt, llama
from autoddl.pipelines.runtime.load import load_oneflow


@dataclass(frozen=True)
class Case:
    """A model, the strategies of its layers and a workload.

    Attributes:
        model: ``mlp`` or a transformer's family.
        sizes: the MLP's widths, or a `Transformer`.
        strategies: by layer.
        batch, micro_batch, recompute: of the workload.
        image, classes: of a VGG.
    """

    model: str
    sizes: Any
    strategies: Mapping[str, Strategy]
    batch: int
    micro_batch: int
    recompute: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def graph(self) -> LayerGraph:
        return graph_of(self.model, self.sizes)

    @property
    def workload(self) -> Workload:
        return Workload(self.batch, self.micro_batch, "float32", "adam", self.recompute)

    @property
    def cluster(self) -> Cluster:
        """One of the right shape; its speeds do not matter here."""
        sizes = [p0 * p1 * p2 for p0, p1, p2 in next(iter(self.strategies.values())).splits]
        nodes, devices = (1, sizes[0]) if len(sizes) == 1 else sizes
        cluster = load_cluster("dgx-a100").resized(nodes, devices)
        device = replace(cluster.device, peak_flops={"float32": 1e12})
        return replace(cluster, device=device)

    def assessment(self) -> Assessment:
        return assess(self.graph, self.cluster, self.workload, self.strategies)


def graph_of(model: str, sizes: Any) -> LayerGraph:
    builders: dict[str, Callable[[Any], LayerGraph]] = {"mlp": mlp, "gpt": gpt, "bert": bert, "llama": llama}
    return builders[model](sizes)


def module_of(model: str, sizes: Any, seed: int = 1) -> Any:
    from autoddl.pipelines.runtime import models

    if model == "mlp":
        return models.initialize(models.MLP(sizes), seed)
    assert isinstance(sizes, Transformer)
    common = {"inner": sizes.mlp_width, "tied": sizes.tied}
    shape = (sizes.layers, sizes.width, sizes.heads, sizes.vocabulary)
    if model == "gpt":
        module = models.GPT(*shape, sizes.num_positions, **common)
    elif model == "bert":
        module = models.Bert(*shape, sizes.num_positions, **common)
    else:
        module = models.Llama(*shape, kv_heads=sizes.kv_heads or None, **common)
    return models.initialize(module, seed)


def batch_of(model: str, sizes: Any, num_samples: int, seed: int = 7) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    if model == "mlp":
        return tuple(rng.standard_normal((num_samples, width)).astype(np.float32) for width in (sizes[0], sizes[-1]))
    tokens = rng.integers(0, sizes.vocabulary, (2, num_samples, sizes.sequence))
    return tokens[0], tokens[1]


def run_case(case: Case, measured: bool = True) -> dict[str, Any]:
    """Loss, gradients and traffic of one training step, against the plain module in the same process."""
    from autoddl.pipelines.runtime.applied import AppliedModule
    from autoddl.pipelines.runtime.wire import measure, measure_baseline

    flow = load_oneflow()
    module = module_of(case.model, case.sizes)
    data = batch_of(case.model, case.sizes, case.micro_batch)
    reference = module(*(flow.tensor(x) for x in data))
    reference.backward()
    gradients = {name: p.grad.numpy() for name, p in module.named_parameters()}
    applied = AppliedModule(module, case.graph, case.strategies, case.workload)
    loss = applied(*data)
    loss.backward()
    found = applied.logical_gradients()
    for parameter in applied.parameters():
        parameter.grad = None
    measured_by = None
    if measured:
        baseline = measure_baseline()
        measured_by = lambda run: measure(run, baseline)  # noqa: E731
    traced_loss, sections = applied.trace(*data, measure=measured_by)
    traced = applied.logical_gradients()
    return {
        "loss": float(loss.numpy()),
        "reference": float(reference.numpy()),
        "traced_loss": float(traced_loss.numpy()),
        "missing": sorted(set(gradients) - set(found)),
        "errors": {name: relative_error(found[name], value) for name, value in gradients.items()},
        "traced_errors": {name: relative_error(traced[name], value) for name, value in gradients.items()},
        "sections": [
            (s.layer, s.phase, Counter(map(str, s.steps)), s.traffic.payload_bytes if s.traffic else 0)
            for s in sections
        ],
    }


def relative_error(found: np.ndarray, value: np.ndarray) -> float:
    """Of the whole tensor, by norm."""
    return float(
        np.linalg.norm(found.astype(np.float64) - value) / max(np.linalg.norm(value.astype(np.float64)), 1e-30)
    )
