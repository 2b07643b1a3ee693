"""What the longest path of a step uses, at the prices of the cluster, is the step; at other prices it is no more than that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoddl.calib.stageusage import usage_of_all, usage_of_step
from autoddl.calib.trust import drawn_cluster
from autoddl.costmodel.calibration import Calibration, Replicates
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import ENTRY, Configuration, PipelineSchedule, StageChoice, StageMesh, chain_of, evaluate
from autoddl.zoo import Transformer, gpt

from .drawn_costs import costs_of

CALIBRATION = Calibration("2026-01-02", "here", "1", 10, (), (), (), ())
CLUSTER = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=2e-6, bandwidth=1e8)
CLUSTER = replace(CLUSTER, calibration=CALIBRATION)
MODELS = {
    "tied": gpt(Transformer("tied", 4, 64, 4, 8, 128)),
    "untied": gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False)),
}
SCHEDULES = {
    "1f1b": PipelineSchedule("1f1b", 2, 4, (("policy", "A"),)),
    "zero-bubble": PipelineSchedule("zero-bubble", 2, 4, (("policy", "H1"),)),
    "interleaved": PipelineSchedule("interleaved-1f1b", 2, 4, (("groups", 2),), 2),
    "chimera": PipelineSchedule("chimera", 2, 4, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2),
    "alone": PipelineSchedule("1f1b", 1, 4),
}


def configuration_of(graph, spec: PipelineSchedule, recompute: str, overlap: str = "none") -> Configuration:
    """Stages of equally many units, data parallel by two or, with tied weights, by all devices."""
    chain, mesh, stages = chain_of(graph), StageMesh(1, 4 // spec.num_workers), []
    ways = mesh.num_devices if graph is MODELS["tied"] else 2
    strategy = Strategy(((ways, mesh.num_devices // ways, 1),))
    units = chain.num_units // spec.num_stages
    for number in range(spec.num_stages):
        chosen = {layer.name: strategy for layer in chain.layers(number * units, (number + 1) * units)}
        if number:
            chosen[ENTRY] = strategy
        stages.append(StageChoice(units, recompute, chosen))
    return Configuration(mesh, spec, Workload(16, 4, "mixed", "adam", overlap=overlap), tuple(stages))


@pytest.mark.parametrize("objective", ["step", "communication"])
@pytest.mark.parametrize("recompute", ["none", "layers", "blocks", "stage"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_the_longest_path_is_the_step(model, name, recompute, objective):
    graph = MODELS[model]
    found = evaluate(chain_of(graph), CLUSTER, configuration_of(graph, SCHEDULES[name], recompute))
    (cost,) = costs_of(usage_of_step(found, objective), CLUSTER, objective == "communication")
    assert cost == pytest.approx(found.cost(objective), rel=1e-6)
    everything = usage_of_all(found)
    assert set(usage_of_step(found, objective).rings) <= set(everything.rings)


@pytest.mark.parametrize("objective", ["step", "communication"])
@pytest.mark.parametrize("overlap", ["gradients", "all"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model", MODELS)
def test_hidden_communication_and_the_speed_of_small_products_count(model, name, overlap, objective):
    graph = MODELS[model]
    device = replace(CLUSTER.device, core_efficiency=0.3, half_speed={"mixed": 1e7})
    cluster = replace(CLUSTER, hidden_part=0.7, device=device)
    found = evaluate(chain_of(graph), cluster, configuration_of(graph, SCHEDULES[name], "blocks", overlap))
    plain = evaluate(chain_of(graph), CLUSTER, configuration_of(graph, SCHEDULES[name], "blocks"))
    assert found.cost("communication") < plain.cost("communication")
    (cost,) = costs_of(usage_of_step(found, objective), cluster, objective == "communication")
    assert cost == pytest.approx(found.cost(objective), rel=1e-6)


def test_an_asynchronous_step_is_a_part_of_all_simulated_ones():
    graph = MODELS["untied"]
    spec = PipelineSchedule("pipedream-2bw", 2, 4, synchronous=False)
    found = evaluate(chain_of(graph), CLUSTER, configuration_of(graph, spec, "none"))
    (cost,) = costs_of(usage_of_step(found), CLUSTER, False)
    assert cost == pytest.approx(found.step_s, rel=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
def test_at_other_prices_the_path_is_no_longer_than_the_step(name):
    """Links of half and twice the bandwidth; a stage alone has but one path."""
    slowness = Replicates("intra-node", "", 0, "slowness", (0.5e-8, 2e-8))
    latency = Replicates("intra-node", "", 0, "latency", (1e-6, 4e-6))
    cluster = replace(CLUSTER, calibration=replace(CALIBRATION, replicates=(slowness, latency)))
    graph = MODELS["untied"]
    configuration = configuration_of(graph, SCHEDULES[name], "none")
    costs = costs_of(usage_of_step(evaluate(chain_of(graph), cluster, configuration)), cluster, False)
    for k, cost in enumerate(costs):
        truth = evaluate(chain_of(graph), drawn_cluster(cluster, k), configuration).step_s
        assert cost <= truth * (1 + 1e-9)
        assert cost == pytest.approx(truth, rel=1e-9 if name == "alone" else 0.1)
