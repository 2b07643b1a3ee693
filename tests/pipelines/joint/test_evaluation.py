"""Cuts, meshes, and the evaluation of joint plans against hand-worked numbers."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.strategy import Strategy
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import (
    ENTRY,
    Configuration,
    PipelineSchedule,
    StageChoice,
    StageMesh,
    chain_of,
    evaluate,
)
from autoddl.pipelines.joint.meshes import Division, has_all_divisions, stage_meshes, uneven_divisions
from autoddl.pipelines.joint.stage_cost import Pricing, Replicas
from autoddl.pipelines.joint.stage_search import Passes, RowFilter, StageDemand, StageSearch
from autoddl.pipelines.runtime.pipeline.stage_traffic import stage_traffic
from autoddl.pipelines.runtime.stage.plan import StagePlan
from autoddl.search.fronts import least
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import Transformer, gpt, mlp

GPT = gpt(Transformer("small", 4, 64, 4, 8, 128))
UNTIED = gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False))
LATENCY, BANDWIDTH = 2e-6, 1e8
MACHINE = load_cluster("gcp-a100").resized(1, 4).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)


def uniform(graph, mesh, spec, size, batch, cut, recompute, strategy):
    """Every layer at one strategy."""
    chain, stages, first = chain_of(graph), [], 0
    for count in cut:
        chosen = {layer.name: strategy for layer in chain.layers(first, first + count)}
        if first:
            chosen[ENTRY] = strategy
        stages.append(StageChoice(count, recompute, chosen))
        first += count
    return chain, Configuration(mesh, spec, Workload(batch, size, "mixed", "adam"), tuple(stages))


# ---- Cuts and meshes ---------------------------------------------------------------------------------------------------


def test_units_are_the_blocks_with_embedding_and_head_at_the_ends():
    chain = chain_of(GPT)
    assert chain.num_units == 4
    assert [layer.name for layer in chain.layers(0, 1)][:3] == ["wte", "wpe", "embed"]
    assert chain.layers(3, 4)[-1].name == "loss" and chain.kinds == (0, 1, 1, 2)
    assert chain.shape(1, 2) == chain.shape(2, 3) != chain.shape(3, 4)


def test_a_stage_has_an_entry_and_copies_of_weights_that_it_shares():
    stage = chain_of(GPT).stage(2, 4)
    assert stage.graph.layers[0].name == ENTRY and stage.shared == (("lm_head", "wte"),)
    assert stage.graph["lm_head"].num_parameters == 64 * 128 and GPT["lm_head"].num_parameters == 0
    assert stage.graph.inputs("h.2.ln_1") == (ENTRY,)
    assert chain_of(GPT).stage(0, 4).shared == ()


def test_meshes_tile_the_cluster():
    cluster = MACHINE.resized(2, 4)
    meshes = list(stage_meshes(cluster))
    assert len(meshes) == 6
    for mesh in meshes:
        ranks = [rank for worker in range(mesh.num_workers(cluster)) for rank in mesh.ranks(cluster, worker)]
        assert sorted(ranks) == list(range(8))
    assert StageMesh(2, 2).ranks(cluster, 1) == (2, 3, 6, 7)
    assert not StageMesh(1, 4).share_nodes(cluster, (0, 1)) and StageMesh(1, 2).share_nodes(cluster, (0, 1))


def test_divisions_tile_the_cluster_in_all_ways_where_these_are_few():
    """2 x 4: bands 2 or 1 + 1, each in 2^3 compositions of 4 strips: 8 + 8 * 8, of which 6 are of equal rectangles."""
    cluster = MACHINE.resized(2, 4)
    divisions = list(uneven_divisions(cluster))
    assert len(set(divisions)) == len(divisions) == 8 + 8 * 8 - 6 and has_all_divisions(cluster)
    for division in divisions:
        ranks = [rank for worker in range(division.num_workers(cluster)) for rank in division.ranks(cluster, worker)]
        assert sorted(ranks) == list(range(8)) and division.tiles(cluster)
    mixed = Division((StageMesh(1, 4), StageMesh(1, 1), StageMesh(1, 3)))
    assert [mixed.ranks(cluster, worker) for worker in range(3)] == [(0, 1, 2, 3), (4,), (5, 6, 7)]
    assert mixed.share_nodes(cluster, (1, 2)) and not mixed.share_nodes(cluster, (0, 1))
    strips = Division((StageMesh(2, 1), StageMesh(2, 3)))
    assert [strips.ranks(cluster, worker) for worker in range(2)] == [(0, 4), (1, 2, 3, 5, 6, 7)]
    for wrong in ((StageMesh(1, 4), StageMesh(2, 4)), (StageMesh(1, 3), StageMesh(1, 4)), (StageMesh(2, 1),)):
        assert not Division(wrong).tiles(cluster)


def test_divisions_of_large_clusters_have_equal_inner_workers():
    cluster = MACHINE.resized(16, 8)
    divisions = list(uneven_divisions(cluster))
    assert not has_all_divisions(cluster)
    assert all(division.tiles(cluster) and len(set(division.meshes[1:-1])) <= 1 for division in divisions)
    sizes = {tuple(mesh.nodes for mesh in d.meshes) for d in divisions if d.meshes[0].devices_per_node == 8}
    assert sizes == {
        *((first, *(1,) * (16 - first - last), last) for first, last in ((1, 2), (2, 1), (2, 2))),
        *(
            (first, *(2,) * ((16 - first - last) // 2), last)
            for first, last in ((1, 1), (2, 4), (4, 2), (4, 4), (1, 1))
        ),
        *((first, *(4,) * ((16 - first - last) // 4), last) for first, last in ((2, 2), (4, 8), (8, 4))),
        (4, 8, 4),
    }
    assert Division((StageMesh(16, 3), StageMesh(16, 5))) in divisions


# ---- Evaluation --------------------------------------------------------------------------------------------------------


def test_one_stage_is_the_plan_without_a_pipeline():
    planned = make_plan(GPT, MACHINE, Options(batch=8, precision="mixed"))
    spec = PipelineSchedule("1f1b", 1, planned.workload.num_micro_batches)
    stage = StageChoice(4, planned.workload.recompute, planned.strategies)
    found = evaluate(chain_of(GPT), MACHINE, Configuration(StageMesh(1, 4), spec, planned.workload, (stage,)))
    assert found.step_s == pytest.approx(planned.assessment.step_s, rel=1e-12)
    assert found.memory_bytes == planned.assessment.memory_bytes
    assert found.sent_bytes == pytest.approx(planned.assessment.sent_bytes)


def test_a_pipeline_of_single_devices_by_hand():
    """2 stages of a device each, 1F1B with N = 4: the busiest stage and the fill of the other, two transfers at each end."""
    spec = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),))
    machine = MACHINE.resized(1, 2).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)
    chain, configuration = uniform(UNTIED, StageMesh(1, 1), spec, 1, 4, (1, 3), "none", Strategy(((1, 1, 1),)))
    found = evaluate(chain, machine, configuration)
    # One sample: 8 rows of 64 features of 2 bytes.
    transfer = LATENCY + 8 * 64 * 2 / BANDWIDTH
    assert [(b.forward_s, b.nbytes) for b in found.boundaries] == [(pytest.approx(transfer), 1024)]
    first, last = found.stages
    assert last.busy_s > first.busy_s + 2 * transfer
    # Optimizer steps come last, since a device alone has nothing to reduce. Adam reads and writes 28 bytes of each parameter.
    for stage in found.stages:
        trained = [layer.num_parameters for layer in stage.graph.layers if layer.num_parameters]
        device = machine.device
        seconds = len(trained) * device.launch_s + 28 * sum(trained) / device.memory_bandwidth
        assert stage.update_s == pytest.approx(seconds) and stage.update_s > 0
    ends = transfer + first.backward_s + first.update_s, last.update_s
    assert found.step_s == pytest.approx(first.forward_s + transfer + 4 * last.busy_s + max(ends))
    # Stage 0 has two micro-batches in flight, stage 1 one.
    assert found.in_flight == ((2.0,), (1.0,))
    for stage, count, memory in ((first, 2, found.worker_memory_bytes[0]), (last, 1, found.worker_memory_bytes[1])):
        assert memory == stage.state_bytes + count * stage.kept_bytes + stage.buffer_bytes
    whole = assess(
        UNTIED, machine.resized(1, 1), configuration.workload, {x.name: Strategy(((1, 1, 1),)) for x in UNTIED.layers}
    )
    assert first.state_bytes + last.state_bytes == pytest.approx(sum(x.work.state_bytes for x in whole.layers))
    assert found.step_s == pytest.approx(
        found.compute_s + found.inner_communication_s + found.bubble_s + found.exposed_communication_s
    )


def test_what_a_step_waits_for_adds_up_if_an_optimizer_step_is_hidden():
    """Chimera, on a worker that is never idle: one of its two stages is updated while it computes passes of the other."""
    spec = PipelineSchedule("chimera", 4, 4, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2)
    one, wide = Strategy(((1, 1, 1),)), gpt(Transformer("wide", 4, 64, 4, 8, 65536, tied=False))
    found = evaluate(*_with(MACHINE, uniform(wide, StageMesh(1, 1), spec, 1, 4, (1, 1, 1, 1), "none", one)))
    whole = sum(found.stages[stage].update_s for _, stage in found.schedule.stages_on(found.busiest))
    assert found.bubble_s == 0 and found.update_s < whole
    assert found.step_s == pytest.approx(found.compute_s + found.communication_s + found.bubble_s, rel=1e-12)


def test_recomputation_of_a_stage_keeps_inputs_and_runs_again():
    spec = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),))
    machine = MACHINE.resized(1, 2).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)
    plain, again = (
        evaluate(chain, machine, configuration)
        for chain, configuration in (
            uniform(UNTIED, StageMesh(1, 1), spec, 1, 4, (2, 2), how, Strategy(((1, 1, 1),)))
            for how in ("none", "stage")
        )
    )
    assert again.stages[1].recompute_s == plain.stages[1].forward_s and plain.stages[1].recompute_s == 0
    assert again.worker_memory_bytes[1] == plain.worker_memory_bytes[1] + 1024  # one in flight: its input more
    assert (
        again.worker_memory_bytes[0] == plain.worker_memory_bytes[0] - plain.stages[0].kept_bytes
    )  # the first stage's input is the data
    assert sum(task.kind.letter == "R" for task in again.schedule.workers[0]) == 4


def test_shared_weights_and_replicas_are_reduced():
    """wte is 128 x 64 of 2 bytes on one device: 2 messages, 2/2 of the bytes; Chimera's replicas reduce every weight."""
    spec = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),))
    one, machine = Strategy(((1, 1, 1),)), MACHINE.resized(1, 2).with_links(latency_s=LATENCY, bandwidth=BANDWIDTH)
    found = evaluate(*_with(machine, uniform(GPT, StageMesh(1, 1), spec, 1, 4, (2, 2), "none", one)))
    shared = 2 * LATENCY + 128 * 64 * 2 / BANDWIDTH
    assert [stage.all_reduce_s for stage in found.stages] == [pytest.approx(shared)] * 2
    both = PipelineSchedule("chimera", 2, 4, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2)
    found = evaluate(*_with(machine, uniform(UNTIED, StageMesh(1, 1), both, 1, 4, (2, 2), "none", one)))
    for number, stage in enumerate(found.stages):
        layers = [layer for layer in stage.assessment.layers if layer.work.state_bytes]
        expected = sum(2 * LATENCY + layer.work.state_bytes * 2 / 16 / BANDWIDTH for layer in layers)
        assert stage.all_reduce_s == pytest.approx(expected), number
    assert (
        found.worker_memory_bytes[0]
        == found.worker_memory_bytes[1]
        > 2 * min(stage.state_bytes for stage in found.stages)
    )
    assert [found.micro_batches_of(0, s, p) for p, s in found.schedule.stages_on(0)] == [2, 2]


