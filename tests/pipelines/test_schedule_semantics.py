"""The data in a schedule are enough to train with: an interpreter that knows no scheme against each scheme's own
equations.

Stage s computes y = tanh(w_s x) on a micro-batch of two samples; the loss is the sum of y^2 / 2 of the last stage.
Which weights to use, whom to average gradients with, where activations go and when to update all come from the
Schedule.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoddl.pipelines.generators import generate
from autoddl.pipelines.memory import version_lifetimes, weight_versions
from autoddl.pipelines.schedule import Kind, Part, Schedule, Task
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times

LEARNING_RATE = 0.3
SAMPLES = 2


def data(num_micro_batches: int) -> np.ndarray:
    """Shape (micro-batches, samples)."""
    return np.random.default_rng(7).normal(size=(num_micro_batches, SAMPLES))


def initial(num_stages: int) -> np.ndarray:
    return np.random.default_rng(11).uniform(0.5, 1.5, size=num_stages)


def gradients(weights: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """The gradient of the summed loss of some samples with respect to all stages' weights, written independently."""
    inputs = []
    x = samples
    for w in weights:
        inputs.append(x)
        x = np.tanh(w * x)
    upstream = x
    result = np.zeros(len(weights))
    for s in reversed(range(len(weights))):
        through = upstream * (1 - np.tanh(weights[s] * inputs[s]) ** 2)
        result[s] = (through * inputs[s]).sum()
        upstream = through * weights[s]
    return result


def _slice(task: Task) -> range:
    """The global sample numbers that a task works on."""
    first = task.micro_batch * SAMPLES
    spans = {Part.WHOLE: (0, 2), Part.FIRST_HALF: (0, 1), Part.SECOND_HALF: (1, 2), Part.PAIR: (0, 4)}
    begin, end = spans[task.part]
    return range(first + begin, first + end)


def run(schedule: Schedule) -> np.ndarray:
    """Train through the whole schedule; the final weights, shape (stages,). Checks that all replicas agree.

    Versions are dropped where :func:`version_lifetimes` says so: one that is still needed would be a KeyError.
    """
    num_stages = schedule.num_stages
    samples = data(schedule.num_micro_batches).ravel().tolist()
    start = initial(num_stages).tolist()
    versions = {
        (pipeline, stage, 0): start[stage] for pipeline in range(schedule.num_pipelines) for stage in range(num_stages)
    }
    drop_after: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for life in version_lifetimes(schedule):
        drop_after.setdefault((life.worker, life.last_needed_at), []).append((life.pipeline, life.stage, life.version))
    wires: dict[tuple[str, int, int, int], float] = {}
    stash: dict[tuple[int, int, int], float] = {}
    pending: dict[tuple[int, int, int], float] = {}
    sums: dict[tuple[int, int, int], float] = {}
    launched: dict[tuple[int, int], list[float]] = {}

    for worker, index, task in _in_time_order(schedule):
        key = (task.pipeline, task.stage)
        if task.kind is Kind.ALL_REDUCE:
            launched.setdefault((task.stage, task.micro_batch), []).append(sums.get((*key, task.micro_batch), 0.0))
        elif task.kind is Kind.UPDATE:
            update = task.micro_batch
            reduced = launched.get((task.stage, update))
            total = sums[(*key, update)] if reduced is None else sum(reduced)
            assert reduced is None or len(reduced) == schedule.num_pipelines
            mean = total / (len(schedule.micro_batches_of(update)) * SAMPLES)
            versions[(*key, update + 1)] = versions[(*key, update)] - LEARNING_RATE * mean
        else:
            weight = versions[(*key, schedule.version_of(task))]
            for sample in _slice(task):
                _compute(task, schedule, weight, sample, samples, wires, stash, pending, sums)
        for gone in drop_after.get((worker, index), ()):
            del versions[gone]
    assert not wires and not pending, "something was sent that nobody took"
    final = [
        {versions[(pipeline, stage, schedule.num_updates)] for pipeline in range(schedule.num_pipelines)}
        for stage in range(num_stages)
    ]
    assert all(len(values) == 1 for values in final), "replicas differ"
    return np.array([values.pop() for values in final])


def _compute(task, schedule, weight, sample, samples, wires, stash, pending, sums) -> None:
    p, s = task.pipeline, task.stage
    last = schedule.num_stages - 1
    if task.kind is Kind.FORWARD:
        x = samples[sample] if s == 0 else wires.pop(("forward", p, s, sample))
        stash[p, s, sample] = x
        if s < last:
            wires["forward", p, s + 1, sample] = math.tanh(weight * x)
    elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
        x = stash[p, s, sample]
        y = math.tanh(weight * x)
        upstream = y if s == last else wires.pop(("backward", p, s, sample))
        through = upstream * (1 - y**2)
        if s > 0:
            wires["backward", p, s - 1, sample] = through * weight
        pending[p, s, sample] = through * x
    if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
        update = schedule.update_of(task.micro_batch)
        sums[p, s, update] = sums.get((p, s, update), 0.0) + pending.pop((p, s, sample))


def _in_time_order(schedule: Schedule) -> list[tuple[int, int, Task]]:
    """All tasks by when they start; all-reduces take time, so that an update comes after all members' launches."""
    times = Times.of(schedule.num_stages, forward=1, backward=2.5, transfer=0.3, all_reduce=1, update=0.1)
    timeline = simulate(schedule, times)
    entries = [(timeline.starts[worker][index], worker, index, task) for worker, index, task in schedule.tasks()]
    return [(worker, index, task) for _, worker, index, task in sorted(entries, key=lambda entry: entry[:3])]


