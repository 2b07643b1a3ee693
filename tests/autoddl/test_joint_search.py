"""The joint planner against brute force over the same space, without its bounds, its shared interiors or its order."""

from __future__ import annotations

import math
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest

from autoddl.costmodel.assessment import assess
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.layerwork import layer_work
from autoddl.costmodel.pricing import PriceBook
from autoddl.costmodel.workload import Workload
from autoddl.joint import Configuration, JointOptions, PipelineSchedule, StageChoice, StageMesh, chain_of, evaluate
from autoddl.joint.explorer import Explorer
from autoddl.joint.meshes import Division
from autoddl.joint.planner import plan_jointly
from autoddl.models import Transformer, gpt, mlp
from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.memory import weight_versions
from autoddl.pipelines.schedule import Kind
from autoddl.planner import InfeasibleError, Options
from autoddl.search import solve

pytestmark = pytest.mark.slow

RECOMPUTATIONS = ("none", "layers", "stage")
TWO = gpt(Transformer("two", 2, 64, 4, 8, 128))
THREE = gpt(Transformer("three", 3, 64, 4, 8, 128))
LONG = gpt(Transformer("long", 3, 32, 4, 64, 64))
UNTIED = gpt(Transformer("untied", 4, 64, 4, 8, 128, tied=False))


def cluster(nodes, devices, bandwidth=2e8, latency=2e-6):
    return load_cluster("gcp-a100").resized(nodes, devices).with_links(latency_s=latency, bandwidth=bandwidth)


def divisors(number):
    return [d for d in range(1, number + 1) if number % d == 0]


def all_schedules(depth, count, stale):
    """Written down anew, family by family."""
    if depth == 1:
        yield PipelineSchedule("1f1b", 1, count)
        return
    yield PipelineSchedule("gpipe", depth, count)
    for policy in "AB":
        yield PipelineSchedule("1f1b", depth, count, (("policy", policy),))
    for policy in ("H1", "H2"):
        yield PipelineSchedule("zero-bubble", depth, count, (("policy", policy),))
    for groups in (2, 4):
        yield PipelineSchedule("grouped-gpipe", depth, count, (("groups", groups),), groups)
        yield PipelineSchedule("interleaved-1f1b", depth, count, (("groups", groups),), groups)
    if count > 1:
        yield PipelineSchedule("gems", depth, count, num_pipelines=2)
    for pipelines in (2, 4):
        for concatenation in ("direct", "doubling", "halving"):
            options = (("concatenation", concatenation), ("num_pipelines", pipelines))
            usable = {"direct": count >= pipelines, "doubling": count >= 2 * depth, "halving": count > depth}
            if usable[concatenation] and count >= pipelines:
                yield PipelineSchedule("chimera", depth, count, options, num_pipelines=pipelines)
    if stale:
        yield PipelineSchedule("pipedream", depth, count, synchronous=False)
        yield PipelineSchedule("pipedream-2bw", depth, count, synchronous=False)
        yield PipelineSchedule("wpipe", depth, count, groups=2, synchronous=False)


def compositions(whole):
    return [
        tuple(b - a for a, b in zip((0, *places), (*places, whole)))
        for count in range(whole)
        for places in combinations(range(1, whole), count)
    ]


def all_divisions(machine):
    """Every tiling by strips of bands of nodes: the rectangles of its workers."""
    for bands in compositions(machine.num_nodes):
        for strips in product(compositions(machine.devices_per_node), repeat=len(bands)):
            yield tuple(StageMesh(nodes, g) for nodes, devices in zip(bands, strips) for g in devices)


def most_in_flight(schedule, pipeline, stage):
    """By walking through the list of the stage's worker."""
    alive = most = 0.0
    ends = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    for task in schedule.workers[schedule.placement[pipeline][stage]]:
        if (task.pipeline, task.stage) == (pipeline, stage):
            alive += task.part.size * (task.kind is Kind.FORWARD)
            most = max(most, alive)
            alive -= task.part.size * (task.kind in ends)
    return most


def _cached_by_identity(function):
    """Results are kept by the first argument and by the identity of the second one, a dictionary, which is kept too."""
    known = {}

    def cached(first, second):
        key = (first, id(second))
        if key not in known:
            known[key] = (function(first, second), second)
        return known[key][0]

    return cached