@pytest.mark.parametrize("who", [("wte",), ("lm_head",), ("wte", "lm_head")])
def test_stages_that_divide_a_shared_weight_exchange_shards(who):
    """Two devices per stage, with mixed precision and Adam: 12 bytes of states per parameter, of which each has half.

    A reduce-scatter and an all-gather take as long as the all-reduce. If both stages divide the weight, half of its gradient is
    exchanged between them.
    """
    spec, rows = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),)), Strategy(((2, 1, 1),))
    chain, configuration = uniform(GPT, StageMesh(1, 2), spec, 2, 8, (2, 2), "none", rows)
    stages = tuple(
        replace(stage, strategies={n: replace(s, zero=1) if n in who else s for n, s in stage.strategies.items()})
        for stage in configuration.stages
    )
    plain, found = (evaluate(chain, MACHINE, one) for one in (configuration, replace(configuration, stages=stages)))
    saved_s = 128 * 64 * 2 / 2 / BANDWIDTH if len(who) == 2 else 0.0
    for name, before, after in zip(("wte", "lm_head"), plain.stages, found.stages):
        assert before.all_reduce_s - after.all_reduce_s == pytest.approx(saved_s, abs=1e-12)
        assert before.state_bytes - after.state_bytes == (128 * 64 * 12 / 2 if name in who else 0.0)


