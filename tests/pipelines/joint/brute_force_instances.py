"""Random small problems of the joint search, and the judgement of its plans by brute force (:mod:`.brute_force`)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from autoddl.costmodel.cluster import Cluster, Link, load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph
from autoddl.costmodel.units import format_memory_limit
from autoddl.costmodel.workload import Workload
from autoddl.pipelines.joint import (
    Configuration,
    JointOptions,
    PipelineSchedule,
    StageChoice,
    StageMesh,
    chain_of,
    evaluate,
)
from autoddl.pipelines.joint.evaluation import Evaluation
from autoddl.pipelines.joint.meshes import Division
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.search.planner import InfeasibleError, NothingFoundError, Options
from autoddl.zoo import Transformer, gpt, mlp

from .brute_force import BruteForce, Found
from .brute_force_stages import Job

__all__ = [
    "LIMITS",
    "UNLIMITED",
    "Gpt",
    "Instance",
    "Machine",
    "Solved",
    "evaluated",
    "judge",
    "random_instance",
    "random_machine",
    "solve",
    "solved",
]

#: More than any of the models here needs.
UNLIMITED = 1e12


# ---- Instances ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gpt:
    """The sizes of a model that is not a perceptron."""

    blocks: int
    width: int
    sequence: int
    vocabulary: int
    tied: bool
    heads: int = 2


@dataclass(frozen=True)
class Machine:
    """Nodes, devices of each; seconds and bytes/s of links between and in nodes; FLOP/s, bytes/s and seconds of a device."""

    nodes: int
    devices: int
    links: tuple[tuple[float, float], tuple[float, float]]
    flops: float
    memory_bandwidth: float
    launch_s: float

    @property
    def cluster(self) -> Cluster:
        known = load_cluster("gcp-a100")
        device = replace(
            known.device,
            memory_bytes=UNLIMITED,
            memory_bandwidth=self.memory_bandwidth,
            peak_flops={"mixed": self.flops},
            efficiency=1.0,
            launch_s=self.launch_s,
        )
        links = (Link(*self.links[0]), Link(*self.links[1]))
        return replace(known, num_nodes=self.nodes, devices_per_node=self.devices, device=device, links=links)


@dataclass(frozen=True)
class Instance:
    """A small problem.

    Attributes:
        limit: of memory: 0 is the least that some plan does with, 1 what the best plan without one needs; None: no limit.
    """

    model: tuple[int, ...] | Gpt | LayerGraph
    machine: Machine
    batch: int
    micro_batch: int | None = None
    recompute: bool | str | None = None
    untied: bool = False
    summa: bool = False
    limit: float | None = None
    attention: str = "fused"
    overlap: str = "none"
    zero: int | str = 0
    activations: str = "kept"

    @property
    def graph(self) -> LayerGraph:
        model = self.model
        if isinstance(model, LayerGraph):
            return model
        if not isinstance(model, Gpt):
            return mlp(model)
        sizes = (model.blocks, model.width, model.heads, model.sequence, model.vocabulary)
        return gpt(Transformer("gpt", *sizes, tied=model.tied))

    @property
    def is_provable(self) -> bool:
        """Whether the search can prove its plan: a weight is shared by the first and the last unit alone, and nothing overlaps."""
        chain = chain_of(self.graph)
        return self.overlap == "none" and set(chain.ends_of_ties()) <= {(0, chain.num_units - 1)}

    @property
    def job(self) -> Job:
        return Job(
            self.graph,
            self.machine.cluster,
            self.batch,
            self.micro_batch,
            self.recompute,
            self.untied,
            self.summa,
            attention=self.attention,
            overlap=self.overlap,
            zero=self.zero,
            activations=self.activations,
        )

    def options(self, limit: float) -> JointOptions:
        return JointOptions(
            Options(
                batch=self.batch,
                micro_batch=self.micro_batch,
                memory_limit_bytes=limit,
                precision="mixed",
                recompute=self.recompute,
                untied=self.untied,
                summa=self.summa,
                attention=self.attention,
                overlap=self.overlap,
                zero=self.zero,
                activations=self.activations,
                time_limit_s=100.0,
            )
        )


#: Nodes and devices of each.
SHAPES = {
    "without limits": ((1, 2), (2, 1), (1, 3), (1, 4), (4, 1), (2, 2)),
    "limited": ((1, 2), (2, 1), (3, 1), (1, 4), (4, 1), (2, 2)),
    "unequal workers": ((1, 3), (3, 1), (1, 4), (2, 2)),
    "two levels": ((2, 2),),
    "transformers": ((1, 2), (2, 1), (2, 2), (1, 4)),
    "deep": ((1, 2), (2, 1)),
    "untied and summa": ((1, 4), (2, 2)),
}
#: Parts of the way from the least memory to that of the best plan without a limit.
LIMITS = (0.99, 0.95, 0.9, 0.8, 0.6, 0.4, 0.2, 0.0, -0.1)


def random_machine(dice: random.Random, kind: str, batch: int) -> Machine:
    """From all compute to all network, about a layer of 64 x 64; links alike, or not."""
    flops = 1e10
    compute_s = 6 * batch * 64**2 / flops

    def times(low: float, high: float) -> float:
        return float(f"{10 ** dice.uniform(low, high):.2g}")

    # Where memory is limited networks are slow: on fast ones a plan without a pipeline always spreads everything.
    fastest = 0 if kind == "limited" else 1.5

    def link() -> tuple[float, float]:
        return dice.choice((0, 0, times(-3, -1), times(-1, 0.5))) * compute_s, times(-1.5, fastest) * flops / batch

    links = link()
    return Machine(
        *dice.choice(SHAPES[kind]),
        links=(links, link() if kind == "two levels" or dice.random() < 0.5 else links),
        flops=flops,
        memory_bandwidth=times(0, 3) * flops / batch,
        launch_s=dice.choice((0, 0, times(-3, -0.5))) * compute_s,
    )


def random_model(dice: random.Random, kind: str, machine: Machine) -> tuple[int, ...] | Gpt:
    """A perceptron whose widths divide over all devices, or a transformer."""
    if kind == "transformers" or (kind == "untied and summa" and dice.random() < 0.2):
        blocks = dice.choice((2, 4)) if machine.nodes * machine.devices == 2 else 2
        return Gpt(blocks, 32, dice.choice((4, 8)), 64, dice.random() < 0.5)
    if kind == "deep":
        return tuple(dice.choices((8, 32, 64), k=9))
    unit = 3 if 3 in (machine.nodes, machine.devices) else 1
    return tuple(unit * width for width in dice.choices((8, 32, 64, 64, 256), k=dice.choice((3, 4, 5))))


def random_instance(dice: random.Random, kind: str) -> Instance:
    batch = dice.choice((1, 2, 4) if kind in ("transformers", "deep") else (1, 2, 3, 4, 6, 8, 8))
    machine = random_machine(dice, kind, batch)
    if kind == "untied and summa" and dice.random() < 0.2:
        machine = replace(machine, nodes=1, devices=2)
    model = random_model(dice, kind, machine)
    divisors = [size for size in range(1, batch + 1) if batch % size == 0]
    is_limited = kind == "limited" or (kind != "without limits" and dice.random() < 0.5)
    return Instance(
        model,
        machine,
        batch,
        micro_batch=dice.choice(divisors) if dice.random() < 0.2 else None,
        recompute=dice.choice((None, None, None, True, False)),
        untied=kind == "untied and summa" and dice.random() < 0.5,
        summa=kind == "untied and summa",
        limit=dice.choice(LIMITS) if is_limited else None,
        attention=dice.choice(("fused", "dense")) if isinstance(model, Gpt) else "fused",
    )


# ---- The joint search and brute force --------------------------------------------------------------------------------


def configured(job: Job, found: Found) -> Configuration:
    """What brute force found, in the words of the search."""
    shapes = tuple(StageMesh(*one.shape) for one in found.rectangles)
    family, count = found.family, job.batch // found.micro_batch
    spec = PipelineSchedule(
        family.name, len(shapes), count, family.options, family.groups, num_pipelines=family.num_pipelines
    )
    stages = tuple(StageChoice(one.stop - one.first, one.recompute, one.strategies) for one in found.stages)
    workload = Workload(job.batch, found.micro_batch, job.precision, attention=job.attention, overlap=job.overlap)
    mesh = shapes[0] if len(set(shapes)) == 1 else Division(shapes)
    return Configuration(mesh, spec, workload, stages)


def evaluated(job: Job, found: Found) -> Evaluation:
    return evaluate(chain_of(job.graph), job.cluster, configured(job, found))


@dataclass(frozen=True)
class Solved:
    """An instance, and what brute force says of it: the best configuration, the best within the limit, and the least bytes of any.

    The least bytes are 0 if there is no limit.
    """

    instance: Instance
    limit_bytes: float
    free: Found | None
    best: Found | None
    least_bytes: float = 0.0


#: How often an instance is drawn for one whose best plan is of interest.
DRAWS = 4


def solved(dice: random.Random, kind: str, draw: Callable[[random.Random, str], Instance] = random_instance) -> Solved:
    """A random instance; rather one whose best plan, if there were no limit, has a pipeline (of unequal workers)."""
    for _ in range(DRAWS):
        instance = draw(dice, kind)
        brute = BruteForce(instance.job)
        free = brute.best()
        shapes = [] if free is None else [one.shape for one in free.rectangles]
        if len(set(shapes)) > 1 or (len(shapes) > 1 and kind != "unequal workers"):
            break
    return solve(instance, brute, free)


def solve(instance: Instance, brute: BruteForce, free: Found | None) -> Solved:
    """What brute force says of an instance, given the best configuration at all."""
    limit, least, best = UNLIMITED, 0.0, free
    if instance.limit is not None and free is not None:
        least = brute.least_memory()
        # Between what sums of whole bytes can be.
        limit = math.floor(least + instance.limit * max(100.0, free.demand_bytes - least)) + 0.3
        best = brute.best(limit)
    return Solved(instance, limit, free, best, least)


def judge(case: Solved) -> None:
    """The plan of the joint search is the best of all configurations."""
    instance, best, limit = case.instance, case.best, case.limit_bytes
    graph, cluster, options = instance.graph, instance.machine.cluster, instance.options(limit)
    if best is None:
        # Where no number of bytes would do, the error does not speak of memory.
        with pytest.raises(InfeasibleError if instance.is_provable and case.free is not None else UserError) as raised:
            plan_jointly(graph, cluster, options)
        if "the smallest memory that would do" in str(raised.value):
            assert format_memory_limit(case.least_bytes) in str(raised.value), instance
        return
    # What brute force found is a configuration of the space, whatever the search finds.
    known = evaluated(instance.job, best)
    assert known.step_s == pytest.approx(best.step_s, rel=1e-9), best
    assert known.memory_bytes == pytest.approx(best.memory_bytes, rel=1e-9) and known.memory_bytes <= limit, best
    try:
        planned = plan_jointly(graph, cluster, options)
    except NothingFoundError:
        assert not instance.is_provable
        return
    shown = f"{instance}\nlimit {limit!r}\nbrute force: {best}\nplan: {planned.evaluation.step_s * 1e6:.6g} us"
    if not (instance.is_provable or planned.optimal):
        # Bounds count less than what the longest all-reduces add, or rows were not searched; the gap is told.
        assert planned.lower_bound_s <= best.step_s * (1 + 1e-9) <= planned.evaluation.step_s * (1 + 2e-9), shown
        assert planned.gap == pytest.approx(1 - planned.lower_bound_s / planned.evaluation.step_s), shown
        return
    if planned.evaluation.step_s < best.step_s * (1 - 1e-9):
        # A first plan may fit although the peaks of a worker's stages, each at its own moment, would not fit at once.
        by_moments = BruteForce(instance.job).best(limit, at_once=False)
        assert by_moments is not None and by_moments.step_s <= planned.evaluation.step_s * (1 + 1e-9), shown
    else:
        assert planned.evaluation.step_s == pytest.approx(best.step_s, rel=1e-9), shown
    assert planned.optimal, shown
    assert planned.lower_bound_s <= best.step_s * (1 + 1e-9), shown
    assert planned.evaluation.memory_bytes <= limit, shown