class Stage:
    """One stage on one mesh at one micro-batch: every way to run it, searched for at once and without memory of others."""

    def __init__(self, chain, first, stop, devices, workload):
        self.best, self.figures = cache(self._best), _cached_by_identity(self._figures)
        self.memory_of_options = cache(self._memory_of_options)
        self.graph = chain.stage(first, stop)
        self.devices, self.workload = devices, workload
        self.problems = {}
        for again in (False, True):
            own = Workload(workload.batch, workload.micro_batch, workload.precision, workload.optimizer, again)
            self.problems[again] = PriceBook(self.graph.graph, devices, own).problem(own.batch, own.micro_batch)

    def _figures(self, recompute, strategies):
        own = Workload(
            self.workload.batch,
            self.workload.micro_batch,
            self.workload.precision,
            self.workload.optimizer,
            recompute == "layers",
        )
        layers = assess(self.graph.graph, self.devices, own, strategies).layers[int(self.graph.has_entry) :]
        forward = sum(one.work.forward_s + one.forward_communication_s for one in layers)
        backward = sum(one.work.backward_s + one.backward_communication_s for one in layers)
        again = forward if recompute == "stage" else 0.0
        cost = own.num_micro_batches * (forward + backward + again) + sum(
            one.gradient_communication_s for one in layers
        )
        state = sum(one.work.state_bytes for one in layers)
        return cost, state, sum(one.work.kept_bytes for one in layers), max(one.work.buffer_bytes for one in layers)

    def input_bytes(self):
        if not self.graph.has_entry:
            return 0.0
        elements = self.graph.graph.layers[0].output_elements
        return self.workload.micro_batch * elements * self.workload.itemsize / self.devices.num_devices

    def needed(self, recompute, strategies, alive, versions):
        _, state, kept, buffer = self.figures(recompute, strategies)
        state *= 1 + (versions - 1) * self.workload.itemsize / self.workload.bytes_per_parameter
        in_flight = alive * self.input_bytes() + kept if recompute == "stage" else alive * kept
        return state + in_flight + buffer

    def _memory_of_options(self, again):
        """Of every variable the bytes of state, and of what a micro-batch keeps, of each of its options."""
        problem, found = self.problems[again], []
        for variable in problem.variables:
            state, kept = np.zeros(len(variable.options)), np.zeros(len(variable.options))
            for name in variable.layers:
                layer = self.graph.graph[name]
                for option in range(len(state)):
                    work = layer_work(
                        layer,
                        variable.strategy(name, option),
                        self.devices,
                        problem.workload,
                        self.workload.micro_batch,
                        not self.graph.graph.inputs(name),
                    )
                    state[option] += work.state_bytes
                    kept[option] += work.kept_bytes
            found.append((state, kept))
        return found

    def _best(self, recompute, alive, versions, budget):
        """The optimum within the budget; without one where it is None."""
        problem = self.problems[recompute == "layers"]
        table = problem.table
        if budget is not None:
            if recompute == "stage":
                alive, budget = 1.0, budget - alive * self.input_bytes()
            if budget <= 0:
                return None
            factor = 1 + (versions - 1) * self.workload.itemsize / self.workload.bytes_per_parameter
            memory = [
                np.ceil(state * factor + alive * kept - 1e-6)
                for state, kept in self.memory_of_options(recompute == "layers")
            ]
            table = type(table)(table.names, table.cost, tuple(memory), table.buffer, table.edges)
        found = solve(table, memory_limit=budget)
        return None if found.choice is None or math.isinf(found.cost) else problem.strategies(found.choice)


def run_stages(chain, bounds, meshes, machine, workload, schedule, limit, stages_known):
    """(recompute, strategies) of every stage by the rule that the space is defined with; None where one does not fit."""
    versions = {} if schedule.is_synchronous else weight_versions(schedule)
    alive = [max(most_in_flight(schedule, p, s) for p in range(schedule.num_pipelines)) for s in range(len(bounds))]
    copies = [max(versions.get((p, s), 1) for p in range(schedule.num_pipelines)) for s in range(len(bounds))]
    stages = []
    for (first, stop), mesh in zip(bounds, meshes):
        key = (first, stop, mesh, workload.micro_batch)
        if key not in stages_known:
            try:
                stages_known[key] = Stage(chain, first, stop, mesh.devices(machine), workload)
            except UserError:  # no strategy on so many devices
                stages_known[key] = None
        if stages_known[key] is None:
            return None
        stages.append(stages_known[key])
    homes = [[s for _, s in schedule.stages_on(worker)] for worker in range(schedule.num_workers)]
    if any(len(held) > 1 for held in homes):
        free = [("none", stage.best("none", 1, 1, None)) for stage in stages]
        if any(strategies is None for _, strategies in free):
            return None

        def worker_bytes(held):
            buffers = [stages[s].figures("none", free[s][1])[3] for s in held]
            whole = [stages[s].needed("none", free[s][1], alive[s], copies[s]) for s in held]
            return sum(whole) - sum(buffers) + max(buffers)

        if all(worker_bytes(held) <= limit for held in homes):
            return free
    share = [limit / max(len(held) for held in homes if s in held) for s in range(len(stages))]
    chosen = []
    for s, stage in enumerate(stages):
        shapes = [(mesh, chain.shape(*ends)) for mesh, ends in zip(meshes, bounds)]
        alike = [t for t in range(len(stages)) if shapes[t] == shapes[s]]
        most = (max(alive[t] for t in alike), max(copies[t] for t in alike), min(share[t] for t in alike))
        ways = []
        for recompute in RECOMPUTATIONS:
            for strategies in (
                stage.best(recompute if recompute != "stage" else "none", 1, 1, None),
                stage.best(recompute, *most),
            ):
                if strategies is not None and stage.needed(recompute, strategies, alive[s], copies[s]) <= share[s]:
                    ways.append((stage.figures(recompute, strategies)[0], recompute, strategies))
        if not ways:
            return None
        least = min(cost for cost, *_ in ways)
        # Of equal ones one that is recomputed as a whole.
        equal = [way for way in ways if way[0] <= least * (1 + 1e-9)]
        chosen.append(min(equal, key=lambda way: (way[1] != "stage", way[0]))[1:])
    return chosen