def test_replicas_send_all_of_the_gradients_that_summa_leaves_on_a_device():
    """Summa splits weights over both axes, so nothing is reduced inside a worker: a device all-reduces all of its gradients."""
    spec = PipelineSchedule("chimera", 2, 2, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2)
    graph, machine = mlp([16, 16, 16]), MACHINE.resized(1, 8)
    summa = Strategy(((2, 2, 1),), summa=True)
    chain, configuration = uniform(graph, StageMesh(1, 4), spec, 4, 8, (1, 1), "none", summa)
    last = replace(configuration.stages[1], strategies={"fc2": summa, ENTRY: Strategy(summa.splits)})
    configuration = replace(configuration, stages=(configuration.stages[0], last))
    found = evaluate(chain, machine, configuration)
    once = [sum(step.sent_bytes for step in (*one.forward_steps, *one.backward_steps)) for one in found.layers]
    # Both replicas of both stages: 2 micro-batches, the boundary of 4 x 16 elements of 2 bytes in both directions.
    passes, transfers = sum(once), 2 * 4 * 16 * 2 / 4
    gradients = sum(2 * (2 - 1) / 2 * one.work.state_bytes * 2 / 16 for one in found.layers)
    assert found.sent_bytes == pytest.approx(passes + transfers + gradients)


