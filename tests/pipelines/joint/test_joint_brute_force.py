"""The joint search against brute force: on random small instances its plan is the best of all configurations.

The brute force (:mod:`.brute_force`) is judged first: its times of schedules by the simulator, its configurations by
``evaluate``, its filter by doing without.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.joint import JointOptions, arc_rows, cut_covers, cut_plans, row_search, search, stage_search
from autoddl.pipelines.joint.cut_branching import Branched, CutBranching
from autoddl.pipelines.joint.cut_program import CutProgram
from autoddl.pipelines.joint.planner import plan_jointly
from autoddl.pipelines.joint.setting_bounds import SettingBounds
from autoddl.pipelines.schedule import Kind
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.search.dominance import TooManyError
from autoddl.search.planner import Options, make_plan
from autoddl.zoo import mlp

from .brute_force import BruteForce, families
from .brute_force_instances import (
    UNLIMITED,
    Gpt,
    Instance,
    Machine,
    Solved,
    evaluated,
    judge,
    random_instance,
    solved,
)
from .brute_force_stages import Job
from .comparisons import without_rivals
from .pipeline_program import TaskTimes, program_of

T = TypeVar("T")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def no_comparison() -> Iterator[None]:
    """The families that a plan is compared with are not what is judged here."""
    with without_rivals():
        yield


# ---- The joint search --------------------------------------------------------------------------------------------------


def test_joint_plan_lets_a_gradient_be_reduced_behind_the_backward_pass() -> None:
    """The plan of :func:`test_hidden_all_reduce_by_hand`, whose last stage is not the fastest one by itself."""
    planned = plan_jointly(*HIDDEN, JointOptions(Options(batch=2, recompute=False)))
    assert planned.evaluation.step_s == pytest.approx(HIDDEN_S, rel=1e-9)
    assert planned.optimal


#: Instances of each kind.
EXAMPLES = {
    "without limits": 15,
    "limited": 18,
    "unequal workers": 18,
    "two levels": 15,
    "transformers": 8,
    "deep": 6,
    "untied and summa": 8,
}


def test_stages_of_a_worker_share_a_buffer() -> None:
    """The least that any plan does with is one of two groups of stages, whose workers need room for one buffer, not for two."""
    links = ((0.0, 190e9), (4.9152e-06, 2.8e9))
    machine = Machine(2, 2, links, flops=1e10, memory_bandwidth=9.9e11, launch_s=4.17792e-09)
    instance = Instance((64, 32, 64, 8, 64), machine, 1, recompute=True)
    least = BruteForce(instance.job).least_memory()
    planned = plan_jointly(instance.graph, machine.cluster, instance.options(least + 0.3))
    assert planned.evaluation.memory_bytes <= least and planned.evaluation.configuration.schedule.groups == 2


@pytest.mark.parametrize("kind", EXAMPLES)
def test_joint_plan_is_the_best_of_all_configurations(kind: str) -> None:
    """Hundreds of plans, each beside all the configurations that it is the best of."""

    @settings(max_examples=EXAMPLES[kind], phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.randoms(use_true_random=True))
    def check(dice: random.Random) -> None:
        judge(solved(dice, kind))

    check()


@pytest.mark.parametrize("kind", ("limited", "transformers", "unequal workers"))
def test_joint_plan_is_the_best_if_attempts_are_resumed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """First attempts end at once, and later ones count redistributions inside units."""
    monkeypatch.setattr(search, "_ATTEMPTS_S", (0.0, 0.0, 1e9))
    tightened: list[SettingBounds] = []
    tighten = SettingBounds.tighten
    monkeypatch.setattr(SettingBounds, "tighten", lambda bounds: (tightened.append(bounds), tighten(bounds)))
    for seed in range(8):
        judge(solved(random.Random(seed), kind))
    assert tightened


@pytest.mark.parametrize("kind", ("limited", "transformers", "two levels"))
def test_joint_plan_is_the_best_if_regions_of_cuts_are_split(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No integer program finds cuts, so that regions are split as soon as there is an incumbent."""
    found: list[Branched] = []
    explore = CutBranching.explore
    monkeypatch.setattr(cut_covers, "_MAX_STAGES_OF_PROGRAM", 0)
    monkeypatch.setattr(
        CutBranching, "explore", lambda branching, region: found.append(explore(branching, region)) or found[-1]
    )
    for seed in range(8):
        judge(solved(random.Random(seed), kind))
    assert any(len(branched.parts) == 2 for branched in found)
    assert any(branched.cut is not None for branched in found)


