"""Activations, weight versions and copies, and communication, against the tables of Chimera and WPipe."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.pipelines.communication import boundary_crossings
from autoddl.pipelines.generators import generate
from autoddl.pipelines.memory import (
    activations_alive,
    peak_activations,
    peak_stashed_inputs,
    peak_weight_copies,
    peak_weight_versions,
    version_lifetimes,
    weight_versions,
)
from autoddl.pipelines.schedule import Kind

from ..communicated import communication_bytes


def test_chimeras_peaks():
    """D = 8, f = 1, worker 0..7."""
    assert peak_activations(generate("chimera", num_stages=8, num_micro_batches=8)) == (5, 6, 7, 8, 8, 7, 6, 5)


@pytest.mark.parametrize("num_stages", [4, 8, 12, 16])
def test_ranges_of_chimeras_table(num_stages):
    """Chimera, 2f pipelines: [(D - D/2f + 1) M_a, D M_a] and 2f M_theta, at N = D; and no more at N > D."""
    d = num_stages
    for f in (f for f in range(1, d // 2) if d // 2 % f == 0):
        for units in (1, 3):
            schedule = generate("chimera", num_stages=d, num_micro_batches=units * d, num_pipelines=2 * f)
            peaks = peak_activations(schedule)
            assert (min(peaks), max(peaks)) == (d - d // (2 * f) + 1, d)
            assert peak_weight_copies(schedule) == (2 * f,) * d
            assert peak_weight_versions(schedule) == (1,) * d


def test_doubling_doubles_activations_and_halving_does_not():
    plain = max(peak_activations(generate("chimera", num_stages=8, num_micro_batches=32)))
    doubled = generate("chimera", num_stages=8, num_micro_batches=32, concatenation="doubling")
    halved = generate("chimera", num_stages=8, num_micro_batches=32, concatenation="halving")
    assert plain == 8
    assert max(peak_activations(doubled)) == 16
    assert max(peak_activations(halved)) == 8


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("extra", [0, 3])
def test_the_other_rows_of_chimeras_table(num_stages, extra):
    d, n = num_stages, num_stages + extra
    falling = tuple(range(d, 0, -1))
    rows = {
        # name: activations, weight versions, weight copies
        "gpipe": ((n,) * d, (1,) * d, (1,) * d),
        "1f1b": (falling, (1,) * d, (1,) * d),
        "gems": ((1,) * d, (1,) * d, (2,) * d),
        "pipedream": (falling, falling, falling),
        "pipedream-2bw": (falling, (2,) * d, (2,) * d),
    }
    for name, expected in rows.items():
        schedule = generate(name, num_stages=d, num_micro_batches=n)
        found = (peak_activations(schedule), peak_weight_versions(schedule), peak_weight_copies(schedule))
        assert found == expected, name


def test_early_backwards_peak_is_independent_of_the_micro_batches():
    """DAPPLE: K_i micro-batches, whatever M is, where GPipe's peak is M."""
    for num_micro_batches in (4, 8, 16, 64):
        schedule = generate("1f1b", num_stages=4, num_micro_batches=num_micro_batches)
        assert peak_activations(schedule) == (4, 3, 2, 1)
        assert (
            peak_activations(generate("gpipe", num_stages=4, num_micro_batches=num_micro_batches))
            == (num_micro_batches,) * 4
        )
    bounded = generate("1f1b", num_stages=4, num_micro_batches=16, policy="B", max_in_flight=3)
    assert peak_activations(bounded) == (3, 3, 3, 1)


# WPipe's Table 1, in units of the whole model's weights S_m and activations S_a of one micro-batch.


def activations_of_the_model(schedule) -> Fraction:
    share = Fraction(1, schedule.num_stages)
    return sum((Fraction(peak) * share for peak in peak_activations(schedule)), Fraction(0))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 12, 20])