def test_transfers_do_not_use_the_terms_of_collectives():
    spec, split = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),)), Strategy(((1, 2, 1),))
    chain, configuration = uniform(UNTIED, StageMesh(1, 2), spec, 2, 8, (2, 2), "none", split)
    slow = {collective: (1.0, 1.0) for collective in Collective}
    links = (replace(MACHINE.links[0], collectives=slow), replace(MACHINE.links[1], collectives=slow))
    ours, slower = (evaluate(chain, machine, configuration) for machine in (MACHINE, replace(MACHINE, links=links)))
    assert slower.boundaries == ours.boundaries and slower.step_s > ours.step_s


def _with(machine, pair):
    chain, configuration = pair
    return chain, machine, configuration


def test_layouts_that_differ_cost_more_than_equal_ones():
    """(S0:2) to (S1:2): each rank sends half of its half to each of the others: as many bytes, twice the messages."""
    spec = PipelineSchedule("1f1b", 2, 4, (("policy", "A"),))
    rows, features = Strategy(((2, 1, 1),)), Strategy(((1, 2, 1),))
    chain, configuration = uniform(UNTIED, StageMesh(1, 2), spec, 2, 8, (2, 2), "none", rows)
    equal = evaluate(chain, MACHINE, configuration).boundaries[0]
    last = configuration.stages[1]
    mixed = replace(last, strategies={**last.strategies, ENTRY: features})
    other = evaluate(chain, MACHINE, replace(configuration, stages=(configuration.stages[0], mixed))).boundaries[0]
    assert equal.forward_s == pytest.approx(LATENCY + 1024 / BANDWIDTH)
    assert other.forward_s == pytest.approx(2 * LATENCY + 1024 / BANDWIDTH)


