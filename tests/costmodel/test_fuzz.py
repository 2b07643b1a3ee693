"""Broken files: whatever is wrong with them, the reader says so in one line, or takes them, and then they work."""

from __future__ import annotations

import json
from importlib import resources

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import Cluster, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, load_graph
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.models import Transformer, bert, gpt, mlp, vgg

from .mutations import broken_texts

CLUSTER = json.loads(resources.files("autoddl.costmodel.clusters").joinpath("gcp-a100.json").read_text())
GRAPHS = [
    graph.document()
    for graph in (
        mlp([8, 4, 2]),
        gpt(Transformer("gpt", 2, 16, 2, 8, 32)),
        bert(Transformer("bert", 1, 16, 2, 8, 32, tied=False)),
        vgg(11, image=32),
    )
]
FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))


def accepted(read, path, data: bytes):
    """What the reader makes of the file, or None where it refuses it in one line."""
    path.write_bytes(data)
    try:
        return read(path)
    except UserError as error:
        message = str(error)
        assert message and message.isprintable(), repr(message)
        assert len(message) < 1000, message
        return None


def plan_something(graph: LayerGraph, cluster: Cluster) -> None:
    """Whoever takes a file has to be able to work with it."""
    workload = Workload(cluster.num_devices, cluster.num_devices, cluster.default_precision)
    everything = data_parallel(cluster.level_sizes)
    try:
        assessment = assess(graph, cluster, workload, {layer.name: everything for layer in graph.layers})
        problem = PriceBook(graph, cluster, workload, untied=True).problem(workload.batch, workload.batch)
        choice = problem.choice({layer.name: everything for layer in problem.graph.layers})
    except UserError:
        return
    assert 0 <= assessment.step_s < float("inf") and 0 <= assessment.memory_bytes < float("inf")
    assert problem.table.evaluate(choice) == pytest.approx(assessment.step_s, rel=1e-9, abs=1e-300)


@given(broken_texts(CLUSTER))
@FUZZ
def test_clusters(tmp_path_factory, data):
    cluster = accepted(load_cluster, tmp_path_factory.getbasetemp() / "cluster.json", data)
    if cluster is not None:
        assert cluster.hash.startswith("sha256:")
        if cluster.num_devices <= 64:
            plan_something(mlp([8, 8, 8]), cluster)


@given(st.sampled_from(GRAPHS).flatmap(broken_texts))
@FUZZ
def test_graphs(tmp_path_factory, data):
    graph = accepted(load_graph, tmp_path_factory.getbasetemp() / "graph.json", data)
    if graph is not None:
        assert graph.hash.startswith("sha256:")
        plan_something(graph, load_cluster("dgx-a100").resized(1, 2))


def test_unmutated_documents_are_taken(tmp_path):
    for document, read in [(CLUSTER, load_cluster), *((graph, load_graph) for graph in GRAPHS)]:
        assert accepted(read, tmp_path / "x.json", json.dumps(document).encode()) is not None
