"""What the generators produce: phases counted as the papers count them, the tables' closed forms, and what they refuse."""

from __future__ import annotations

from fractions import Fraction

import pytest

from autoddl.pipelines.critical import critical_path
from autoddl.pipelines.generators import GeneratorError, families, generate
from autoddl.pipelines.generators.chimera import phases
from autoddl.pipelines.generators.one_f_one_b import warm_ups
from autoddl.pipelines.schedule import Kind
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.times import Times
from autoddl.pipelines.validate import validate


def makespan(schedule, forward=1, backward=1):
    return simulate(schedule, Times.of(schedule.num_stages, forward=forward, backward=backward)).makespan


def bubble_ratio(schedule, forward, backward):
    """Exactly, for whole-number times."""
    timeline = simulate(schedule, Times.of(schedule.num_stages, forward=forward, backward=backward))
    total = Fraction(int(timeline.makespan)) * schedule.num_workers
    return 1 - Fraction(int(sum(timeline.busy))) / total


def test_every_family_is_listed_with_one_line():
    names = [family.name for family in families()]
    assert names == sorted(set(names), key=names.index)
    assert {"gpipe", "grouped-gpipe", "1f1b", "gems", "pipedream", "pipedream-2bw", "chimera", "wpipe"} < set(names)
    for family in families():
        assert family.summary and "\n" not in family.summary


@pytest.mark.parametrize("num_stages", range(2, 33, 2))
def test_chimeras_five_phases(num_stages):
    """f = 1, N = D: the phases of every worker, written out with their counts, are its list."""
    schedule = generate("chimera", num_stages=num_stages, num_micro_batches=num_stages)
    for worker, tasks in enumerate(schedule.workers):
        a, b = phases(num_stages, worker)
        near, far = (0, 1) if worker < num_stages // 2 else (1, 0)
        expected = (
            [(Kind.FORWARD, near)] * a
            + [(Kind.FORWARD, far), (Kind.FORWARD, near)] * b
            + [(Kind.FORWARD, far), (Kind.BACKWARD, far)] * a
            + [(Kind.BACKWARD, near), (Kind.BACKWARD, far)] * b
            + [(Kind.BACKWARD, near)] * a
        )
        assert a + b == num_stages // 2
        assert [(task.kind, task.pipeline) for task in tasks if task.kind.is_compute] == expected
        for pipeline in (0, 1):
            for kind in (Kind.FORWARD, Kind.BACKWARD):
                order = [task.micro_batch for task in tasks if task.kind is kind and task.pipeline == pipeline]
                assert order == sorted(order) and len(order) == num_stages // 2


def test_chimeras_placements():
    """Down pipeline i has stage s on (s + i D/f) mod D, the up pipelines are the exact reverse of the down ones."""
    schedule = generate("chimera", num_stages=8, num_micro_batches=8, num_pipelines=4)
    assert schedule.placement == (
        (0, 1, 2, 3, 4, 5, 6, 7),
        (7, 6, 5, 4, 3, 2, 1, 0),
        (4, 5, 6, 7, 0, 1, 2, 3),
        (3, 2, 1, 0, 7, 6, 5, 4),
    )


def test_chimera_of_half_as_many_pairs_as_stages_is_data_parallelism():
    """f = D/2: every worker has every stage and, at N = D, one micro-batch from end to end; no bubble."""
    schedule = generate("chimera", num_stages=8, num_micro_batches=8, num_pipelines=8)
    assert all(len(schedule.stages_on(worker)) == 8 for worker in range(8))
    assert makespan(schedule, 1, 2) == 8 * 3


@pytest.mark.parametrize(("num_micro_batches", "expected"), [(1, [1, 0]), (2, [1, 1]), (3, [2, 1]), (7, [4, 3])])
def test_chimera_splits_few_micro_batches_evenly(num_micro_batches, expected):
    schedule = generate("chimera", num_stages=8, num_micro_batches=num_micro_batches)
    first = [task for _, _, task in schedule.tasks() if task.kind is Kind.FORWARD and task.stage == 0]
    assert [sum(task.pipeline == pipeline for task in first) for pipeline in (0, 1)] == expected