def test_unequal_stages_by_hand():
    """2 samples from a device to three, split over features: it sends all, each receives a third of 2 x 8 x 96 x 2 bytes."""
    graph = gpt(Transformer("thirds", 2, 96, 6, 8, 384, tied=False))
    spec, division = PipelineSchedule("1f1b", 2, 2, (("policy", "A"),)), Division((StageMesh(1, 1), StageMesh(1, 3)))
    chain, alone = uniform(graph, StageMesh(1, 1), spec, 2, 4, (1, 1), "none", Strategy(((1, 1, 1),)))
    thirds = {layer.name: Strategy(((1, 3, 1),)) for layer in chain.layers(1, 2)}
    last = replace(alone.stages[1], strategies={ENTRY: Strategy(((1, 3, 1),)), **thirds})
    found = evaluate(chain, MACHINE, replace(alone, mesh=division, stages=(alone.stages[0], last)))
    nbytes = 2 * 8 * 96 * 2
    boundary = found.boundaries[0]
    assert boundary.nbytes == nbytes and found.schedule.widths == (1, 3)
    assert boundary.forward_s == boundary.backward_s == pytest.approx(3 * LATENCY + nbytes / BANDWIDTH)
    first, last = found.stages
    assert first.communication_s == 0 and last.input_bytes == nbytes / 3
    assert last.state_bytes < sum(16 * layer.layer.num_parameters for layer in last.assessment.layers) / 2
    # The first device takes the second micro-batch forward while the others work; at the end it waits for its gradient.
    ends = [one.busy_s for one in found.stages]
    assert (
        found.step_s >= max(2 * busy for busy in ends) and found.worker_memory_bytes[1] < found.worker_memory_bytes[0]
    )


def test_a_split_backward_pass_is_priced_as_ranks_send_it():
    """Both parts go back through a stage with all its communication, but for the first stage's input part."""
    strategy, mesh = Strategy(((1, 2, 1),)), StageMesh(1, 2)
    for name, options in (("1f1b", (("policy", "A"),)), ("zero-bubble", (("policy", "H1"),))):
        spec = PipelineSchedule(name, 2, 4, options)
        chain, configuration = uniform(UNTIED, mesh, spec, 2, 8, (2, 2), "none", strategy)
        single = replace(configuration.workload, precision="float32", optimizer="sgd")
        fast = replace(MACHINE.device, peak_flops={"float32": 1e12})
        found = evaluate(chain, replace(MACHINE, device=fast), replace(configuration, workload=single))
        plans = []
        for choice in configuration.stages:
            chosen = {layer: one for layer, one in choice.strategies.items() if layer != ENTRY}
            plans.append(StagePlan(chosen, "none", choice.strategies.get(ENTRY)))
        traffic = stage_traffic(found.schedule, UNTIED, plans, 2)
        for number, (stage, sent) in enumerate(zip(found.stages, traffic.inside)):
            layers, passes = stage.assessment.layers, 2 if name == "zero-bubble" and number else 1
            forward = sum(step.sent_bytes for layer in layers for step in layer.forward_steps)
            backward = sum(step.sent_bytes for layer in layers for step in layer.backward_steps)
            assert backward > 0 and stage.backward_passes == passes
            assert sent.num_bytes == pytest.approx(4 * mesh.num_devices * (forward + passes * backward))
            once = sum(layer.backward_compute_s + layer.backward_communication_s for layer in layers)
            assert stage.backward_s == pytest.approx(passes * once)
            inputs = once if passes == 2 or name == "1f1b" else 0.0
            assert stage.backward_input_s == pytest.approx(inputs)
        most = max(sum(part) for part in zip(*_sent_by_device(found, traffic)))
        assert found.sent_bytes == pytest.approx(most)


def _sent_by_device(found, traffic):
    """Per stage what each of its devices sends in a step, all alike; the stages' boundary is sent forward, and back."""
    between = traffic.between[0].num_bytes / 2 / 2
    whole = [(a.num_bytes + b.num_bytes) / 2 + between for a, b in zip(traffic.inside, traffic.gradients)]
    return [[whole[0], 0.0], [0.0, whole[1]]]


# ---- Ways to run a stage -----------------------------------------------------------------------------------------------

EVERYTHING = (RowFilter((0.0,) * 5, 0.0),)