def test_activations_of_wpipes_table(n, m):
    """The printed formulas hold at M = N. For M > N they count M - i micro-batches in flight on worker i, where the
    schedules (as given: M + N - 1 - s warm-up forwards, 1F1B's N - s) need only N - i."""
    gpipe = generate("gpipe", num_stages=n, num_micro_batches=m)
    assert activations_of_the_model(gpipe) == m
    for name in ("pipedream", "pipedream-2bw"):
        found = activations_of_the_model(generate(name, num_stages=n, num_micro_batches=m))
        assert found == Fraction(n + 1, 2)
        assert (found == Fraction(2 * m - n + 1, 2)) == (m == n)
    wpipe = activations_of_the_model(generate("wpipe", num_stages=n, num_micro_batches=m))
    assert wpipe == Fraction(2 * m + n + 1, 4)
    assert (wpipe == Fraction(4 * m - n + 1, 4)) == (m == n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_wpipes_activations_per_worker_and_group(n):
    """In flight on worker i at M = N when its first backward begins: M of G0 and M - i of G1, and never more in sum."""
    m = n
    schedule = generate("wpipe", num_stages=n, num_micro_batches=m)
    per_group = [[float(stage // n == group) for stage in range(2 * n)] for group in (0, 1)]
    for worker, tasks in enumerate(schedule.workers):
        first_backward = next(index for index, task in enumerate(tasks) if task.kind is Kind.BACKWARD)
        found = [activations_alive(schedule, counted)[worker][first_backward] for counted in per_group]
        assert found == [m, m - worker]
    assert peak_activations(schedule) == tuple(2 * m - i for i in range(n))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("m", [8, 11])
def test_activations_of_wpipes_table_with_recomputation(n, m):
    """S_a for GPipe and 2BW, half of it for WPipe: one micro-batch at a time on every worker; inputs are kept instead."""
    for name, expected in (("gpipe", 1), ("pipedream-2bw", 1), ("wpipe", Fraction(1, 2))):
        plain = generate(name, num_stages=n, num_micro_batches=m)
        schedule = generate(name, num_stages=n, num_micro_batches=m, recompute=True)
        assert activations_of_the_model(schedule) == expected
        assert peak_stashed_inputs(schedule) == peak_activations(plain)
        assert peak_stashed_inputs(plain) == (0,) * n


@pytest.mark.parametrize("n", [2, 4, 8])
def test_weight_buffers_of_wpipes_table(n):
    """GPipe 0, PipeDream (N + 1)/2 S_m, 2BW 2 S_m, WPipe S_m. PipeDream's counts every version of every stage, the
    others the versions of the stages that need more than one."""

    def buffers(name, least):
        schedule = generate(name, num_stages=n, num_micro_batches=n)
        share = Fraction(1, schedule.num_stages)
        return sum((count * share for count in weight_versions(schedule).values() if count >= least), Fraction(0))

    assert buffers("gpipe", 2) == 0
    assert buffers("pipedream", 1) == Fraction(n + 1, 2)
    assert buffers("pipedream-2bw", 2) == 2
    assert buffers("wpipe", 2) == 1


@pytest.mark.parametrize("n", [2, 4, 8])
def test_communication_of_wpipes_digest(n):
    """Per micro-batch 2 (2N - 1) C_a for WPipe, 2 (N - 1) C_a for 2BW and GPipe; g groups cross g N - 1 boundaries."""
    for name, crossings in (
        ("wpipe", 2 * (2 * n - 1)),
        ("pipedream-2bw", 2 * (n - 1)),
        ("gpipe", 2 * (n - 1)),
        ("grouped-gpipe", 2 * (2 * n - 1)),
        ("chimera", 2 * (n - 1)),
    ):
        schedule = generate(name, num_stages=n, num_micro_batches=n)
        found = sum(map(sum, boundary_crossings(schedule)))
        assert found == crossings * schedule.num_micro_batches


def test_bytes():
    """Chimera D = 4, N = 4, W = 3: each of the 3 boundaries 4 times each way; 6 replicas per stage, 2 (6 - 1) copies."""
    schedule = generate("chimera", num_stages=4, num_micro_batches=4, width=3)
    between, reduced = communication_bytes(schedule, [10.0, 20.0, 30.0], [1.0, 2.0, 3.0, 4.0])
    assert between == 2 * 4 * (10 + 20 + 30)
    assert reduced == 10 * (1 + 2 + 3 + 4)


def test_halves_and_pairs_cross_as_much():
    for concatenation in ("direct", "doubling", "halving"):
        schedule = generate("chimera", num_stages=4, num_micro_batches=12, concatenation=concatenation)
        assert boundary_crossings(schedule) == ((12.0, 12.0),) * 3


def test_stages_of_one_worker_exchange_nothing():
    schedule = generate("wpipe", num_stages=1, num_micro_batches=2)
    assert boundary_crossings(schedule) == ((0.0, 0.0),)


# Laws.

schedules = st.builds(
    lambda name, d, k, recompute: generate(name, num_stages=d, num_micro_batches=d * k, recompute=recompute),
    st.sampled_from(["gpipe", "1f1b", "gems", "chimera", "wpipe", "pipedream", "interleaved-1f1b", "zero-bubble"]),
    st.sampled_from([2, 4]),
    st.integers(1, 3),
    st.booleans(),
)


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_every_use_of_a_version_lies_in_its_lifetime(schedule):
    lifetimes = {(life.pipeline, life.stage, life.version): life for life in version_lifetimes(schedule)}
    for _, index, task in schedule.tasks():
        if task.kind.is_compute:
            life = lifetimes[task.pipeline, task.stage, schedule.version_of(task)]
            assert life.made_at < index <= life.last_needed_at
        elif task.kind is Kind.UPDATE:
            old = lifetimes[task.pipeline, task.stage, task.micro_batch]
            new = lifetimes[task.pipeline, task.stage, task.micro_batch + 1]
            assert old.last_needed_at >= index == new.made_at
    # And none is kept longer than its last reader.
    for (pipeline, stage, version), life in lifetimes.items():
        tasks = schedule.workers[life.worker]
        if version == schedule.num_updates:
            assert life.last_needed_at == len(tasks)
            continue
        last = tasks[life.last_needed_at]
        assert (last.pipeline, last.stage, schedule.version_of(last)) == (pipeline, stage, version)


@settings(max_examples=40, deadline=None)
@given(schedules)
def test_peaks_are_those_of_counting_along_the_list(schedule):
    """A plain count, task by task, of the schedules without recomputation; 1 with it, where no weight part waits."""
    kinds = {task.kind for _, _, task in schedule.tasks()}
    if Kind.RECOMPUTE in kinds:
        if Kind.BACKWARD_WEIGHT in kinds:
            return
        assert set(peak_activations(schedule)) == {1}
        return
    peaks = []
    for tasks in schedule.workers:
        alive = most = 0.0
        for task in tasks:
            if task.kind is Kind.FORWARD:
                alive += task.part.size
                most = max(most, alive)
            elif task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                alive -= task.part.size
        assert alive == 0
        peaks.append(most)
    assert list(peak_activations(schedule)) == peaks