@pytest.mark.parametrize("num_stages", [4, 6, 8, 12])
@pytest.mark.parametrize("backward", [1, 2])
def test_chimeras_critical_path(num_stages, backward):
    """D forwards and 2 D - 2 backwards at N = D (6 and 10 for D = 6)."""
    schedule = generate("chimera", num_stages=num_stages, num_micro_batches=num_stages)
    path = critical_path(simulate(schedule, Times.of(num_stages, forward=1, backward=backward)))
    assert (path.forward, path.backward) == (num_stages, 2 * num_stages - 2)
    assert sum(task.kind is Kind.FORWARD for task in path.tasks) == path.forward


def test_chimeras_critical_path_has_half_as_many_micro_batches_on_it():
    """Even N <= D: D forwards and D + N - 2 backwards."""
    for num_stages in (4, 8, 10):
        for num_micro_batches in range(2, num_stages + 1, 2):
            schedule = generate("chimera", num_stages=num_stages, num_micro_batches=num_micro_batches)
            path = critical_path(simulate(schedule, Times.of(num_stages, forward=1, backward=2)))
            assert (path.forward, path.backward) == (num_stages, num_stages + num_micro_batches - 2)


# Bubble ratios of Chimera's table. Ratios are exact fractions.


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (2, 1), (2, 7)])
def test_bubble_ratio_of_gpipe_and_1f1b(name, forward, backward):
    for num_stages in (1, 2, 5, 8):
        for num_micro_batches in (1, 3, 8, 20):
            schedule = generate(name, num_stages=num_stages, num_micro_batches=num_micro_batches)
            expected = Fraction(num_stages - 1, num_micro_batches + num_stages - 1)
            assert bubble_ratio(schedule, forward, backward) == expected


@pytest.mark.parametrize("num_stages", [4, 8, 12, 16])
def test_bubble_ratio_of_chimera(num_stages):
    """(D - 2f)/(2 f N + D - 2f) is printed; it holds at N = D for F = Bk. For Bk = 2F it is (D - 2)/(3N/2 + D - 2) at f = 1."""
    n = num_stages
    for f in (f for f in range(1, num_stages // 2 + 1) if num_stages // 2 % f == 0):
        schedule = generate("chimera", num_stages=n, num_micro_batches=n, num_pipelines=2 * f)
        printed = Fraction(n - 2 * f, 2 * f * n + n - 2 * f)
        assert bubble_ratio(schedule, 1, 1) == printed
        right = Fraction(2 * (n - 2 * f), 3 * f * n + 2 * (n - 2 * f))
        assert bubble_ratio(schedule, 1, 2) == right
        assert n == 2 * f or right != printed
    assert bubble_ratio(generate("chimera", num_stages=n, num_micro_batches=n), 1, 2) == Fraction(
        n - 2, 3 * n // 2 + n - 2
    )


def test_chimeras_printed_bubble_ratio_does_not_hold_for_few_micro_batches():
    """N < D: makespan D F + (D + N - 2) Bk, so at F = Bk the ratio is (2 D - N - 2)/(2 D + N - 2), not (D - 2)/(2 N + D - 2)."""
    schedule = generate("chimera", num_stages=8, num_micro_batches=4)
    found = bubble_ratio(schedule, 1, 1)
    assert found == Fraction(2 * 8 - 4 - 2, 2 * 8 + 4 - 2)
    assert found != Fraction(8 - 2, 2 * 4 + 8 - 2)


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5, 40])
def test_gems(num_stages, num_micro_batches):
    """At most one micro-batch's activations per worker; D F + N D B + (N - 1) F."""
    schedule = generate("gems", num_stages=num_stages, num_micro_batches=num_micro_batches)
    d, n = num_stages, num_micro_batches
    for forward, backward in ((1, 1), (1, 2), (2, 5)):
        expected = d * forward + n * d * backward + (n - 1) * forward
        assert makespan(schedule, forward, backward) == expected
    # Each further micro-batch adds D B + F for B + F of work: the printed ratio, at B = 2 F.
    more = generate("gems", num_stages=num_stages, num_micro_batches=num_micro_batches + 1)
    added = Fraction(int(makespan(more, 1, 2) - makespan(schedule, 1, 2)))
    assert 1 - 3 / added == (Fraction(d) - 1) / (Fraction(d) + Fraction(1, 2))