@pytest.mark.parametrize(
    ("way", "size", "attention"),
    [
        ("none", 4, "fused"),
        ("selective", 2, "dense"),
        ("layers", 2, "fused"),
        ("blocks", 2, "dense"),
        ("stage", 2, "fused"),
    ],
)
@pytest.mark.parametrize(
    ("first", "stop", "need"), [(0, 2, StageDemand(2.0, 1)), (1, 3, StageDemand(3.0, 2)), (2, 4, StageDemand(1.0, 1))]
)
def test_rows_of_a_stage_are_those_of_the_layer_graph(way, size, attention, first, stop, need):
    """Times, bytes and layouts of every way on offer, against the assessment of its strategies."""
    inside = "none" if way == "stage" else way
    workload, mesh = Workload(8, size, "mixed", recompute=inside, attention=attention), StageMesh(1, 2)
    chain, devices = chain_of(UNTIED), mesh.devices(MACHINE)
    stages = StageSearch(chain, mesh, MACHINE, workload, Pricing())
    rows = stages.rows(first, stop, way, Passes(size, size, Replicas()), need, EVERYTHING, 1e9)
    assert rows is not None and len(rows) > 1
    stage = chain.stage(first, stop)
    received = 0.0
    if stage.has_entry:
        received = size * stage.graph.layers[0].output_elements * workload.itemsize / devices.num_devices
    for row in range(0, len(rows), max(1, len(rows) // 20)):
        said, strategies = rows.strategies(row)
        layers = assess(stage.graph, devices, workload, strategies).layers[int(stage.has_entry) :]
        forward = sum(one.forward_compute_s + one.forward_communication_s for one in layers)
        backward = sum(one.backward_compute_s + one.backward_communication_s for one in layers)
        gradient = sum(one.gradient_communication_s + one.update_s for one in layers)
        again = forward if way == "stage" else 0.0
        assert said == way and rows.times[row] == pytest.approx([forward, backward, again, gradient])
        names = ("state_bytes", "kept_bytes", "recomputed_bytes")
        state, kept, recomputed = (sum(getattr(one.work, name) for one in layers) for name in names)
        assert (recomputed > 0) == (way == "blocks")
        # Weights are 2 of the 16 bytes of a parameter's state.
        state *= 1 + (need.versions - 1) * 2 / 16
        alive = need.in_flight * received + kept if way == "stage" else need.in_flight * kept
        assert rows.memory[row] == pytest.approx(state + alive + recomputed)
        assert rows.buffer[row] == max(one.work.buffer_bytes for one in layers)


def test_a_stage_takes_the_best_that_fits():
    mesh, workload = StageMesh(1, 2), Workload(8, 8, "mixed", "adam")
    stages = StageSearch(chain_of(UNTIED), mesh, MACHINE, workload, Pricing())
    passes, need, weights = Passes(8, 8, Replicas()), StageDemand(4.0, 1), (4.0, 4.0, 4.0, 1.0)

    def best(way, limit, most=inf):
        found = stages.cheapest(1, 3, way, passes, need, weights, limit, most)
        return found and (found[0], float(found[1].memory[0] + found[1].buffer[0]))

    cost, roomy = best("none", 1e9)
    table = stages.table(1, 3, "none", passes).table
    assert cost == pytest.approx(least(table, np.array([[4.0, 4.0, 1.0, *[0.0] * (table.num_components - 3)]]))[0])
    # The cheapest where bytes are for nothing, and the smallest where seconds are.
    hull = stages.hull(1, 3, "none", passes, need, np.array([(*weights, price) for price in (0.0, 1e9)]))
    costs = hull.times @ np.array(weights)
    assert costs.min() == pytest.approx(cost) and len(hull) == 2
    assert hull.memory.argmin() == costs.argmax()
    assert best("none", 1e9, most=cost * 0.999) is None
    dearer, tight = best("none", roomy * 0.97)
    assert dearer > cost and tight <= roomy * 0.97
    for way in ("none", "layers", "stage"):
        enough = stages.least_memory(1, 3, way, passes, need)
        assert best(way, enough + 1)[1] == pytest.approx(enough, abs=1.0)
        assert best(way, enough - 1) is None
        assert not len(stages.rows(1, 3, way, passes, need, EVERYTHING, enough - 1))
        assert len(stages.rows(1, 3, way, passes, need, EVERYTHING, enough + 1))
    assert stages.least_memory(1, 3, "stage", passes, need) < stages.least_memory(1, 3, "none", passes, need)