def sgd(num_stages: int, num_micro_batches: int, period: int, version_at) -> np.ndarray:
    """w_s(t+1) = w_s(t) - lr * mean gradient of period t, each micro-batch m at the weights [w_s(version_at(m, s)) for s]."""
    samples = data(num_micro_batches)
    history = [initial(num_stages)]
    for t in range(num_micro_batches // period):
        total = np.zeros(num_stages)
        for m in range(t * period, (t + 1) * period):
            weights = np.array([history[version_at(m, s)][s] for s in range(num_stages)])
            total += gradients(weights, samples[m])
        history.append(history[-1] - LEARNING_RATE * total / (period * samples.shape[1]))
    return history[-1]


SYNCHRONOUS = [
    ("gpipe", {}),
    ("grouped-gpipe", {"groups": 3}),
    ("1f1b", {"policy": "A"}),
    ("1f1b", {"policy": "B"}),
    ("1f1b", {"warm_up": (4, 4, 2, 1)}),
    ("gems", {}),
    ("chimera", {}),
    ("chimera", {"num_pipelines": 4}),
    ("chimera", {"concatenation": "doubling"}),
    ("chimera", {"concatenation": "halving"}),
    ("interleaved-1f1b", {"groups": 2}),
    ("zero-bubble", {"policy": "H1"}),
    ("zero-bubble", {"policy": "H2"}),
]


@pytest.mark.parametrize(("name", "options"), SYNCHRONOUS, ids=lambda value: str(value))
@pytest.mark.parametrize("num_micro_batches", [4, 12])
@pytest.mark.parametrize(("all_reduce", "recompute"), [("none", False), ("eager", True), ("eager-sync-opt", False)])
def test_synchronous_schedules_are_sgd(name, options, num_micro_batches, recompute, all_reduce):
    schedule = generate(
        name,
        num_stages=4,
        num_micro_batches=num_micro_batches,
        iterations=3,
        recompute=recompute,
        all_reduce=all_reduce,
        **options,
    )
    period = num_micro_batches
    expected = sgd(schedule.num_stages, 3 * period, period, lambda m, s: m // period)
    np.testing.assert_allclose(run(schedule), expected, rtol=1e-12)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 7, 11])
@pytest.mark.parametrize("concatenation", ["direct", "doubling", "halving"])
def test_chimera_with_any_number_of_micro_batches_is_sgd(num_micro_batches, concatenation):
    schedule = generate(
        "chimera", num_stages=4, num_micro_batches=num_micro_batches, iterations=2, concatenation=concatenation
    )
    expected = sgd(4, 2 * num_micro_batches, num_micro_batches, lambda m, s: m // num_micro_batches)
    np.testing.assert_allclose(run(schedule), expected, rtol=1e-12)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 5])
@pytest.mark.parametrize("recompute", [False, True])
def test_pipedream_stashes_what_its_forward_found(num_stages, recompute):
    """Micro-batch m at stage s uses the updates of all but the D - 1 - s micro-batches before it."""
    schedule = generate("pipedream", num_stages=num_stages, num_micro_batches=3, iterations=4, recompute=recompute)
    expected = sgd(num_stages, 12, 1, lambda m, s: max(0, m - (num_stages - 1 - s)))
    np.testing.assert_allclose(run(schedule), expected, rtol=1e-12)


def test_pipedream_uses_the_newest_weights_there_are():
    """The version that the data name is the number of updates that the list has before the forward."""
    schedule = generate("pipedream", num_stages=6, num_micro_batches=20, iterations=1)
    for tasks in schedule.workers:
        updates = 0
        for task in tasks:
            updates += task.kind is Kind.UPDATE
            if task.kind is Kind.FORWARD:
                assert schedule.version_of(task) == updates


@pytest.mark.parametrize("num_micro_batches", [4, 5, 8])
@pytest.mark.parametrize("width", [1, 2])
def test_pipedream_2bw_is_sgd_with_a_delay_of_one(num_micro_batches, width):
    schedule = generate("pipedream-2bw", num_stages=4, num_micro_batches=num_micro_batches, iterations=5, width=width)
    period = num_micro_batches
    expected = sgd(4, 5 * period, period, lambda m, s: max(0, m // period - 1))
    np.testing.assert_allclose(run(schedule), expected, rtol=1e-12)
    assert set(weight_versions(schedule).values()) == {2}


@pytest.mark.parametrize(("num_workers", "num_micro_batches"), [(1, 1), (2, 2), (2, 5), (3, 3), (4, 6)])
@pytest.mark.parametrize("recompute", [False, True])
def test_wpipe_follows_its_equation_for_both_groups(num_workers, num_micro_batches, recompute):
    """w_Gi(t+1) = w_Gi(t) - lr grad f(w_Gi(t - 1 + i)), with every period's gradient applied at the end."""
    schedule = generate(
        "wpipe", num_stages=num_workers, num_micro_batches=num_micro_batches, iterations=5, recompute=recompute
    )

    def version_at(m: int, s: int) -> int:
        group = s // num_workers
        return max(0, m // num_micro_batches - 1 + group)

    expected = sgd(2 * num_workers, 5 * num_micro_batches, num_micro_batches, version_at)
    np.testing.assert_allclose(run(schedule), expected, rtol=1e-12)
    versions = weight_versions(schedule)
    assert [versions[0, s] for s in range(2 * num_workers)] == [2] * num_workers + [1] * num_workers


def test_schemes_differ_in_what_they_train():
    """The comparison above could not tell them apart if the weights hardly moved."""
    plain = sgd(4, 20, 4, lambda m, s: m // 4)
    delayed = sgd(4, 20, 4, lambda m, s: max(0, m // 4 - 1))
    assert np.abs(plain - delayed).max() > 1e-3