@pytest.mark.parametrize("kind", ("transformers", "two levels"))
def test_joint_plan_is_the_best_if_two_methods_search_cuts_in_turns(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method whose turn it is changes after each region, so that both meet cuts that the other one has searched."""
    methods: list[str] = []
    seconds = itertools.count()
    monkeypatch.setattr(cut_covers, "_PROGRAM_S", 0.0)
    monkeypatch.setattr(cut_covers, "process_time", lambda: float(next(seconds)))

    def recorded(method: Callable[..., T], name: str) -> Callable[..., T]:
        return lambda *arguments: (methods.append(name), method(*arguments))[1]

    monkeypatch.setattr(CutProgram, "solve", recorded(CutProgram.solve, "program"))
    monkeypatch.setattr(CutBranching, "explore", recorded(CutBranching.explore, "branching"))
    for seed in range(8):
        judge(solved(random.Random(seed), kind))
    assert {("branching", "program"), ("program", "branching")} <= set(zip(methods, methods[1:]))


@pytest.mark.parametrize("kind", ("limited", "transformers", "two levels"))
def test_joint_plan_is_the_best_if_all_rows_are_coarse(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arcs begin with one row, and an integer program selects the rows of every cut."""
    made: list[object] = []
    coarse = arc_rows.coarse
    monkeypatch.setattr(arc_rows, "_MAX_FINE", 0)
    monkeypatch.setattr(arc_rows, "_GROWTH", 2)
    monkeypatch.setattr(row_search, "_MAX_DEPTH_FIRST", 0)
    monkeypatch.setattr(cut_plans, "coarse", lambda *arguments: (made.append(coarse(*arguments)), made[-1])[1])
    for seed in range(8):
        judge(solved(random.Random(seed), kind))
    assert any(isinstance(arc, arc_rows.CoarseArc) for arc in made)


def test_bounds_hold_if_stages_have_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of all stages counts as the least."""
    rows, num_calls = stage_search.StageSearch.rows, 0

    def without_memory(self: stage_search.StageSearch, *arguments: object) -> stage_search.StageFront | None:
        nonlocal num_calls
        *_, has_memory = arguments
        if has_memory:
            raise TooManyError
        num_calls += 1
        return rows(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(stage_search.StageSearch, "rows", without_memory)
    num_optimal = 0
    for seed, kind in enumerate(("limited", "transformers") * 8):
        case = solved(random.Random(seed), kind)
        if case.best is not None:
            instance = case.instance
            planned = plan_jointly(instance.graph, instance.machine.cluster, instance.options(case.limit_bytes))
            assert planned.lower_bound_s <= case.best.step_s * (1 + 1e-9), instance
            assert planned.evaluation.memory_bytes <= case.limit_bytes, instance
            num_optimal += planned.optimal
    assert num_calls and num_optimal


def test_overlapped_gradients_against_all_configurations() -> None:
    """All-reduces that overlap the backward pass: plans that are called the best are the best, and others tell a bound."""
    for seed, kind in enumerate(("without limits", "two levels", "unequal workers") * 3):
        dice = random.Random(11 * seed)
        instance = replace(random_instance(dice, kind), overlap="gradients")
        best = BruteForce(instance.job).best()
        judge(Solved(instance, UNLIMITED, best, best))


# ---- The brute force ---------------------------------------------------------------------------------------------------

#: Two nodes of two P100, every message of which takes 100 us.
HIDDEN = mlp((256, 64, 256, 64)), load_cluster("piz-daint").resized(2, 2).with_links(100e-6, 10e9)
#: 4 messages and 16 kernels one after the other; the bytes of products, of element-wise operations and of the optimizer step;
#: FLOPs, bytes sent.
HIDDEN_S = 4 * 100e-6 + 16 * 5e-6 + (373504 + 7680 + 458752) / 732e9 + 262144 / (0.8 * 9.3e12) + (512 + 2 * 512) / 10e9


def test_hidden_all_reduce_by_hand() -> None:
    """One micro-batch of 2 rows on two workers of one device of each node: fc1 and fc2 at (1, 2, 1), then fc3 at (2, 1, 1).

    ===============  ========  =======  ====================  ========================  ================
    what             messages  kernels  bytes of products     bytes of relu (mse)       bytes sent
    ===============  ========  =======  ====================  ========================  ================
    fc1 forward      0         2        4 (512 + 8192 + 64)   2 x 256                   0
    fc2 forward      1         2        4 (128 + 8192 + 256)  2 x 1024                  256
    crossing         1         0        0                     0                         512 on each level
    fc3 forward      0         2        4 (256 + 16384 + 64)  2 x 256                   0
    fc3 backward     0         3        twice that            3 x 256                   0
    crossing         1         0        0                     0                         512 on each level
    fc2 backward     1         3        twice that            3 x 1024                  256
    fc1 backward     0         2        that                  3 x 256                   0
    sum              4         14       373504                7680                      512 + 2 x 512
    ===============  ========  =======  ====================  ========================  ================

    Each of the 8 products has 32768 FLOPs.  Then Adam reads and writes 28 bytes (4 of the gradient, 2 x 12 of parameter and states)
    of the 8192 parameters of a device, for fc1 and for fc2: 2 kernels and 458752 bytes.  In all 481.3 us: fc3's all-reduce, 2 x 100
    us and 65536 bytes, 206.6 us, and its optimizer step, 5.6 us, are over before the 225 us that crossing and stage 0 take after
    its backward pass.
    """
    graph, cluster = HIDDEN
    found = BruteForce(Job(graph, cluster, 2, recompute=False, precision="float32")).best()
    assert found is not None
    assert found.step_s == pytest.approx(HIDDEN_S, rel=1e-9) and round(HIDDEN_S * 1e6) == 481
    assert [one.shape for one in found.rectangles] == [(2, 1), (2, 1)]
    assert [one.stop - one.first for one in found.stages] == [2, 1]


@given(st.randoms(use_true_random=True))
def test_programs_take_as_long_as_simulated(dice: random.Random) -> None:
    depth, count, num = dice.randint(2, 4), dice.randint(1, 9), 3
    family = dice.choice(list(families(depth, count, equal=True)))
    replicated = tuple(dice.random() < 0.5 for _ in range(depth))
    stages = range(depth * family.groups)
    again = [dice.random() < 0.5 for _ in stages]
    draw = np.random.default_rng(dice.getrandbits(32)).exponential
    seconds = draw(dice.choice((0.1, 1, 10)), (7, len(stages), num))
    forward, whole, part, update, all_reduce, there, back = seconds
    part = np.minimum(whole, part)
    recompute = forward * np.array(again)[:, None]
    steps = program_of(family, depth, count, replicated).makespans(
        TaskTimes(forward, whole, part, recompute, all_reduce, update, there, back)
    )
    schedule = family.schedule(depth, count, [1 + wide for wide in replicated], any(again))
    workers = tuple(
        tuple(task for task in tasks if task.kind is not Kind.RECOMPUTE or again[task.stage])
        for tasks in schedule.workers
    )
    # One task reduces and updates a stage: the all-reduce, if it has one (:func:`autoddl.pipelines.joint.evaluation.times_of`).
    reduced = {task.stage for tasks in workers for task in tasks if task.kind is Kind.ALL_REDUCE}
    is_reduced = np.array([[stage in reduced] for stage in stages])
    both = all_reduce + update
    all_reduce, update = np.where(is_reduced, both, 0.0), np.where(is_reduced, 0.0, both)
    for one in range(num):
        times = Times.of(
            len(stages),
            forward=forward[:, one].tolist(),
            backward=whole[:, one].tolist(),
            backward_input=part[:, one].tolist(),
            recompute=recompute[:, one].tolist(),
            all_reduce=all_reduce[:, one].tolist(),
            update=update[:, one].tolist(),
            transfer=there[:-1, one].tolist(),
            transfer_backward=back[:-1, one].tolist(),
        )
        makespan = simulate(replace(schedule, workers=workers), times).makespan
        assert steps[one] == pytest.approx(makespan, rel=1e-12), (family, depth, count, replicated, again)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_random_configurations_cost_what_is_evaluated(kind: str) -> None:
    """Any strategies, not only the best ones (of transformers those that no others dominate)."""

    @settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
    @given(st.randoms(use_true_random=True))
    def check(dice: random.Random) -> None:
        instance = random_instance(dice, kind)
        brute = BruteForce(instance.job, filtered=isinstance(instance.model, Gpt))
        pipelines = [one for one in brute.settings() if one[1] is not None]
        for rectangles, family, size in dice.sample(pipelines, min(5, len(pipelines))):
            program = brute.program(rectangles, family, size)
            batches = list(brute.batches(rectangles, family, program, size, UNLIMITED))
            if not batches:
                continue
            batch = dice.choice(batches)
            batch = batch.only(np.array([dice.randrange(len(batch.taken[0]))]))
            (step,) = program.makespans(brute.times(rectangles, family, program, batch))
            found = brute.found(rectangles, family, program, size, batch, 0, step)
            known = evaluated(instance.job, found)
            assert known.step_s == pytest.approx(found.step_s, rel=1e-9), f"{instance}: {found}"
            assert known.memory_bytes == pytest.approx(found.memory_bytes, rel=1e-9), f"{instance}: {found}"

    check()


@given(st.randoms(use_true_random=True))
def test_without_a_pipeline_it_is_the_planner_of_one_stage(dice: random.Random) -> None:
    instance = random_instance(dice, dice.choice(list(EXAMPLES)))
    brute = BruteForce(instance.job)
    free = brute.best(pipelines=False)
    for limit in (UNLIMITED,) if free is None else (UNLIMITED, math.floor(0.7 * free.memory_bytes) + 0.3):
        best = brute.best(limit, pipelines=False)
        options = instance.options(limit).base
        if best is None:
            with pytest.raises(UserError):
                make_plan(instance.graph, instance.machine.cluster, options, with_baselines=False)
        else:
            planned = make_plan(instance.graph, instance.machine.cluster, options, with_baselines=False)
            assert planned.assessment.step_s == pytest.approx(best.step_s, rel=1e-9), (
                f"{instance}, limit {limit}: {best}"
            )


@settings(max_examples=25, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(st.randoms(use_true_random=True))
def test_dominated_ways_are_never_better(dice: random.Random) -> None:
    """The filter leaves out nothing: without it, the same best steps and least memory."""
    instance = random_instance(dice, dice.choice(("limited", "untied and summa")))
    widths = (32, 64, 32) if isinstance(instance.model, Gpt) else instance.model[:4]
    instance = replace(instance, model=widths, batch=min(2, instance.batch), micro_batch=None)
    filtered, whole = (BruteForce(instance.job, filtered) for filtered in (True, False))
    free = filtered.best()
    if free is None:
        assert whole.best() is None
        return
    least = filtered.least_memory()
    assert least == pytest.approx(whole.least_memory(), rel=1e-9)
    for limit in (math.inf, free.demand_bytes - 1, (least + free.demand_bytes) / 2, least + 1):
        best, known = filtered.best(limit), whole.best(limit)
        assert (best is None) == (known is None)
        if best is not None and known is not None:
            assert best.step_s == pytest.approx(known.step_s, rel=1e-9), f"{instance}, limit {limit}: {known}"