def brute_force(graph, machine, batch, limit, stale=False):
    """The least step of all configurations of equal workers, that of all others, and how many fit."""
    chain, best, fitting, stages_known = chain_of(graph), {True: math.inf, False: math.inf}, 0, {}
    units = chain.num_units
    for rectangles in all_divisions(machine):
        equal, depth = len(set(rectangles)) == 1, len(rectangles)
        mesh = rectangles[0] if equal else Division(rectangles)
        for size in divisors(batch):
            workload = Workload(batch, size, "mixed", "adam")
            for spec in all_schedules(depth, batch // size, stale):
                if spec.num_stages > units or (spec.num_pipelines > 1 and not equal):
                    continue
                meshes = [rectangles[s % depth] for s in range(spec.num_stages)]
                try:
                    widths = tuple(one.num_devices for one in rectangles)
                    schedule = spec.schedule(widths, (False,) * spec.num_stages)
                except GeneratorError:
                    continue
                for places in combinations(range(1, units), spec.num_stages - 1):
                    bounds = list(zip((0, *places), (*places, units)))
                    chosen = run_stages(chain, bounds, meshes, machine, workload, schedule, limit, stages_known)
                    if chosen is None:
                        continue
                    choices = tuple(
                        StageChoice(stop - first, recompute, strategies)
                        for (first, stop), (recompute, strategies) in zip(bounds, chosen)
                    )
                    if dict(spec.options).get("concatenation") == "halving" and any(
                        size % (2 * strategy.p0) for choice in choices for strategy in choice.strategies.values()
                    ):
                        continue
                    evaluation = evaluate(chain, machine, Configuration(mesh, spec, workload, choices))
                    assert evaluation.memory_bytes <= limit * (1 + 1e-9)
                    fitting += 1
                    best[equal] = min(best[equal], evaluation.step_s)
    return best[True], best[False], fitting


CASES = {
    "two devices per stage": (TWO, cluster(1, 4), 4, 7e5, False),
    "a wider stage fits": (THREE, cluster(1, 4), 2, 9.7e5, False),
    "two nodes": (THREE, cluster(2, 2, 5e7), 2, 1.1e6, False),
    "one stage recomputed": (LONG, cluster(1, 2), 8, 8.5e5, False),
    "stale weights": (UNTIED, cluster(1, 2, 5e7), 4, 5e6, True),
    "units all different": (mlp((256, 128, 128, 64, 16)), cluster(1, 4, 1e8), 8, 1e9, False),
    "a heavy layer": (mlp((64, 768, 768, 32)), cluster(1, 3, 1e8), 12, 1e9, False),
}
#: Those in which workers of unequal numbers of devices are better than all equal ones.
UNEQUAL = {"two nodes", "a wider stage fits", "a heavy layer"}


@pytest.mark.parametrize("case", CASES)
def test_joint_plan_is_brute_forces(case):
    graph, machine, batch, limit, stale = CASES[case]
    equal, unequal, fitting = brute_force(graph, machine, batch, limit, stale)
    best = min(equal, unequal)
    options = JointOptions(
        Options(batch=batch, memory_limit_bytes=limit, precision="mixed", time_limit_s=300.0), "auto", stale
    )
    if math.isinf(best):
        with pytest.raises(InfeasibleError):
            plan_jointly(graph, machine, options)
        pytest.fail(f"{case}: nothing fits, the case proves nothing")
    planned = plan_jointly(graph, machine, options)
    assert planned.evaluation.step_s == pytest.approx(best, rel=1e-9)
    assert planned.optimal and planned.lower_bound_s == pytest.approx(best, rel=1e-9)
    assert planned.evaluation.memory_bytes <= limit
    assert planned.considered.simulated <= fitting
    assert (unequal < equal * (1 - 1e-6)) == (case in UNEQUAL) == isinstance(planned.configuration.mesh, Division)


@pytest.mark.parametrize("case", ["two nodes", "stale weights", "a heavy layer"])
def test_steps_from_what_is_known_are_those_of_the_layer_graph(case):
    graph, machine, batch, limit, stale = CASES[case]
    explorer = Explorer(chain_of(graph), machine, Workload(batch, batch, "mixed", "adam"), limit)
    compared = 0
    for setting in explorer.settings(None, stale, lambda spec: True):
        if explorer.needs(setting) is None:
            continue
        for cut in setting.cuts(explorer.chain.num_units).tolist()[:2]:
            stages = explorer.stages(setting, cut)
            if stages is None:
                continue
            step = explorer.simulated(setting, cut, stages)
            if step is not None:
                found = explorer.evaluation(setting, cut, stages)
                assert step == pytest.approx(found.step_s, rel=1e-12), setting
                compared += 1
    assert compared > 20
