"""Prints the bytes that a forward pass leaves behind, and those that are priced; run in a process of its own, never collected.

Arguments: the way of recomputation, and the number of blocks.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.runtime.applied import AppliedModule
from autoddl.pipelines.runtime.load import load_oneflow
from autoddl.pipelines.runtime.models import GPT, initialize
from autoddl.zoo.transformers import Transformer, gpt

flow: Any = load_oneflow()
BATCH, SEQUENCE, WIDTH, HEADS, VOCABULARY = 16, 256, 128, 4, 128


def resident_bytes() -> int:
    gc.collect()
    flow._oneflow_internal.eager.Sync()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def kept_bytes(num_blocks: int, recompute: str) -> tuple[int, float]:
    """The bytes that the process holds more after a forward pass, and those that are priced."""
    sizes = Transformer("gpt", num_blocks, WIDTH, heads=HEADS, sequence=SEQUENCE, vocabulary=VOCABULARY)
    graph, workload = gpt(sizes), Workload(BATCH, BATCH, "float32", recompute=recompute)
    strategies = {layer.name: Strategy(((1, 1, 1),)) for layer in graph.layers}
    cluster = load_cluster("dgx-a100").resized(1, 1)
    cluster = replace(cluster, device=replace(cluster.device, peak_flops={"float32": 1e12}))
    priced = sum(layer.work.kept_bytes for layer in assess(graph, cluster, workload, strategies).layers)
    module = GPT(num_blocks, WIDTH, HEADS, VOCABULARY, sizes.num_positions, inner=sizes.mlp_width, tied=sizes.tied)
    applied = AppliedModule(initialize(module, 1), graph, strategies, workload)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (2, BATCH, SEQUENCE))
    applied(tokens[0][:1], tokens[1][:1]).backward()  # what is made once
    before = resident_bytes()
    loss = applied(*tokens)
    loss.numpy()
    return resident_bytes() - before, priced


print(*kept_bytes(int(sys.argv[2]), sys.argv[1]))