@pytest.mark.parametrize("num_stages", [2, 4, 6, 8, 12])
@pytest.mark.parametrize("num_units", range(1, 6))
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (1, 3), (2, 1)])
def test_direct_concatenation(num_stages, num_units, forward, backward):
    """N (F + Bk) + (D/f - 2) max(F, Bk) + (K - 1)(D/f - 2) |Bk - F| for N = K D."""
    n = num_units * num_stages
    for f in (f for f in range(1, num_stages // 2 + 1) if num_stages // 2 % f == 0):
        idle = num_stages // f - 2
        schedule = generate("chimera", num_stages=num_stages, num_micro_batches=n, num_pipelines=2 * f)
        expected = n * (forward + backward) + idle * max(forward, backward)
        expected += (num_units - 1) * idle * abs(backward - forward)
        assert makespan(schedule, forward, backward) == expected


@pytest.mark.parametrize(("num_stages", "loses_from"), [(4, 4), (6, 3), (8, 3), (16, 3)])
def test_direct_concatenation_loses_to_1f1b_in_the_long_run(num_stages, loses_from):
    """Bk = 2F: (D - 2)(K + 1) idle slots against 1F1B's 3 (D - 1), so from K = 4 on for every D, and from 3 on for D >= 6."""
    for num_units in range(1, 7):
        n = num_units * num_stages
        chimera = makespan(generate("chimera", num_stages=num_stages, num_micro_batches=n), 1, 2)
        straight = makespan(generate("1f1b", num_stages=num_stages, num_micro_batches=n), 1, 2)
        assert (chimera > straight) == (num_units >= loses_from)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 12])
