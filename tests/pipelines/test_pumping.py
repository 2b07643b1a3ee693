"""Long paths made of short ones: the simulator of the long schedule has the last word."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.space import schedules
from autoddl.pipelines.periods import insertions
from autoddl.pipelines.pumping import PumpedGraph, zones_between
from autoddl.pipelines.stepgraph import StepGraph, Terms
from autoddl.pipelines.tasktable import tabulate
from tests.pipelines.test_periods import makespan

INTERLEAVED = PipelineSchedule("interleaved-1f1b", 4, 48, (("groups", 2),), 2)
CHIMERA = PipelineSchedule("chimera", 8, 64, (("concatenation", "direct"), ("num_pipelines", 2)), num_pipelines=2)


def pumped(spec: PipelineSchedule, multiple: int, again: bool) -> PumpedGraph | None:
    """The graph for a long schedule, from one of ``multiple`` micro-batches for each worker; None where nothing repeats."""
    period = spec.num_workers * (2 if dict(spec.options).get("concatenation") == "doubling" else 1)
    count = multiple * spec.num_workers + (spec.num_micro_batches - multiple * spec.num_workers) % period
    if count >= spec.num_micro_batches:
        return None
    stages = range(spec.num_stages)
    try:
        few, many = (
            replace(spec, num_micro_batches=number).schedule(2, (again,) * spec.num_stages)
            for number in (count, count + period)
        )
    except GeneratorError:
        return None
    zones, added = zones_between(few, many), insertions(few, many)
    if zones is None or added is None:
        return None
    passes, before = [spec.backward_passes(s) for s in stages], [spec.input_passes(s) for s in stages]
    num_periods = (spec.num_micro_batches - count) // period
    condensed = StepGraph(few, passes, before, added).with_repeated_insertions(num_periods)
    return PumpedGraph(condensed, StepGraph(few, passes, before), tabulate(few), zones, num_periods)


@pytest.mark.parametrize(("depth", "count"), [(2, 16), (3, 21), (4, 32), (4, 61), (6, 36), (8, 40)])
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_repeated_parts_take_no_longer_than_the_long_schedule(depth: int, count: int, again: bool) -> None:
    dice = np.random.default_rng(depth * count)
    compared, num_longer = set(), 0
    for spec in schedules(depth, count, 64, stale=False):
        for multiple in (2, 3):
            graph = pumped(spec, multiple, again)
            if graph is None:
                continue
            compared.add(spec.name)
            for spread in range(6):
                times = dice.exponential(1.0, graph.terms.count) * dice.integers(0, 2 + spread, graph.terms.count)
                if spread % 2:  # nearly even stages, for which workers wait for each other in every period
                    times = dice.uniform(0.9, 1.1, graph.terms.count)
                if not again:
                    times[graph.terms.recompute] = 0.0
                step, path = graph.step(times)
                assert step <= makespan(spec, again, times) * (1 + 1e-9), (spec, multiple)
                assert path @ times == pytest.approx(step)
                num_longer += step > graph.condensed.step(times)[0] * (1 + 1e-9)
    assert {"1f1b", "zero-bubble"} <= compared and num_longer > 10


@pytest.mark.parametrize("spec", [INTERLEAVED, CHIMERA], ids=lambda spec: spec.name)
def test_workers_that_wait_for_each_other_in_every_period(spec: PipelineSchedule) -> None:
    """Tasks of one worker do not show that transfers and bubbles delay it again and again; repeated parts do, to the last digit."""
    terms = Terms(spec.num_stages)
    times = np.zeros(terms.count)
    times[terms.forward], times[terms.backward] = 1.0, 2.0
    times[terms.transfer_forward] = times[terms.transfer_backward] = 0.25
    graph, whole_s = pumped(spec, 3, again=False), makespan(spec, False, times)
    assert graph is not None
    assert graph.step(times)[0] == pytest.approx(whole_s, rel=1e-12)
    assert graph.condensed.step(times)[0] < 0.998 * whole_s


def test_zones_of_one_forward_one_backward() -> None:
    """Worker w of 4 runs 3 - w forward passes before its first pair of passes, and as many backward passes after its last one; the
    tasks between these repeat."""
    spec = PipelineSchedule("1f1b", 4, 12, (("policy", "A"),))
    few, many = (replace(spec, num_micro_batches=number).schedule(1, (False,) * 4) for number in (12, 16))
    zones = zones_between(few, many)
    assert zones is not None and zones.shifts[0] == 4
    for worker, tasks in enumerate(few.workers):
        warm_up = 3 - worker
        assert zones.first[worker] <= warm_up and zones.stop[worker] == warm_up + 2 * (12 - warm_up)
        repeated = tasks[zones.first[worker] : zones.stop[worker]]
        moved = [task._replace(micro_batch=task.micro_batch + 4) for task in repeated]
        assert moved[: -2 * 4] == list(repeated[2 * 4 :])


def test_what_does_not_repeat_has_no_zones() -> None:
    gpipe = PipelineSchedule("gpipe", 4, 12)
    few, many = (replace(gpipe, num_micro_batches=number).schedule(1, (False,) * 4) for number in (12, 16))
    assert zones_between(few, many) is None
