"""Opaque layers: the price of their products, against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.costmodel.affine import VARIABLE
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, Place, graph_from_document
from autoddl.costmodel.layer import Layer
from autoddl.costmodel.layerwork import LayerWork, layer_work
from autoddl.costmodel.localwork import LocalWork
from autoddl.costmodel.strategy import data_parallel
from autoddl.costmodel.workload import Workload
from autoddl.explain.view import peak_share
from autoddl.search.planner import Options, make_plan
from autoddl.zoo.layers import GraphBuilder, embedding, linear, loss, opaque

#: An LSTM of 6 time steps, 8 input features and 16 hidden ones: of each time step and sample a product (1 x 8)(8 x 64), which is
#: 1,024 FLOPs, and one (1 x 16)(16 x 64), which is 2,048.  6 * 3,072 = 18,432.
LSTM = opaque("lstm", (6, 8), (6, 16), flops=18432.0, products=12, kept_elements=6 * 100)


def work(layer: Layer, devices: int, samples: int) -> LayerWork:
    workload = Workload(samples, samples, "float32", "adam")
    return layer_work(layer, data_parallel((devices,)), workload, samples, Place())


def test_flops_of_an_lstm_are_priced_as_products():
    """16 samples on 4 devices are 4 on each: 4 * 18,432 = 73,728 FLOPs; 4 * 6 * (8 + 16) * 4 bytes = 2,304."""
    assert 2 * 4 * 16 * (8 + 16) * 6 == 18432
    done = work(LSTM, 4, 16)
    assert done.forward_work == LocalWork(launches=12, flops=73728.0, nbytes=2304.0, products=12)
    assert done.backward_work == LocalWork(launches=24, flops=147456.0, nbytes=4608.0, products=24)
    affine = layer_work(LSTM, data_parallel((4,)), Workload(16, 16), VARIABLE, Place()).forward_work.flops
    assert (affine.fixed, affine.slope) == (0.0, 18432 / 4)


def test_arithmetic_of_an_lstm_takes_its_time():
    """73,728 FLOPs at 1 GFLOP/s, half reached, are 147.456 us; 12 small products of 1,000 FLOPs in excess are 24 us more."""
    known = load_cluster("dgx-a100").resized(1, 4)
    device = replace(known.device, peak_flops={"float32": 1e9}, efficiency=0.5, half_speed={}, memory_bandwidth=1e30)
    done = work(LSTM, 4, 16).forward_work
    assert replace(known, device=device).local_times(done, "float32")[0] == pytest.approx(147.456e-6)
    slower = replace(device, half_speed={"float32": 1000.0})
    assert replace(known, device=slower).local_times(done, "float32")[0] == pytest.approx(171.456e-6)


def test_layers_without_products_are_memory_traffic():
    """Pooling 8 x 8 x 8 to 8 x 4 x 4: (512 + 128) * 4 bytes in one kernel."""
    pool = opaque("pool", (8, 8, 8), (8, 4, 4))
    assert work(pool, 1, 1).forward_work == LocalWork(launches=1, nbytes=2560.0)
    # A single convolution need not say that it is one product.
    assert work(replace(pool, flops=7.0), 1, 1).forward_work == LocalWork(
        launches=1, flops=7.0, nbytes=2560.0, products=1
    )


def lstm_graph(hidden: int, length: int) -> LayerGraph:
    flops = length * 2.0 * 4 * hidden * (hidden + hidden)
    builder = GraphBuilder("lstm", "sequence")
    layers = [
        embedding("e", length, 1024, hidden),
        opaque("lstm", (length, hidden), (length, hidden), flops=flops, products=2 * length),
        linear("o", length, hidden, 1024),
        loss("loss", length, 1024),
    ]
    builder.chain(builder.add(layers[0]), layers[1:])
    return builder.build()


def test_plan_of_an_lstm_is_below_the_peak():
    """4,096 features, 64 time steps: 64 * 2 * 4 * 4,096 * 8,192 = 1.7e10 FLOPs, ten times those of all other layers."""
    graph, cluster = lstm_graph(4096, 64), load_cluster("dgx-a100").resized(1, 8)
    assert graph["lstm"].flops == 64 * 268_435_456 > 10 * (graph.flops - graph["lstm"].flops)
    planned = make_plan(graph, cluster, Options(batch=1024, micro_batch=1024, quiet=True))
    rate = planned.workload.batch / planned.assessment.step_s
    assert 0.1 < peak_share(graph, cluster, planned.workload, rate) < cluster.device.efficiency


@pytest.mark.parametrize("hidden", [16, 512])
def test_exact_search_finds_the_best_of_all_assignments(hidden):
    graph, cluster = lstm_graph(hidden, 4), load_cluster("dgx-a100").resized(1, 2)
    options = Options(batch=8, micro_batch=8, recompute=False, untied=True, quiet=True)
    exact, every = (make_plan(graph, cluster, replace(options, method=method)) for method in ("exact", "exhaustive"))
    assert every.evaluations > 1 and exact.optimal
    assert exact.cost == pytest.approx(every.cost, rel=1e-9) and exact.lower_bound <= every.cost * (1 + 1e-9)


def test_number_of_products_is_saved_and_checked():
    document = lstm_graph(8, 6).document()
    assert graph_from_document(document, "saved.json")["lstm"].attributes == {"products": 12}
    document["layers"][1]["attributes"] = {"products": 0}
    with pytest.raises(UserError, match="layer 'lstm': products is 0, should be at least 1"):
        graph_from_document(document, "saved.json")
    document["layers"][1]["attributes"] = {"kernels": 3}
    with pytest.raises(UserError, match=r"attributes of a opaque are \[\], not \['kernels'\]"):
        graph_from_document(document, "saved.json")