@pytest.mark.parametrize("num_units", range(1, 6))
def test_doubling_and_halving_have_one_units_bubbles_at_twice_the_forward(num_stages, num_units):
    """Bk = 2F: N (F + Bk) and the idle slots of one unit, of a forward's (halving) or two (doubling, even K) each."""
    n = num_units * num_stages
    for f in (f for f in range(1, num_stages // 2 + 1) if num_stages // 2 % f == 0):
        options = dict(num_stages=num_stages, num_micro_batches=n, num_pipelines=2 * f)
        idle = num_stages // f - 2
        assert makespan(generate("chimera", concatenation="halving", **options), 1, 2) == 3 * n + idle
        if num_units % 2 == 0:
            assert makespan(generate("chimera", concatenation="doubling", **options), 1, 2) == 3 * n + 2 * idle


def test_odd_numbers_of_units_are_doubled_as_far_as_they_go():
    """K = 3: one doubled unit of 2 D micro-batches, then D plain ones."""
    schedule = generate("chimera", num_stages=4, num_micro_batches=12, concatenation="doubling")
    forwards = [
        str(task) for tasks in schedule.workers for task in tasks if task.kind is Kind.FORWARD and task.stage == 0
    ]
    assert forwards == ["0F0+1", "0F2+3", "0F8", "0F9", "1:0F4+5", "1:0F6+7", "1:0F10", "1:0F11"]


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
@pytest.mark.parametrize("num_micro_batches", [1, 4, 9])
def test_1f1b_phases(num_stages, num_micro_batches):
    for policy in ("A", "B"):
        for limit in (None, 1, 3):
            schedule = generate(
                "1f1b",
                num_stages=num_stages,
                num_micro_batches=num_micro_batches,
                policy=policy,
                max_in_flight=limit,
            )
            for i, tasks in enumerate(schedule.workers):
                wanted = num_stages - i if policy == "A" else 2 * (num_stages - i) - 1
                k = min(wanted, limit or wanted, num_micro_batches)
                letters = "".join(task.kind.letter for task in tasks if task.kind.is_compute)
                assert letters == "F" * k + "BF" * (num_micro_batches - k) + "B" * k


def test_policy_b_hides_slow_boundaries():
    """Transfers as long as compute: A waits for each round trip, B has enough micro-batches on their way."""
    times = Times.of(4, forward=1, backward=2, transfer=1.5)
    lengths = {
        policy: simulate(generate("1f1b", num_stages=4, num_micro_batches=16, policy=policy), times).makespan
        for policy in ("A", "B")
    }
    assert lengths["B"] < lengths["A"]


def test_unequal_warm_ups():
    assert warm_ups(3, 8, warm_up=(5, 2, 2)) == (5, 2, 2)
    assert warm_ups(3, 4, warm_up=(9, 9, 1)) == (4, 4, 1)
    schedule = generate("1f1b", num_stages=3, num_micro_batches=8, warm_up=(5, 2, 2))
    letters = ["".join(task.kind.letter for task in tasks) for tasks in schedule.workers]
    assert letters == ["FFFFFBFBFBFBBBBBU", "FFBFBFBFBFBFBFBBU", "FFBFBFBFBFBFBFBBU"]


@pytest.mark.parametrize("num_workers", [1, 2, 4, 8])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_wpipes_order(num_workers, extra):
    m, n, periods = num_workers + extra, num_workers, 3
    schedule = generate("wpipe", num_stages=n, num_micro_batches=m, iterations=periods)
    for s, tasks in enumerate(schedule.workers):
        compute = [task for task in tasks if task.kind.is_compute]
        letters = "".join(task.kind.letter for task in compute)
        warm_up, total = m + n - 1 - s, 2 * m * periods
        assert letters == "F" * warm_up + "FB" * (total - warm_up) + "B" * warm_up
        for kind, groups in ((Kind.FORWARD, (0, 1)), (Kind.BACKWARD, (1, 0))):
            order = [(task.stage // n, task.micro_batch) for task in compute if task.kind is kind]
            assert order == [(g, t * m + j) for t in range(periods) for g in groups for j in range(m)]
        # After each M backwards of a group that group alone is updated, the groups taking turns.
        updates = [(task.stage // n, task.micro_batch) for task in tasks if task.kind is Kind.UPDATE]
        assert updates == [(g, t) for t in range(periods) for g in (1, 0)]


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("num_units", [1, 2, 4])
@pytest.mark.parametrize("name", ["interleaved-1f1b", "grouped-gpipe"])
def test_groups_divide_the_bubble(name, groups, num_stages, num_units):
    """(M + (D - 1)/g)(F + B): with whole-number times of F = 1, B = 2 per stage, g M 3 + (D - 1) 3."""
    m = num_units * num_stages
    schedule = generate(name, num_stages=num_stages, num_micro_batches=m, groups=groups)
    assert makespan(schedule, 1, 2) == 3 * (groups * m + num_stages - 1)


def test_interleaved_with_one_group_is_1f1b_with_its_steady_state_turned_round():
    one = generate("interleaved-1f1b", num_stages=4, num_micro_batches=8, groups=1)
    straight = generate("1f1b", num_stages=4, num_micro_batches=8, policy="B")
    assert makespan(one, 1, 2) == makespan(straight, 1, 2)


@pytest.mark.parametrize("num_stages", [1, 2, 4, 8])
def test_zero_bubble(num_stages):
    """H1: 3 M + D - 1 for F = I = W from M = D on; H2 too from M = 2 D - 1 on, and then no worker idles between its tasks."""
    for num_micro_batches in (num_stages, 2 * num_stages - 1, 3 * num_stages):
        for policy, least in (("H1", num_stages), ("H2", 2 * num_stages - 1)):
            schedule = generate(
                "zero-bubble", num_stages=num_stages, num_micro_batches=num_micro_batches, policy=policy
            )
            timeline = simulate(schedule, Times.of(num_stages, forward=1, backward=2))
            if num_micro_batches < least:
                continue
            assert timeline.makespan == 3 * num_micro_batches + num_stages - 1
            if policy == "H2":
                spans = [ends[-1] - starts[0] for starts, ends in zip(timeline.starts, timeline.ends)]
                assert spans == [3 * num_micro_batches] * num_stages


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chimera", dict(num_stages=5), "num_stages is 5; chimera needs an even number of stages"),
        ("chimera", dict(num_pipelines=6), "num_pipelines is 6; .* f divides 4: one of 2, 4, 8"),
        ("chimera", dict(num_pipelines=3), "num_pipelines is 3; .* one of 2, 4, 8"),
        ("chimera", dict(num_pipelines=0), "num_pipelines is 0; "),
        (
            "chimera",
            dict(concatenation="sideways"),
            "concatenation is 'sideways'; give one of direct, doubling, halving",
        ),
        ("gems", dict(num_stages=3), "num_stages is 3; gems needs an even number of stages"),
        ("wpipe", dict(num_micro_batches=7), "num_micro_batches is 7; .* at least 8, .* wpipe needs M >= N"),
        ("pipedream-2bw", dict(num_micro_batches=7), "num_micro_batches is 7; .* pipedream-2bw needs N >= D"),
        ("interleaved-1f1b", dict(num_micro_batches=12), "num_micro_batches is 12; .* a multiple of the 8 workers"),
        ("1f1b", dict(policy="C"), "policy is 'C'; give A or B"),
        ("1f1b", dict(max_in_flight=0), "max_in_flight is 0; give a whole number of at least 1"),
        ("1f1b", dict(warm_up=(1, 2)), "warm_up has 2 numbers; give 8, one per stage"),
        ("1f1b", dict(warm_up=(4, 4, 4, 5, 4, 4, 4, 4)), "warm_up is 4 at stage 2 and 5 at stage 3; it must not grow"),
        ("1f1b", dict(warm_up=(4, 4, 4, 4, 4, 4, 4, 0)), "warm_up of stage 7 is 0"),
        ("zero-bubble", dict(policy="A"), "policy is 'A'; give H1"),
        ("grouped-gpipe", dict(groups=0), "groups is 0; give a whole number of at least 1"),
        ("gpipe", dict(groups=2), "schedule gpipe has no option groups; it has none of its own"),
        ("chimera", dict(policy="A"), "schedule chimera has no option policy; it has concatenation, num_pipelines"),
        ("gpipe", dict(num_stages=0), "num_stages is 0; give a whole number of at least 1"),
        ("gpipe", dict(num_micro_batches=-1), "num_micro_batches is -1; give a whole number of at least 1"),
        ("gpipe", dict(num_micro_batches=2.5), "num_micro_batches is 2.5; give a whole number"),
        ("gpipe", dict(iterations=0), "iterations is 0"),
        ("gpipe", dict(width=0), "width is 0"),
        ("gpipe", dict(width=(1, 2)), "width has 2 numbers; give one, or 8, one per worker"),
        ("gpipe", dict(all_reduce="soon"), "all_reduce is 'soon'; give one of none, eager, eager-sync-opt"),
        ("pipe", {}, "schedule 'pipe' is unknown; did you mean 'wpipe'\\? known are gpipe, "),
    ],
)
def test_what_is_refused(name, options, message):
    with pytest.raises(GeneratorError, match=message) as caught:
        generate(name, **{"num_stages": 8, "num_micro_batches": 8, **options})
    assert "\n" not in str(caught.value)


def test_no_generator_can_bypass_the_validator(monkeypatch):
    """What leaves the door has been seen by the validator, as the very object."""
    from autoddl.pipelines.generators import registry

    seen = []
    monkeypatch.setattr(registry, "validate", lambda schedule: seen.append(schedule) or validate(schedule))
    for family in families():
        schedule = generate(family.name, num_stages=4, num_micro_batches=8)
        assert seen[-1] is schedule
