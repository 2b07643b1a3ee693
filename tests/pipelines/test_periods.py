"""Short schedules bound long ones: the simulator has the last word."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoddl.pipelines.generators import GeneratorError
from autoddl.pipelines.joint.configuration import PipelineSchedule
from autoddl.pipelines.joint.space import schedules
from autoddl.pipelines.periods import insertions
from autoddl.pipelines.simulator import simulate
from autoddl.pipelines.stepgraph import StepGraph, Terms
from autoddl.pipelines.times import Times


def condensed(spec: PipelineSchedule, least: int, again: bool) -> StepGraph | None:
    """The graph of a short schedule with what a long one has more; None where there is none that is short."""
    period = spec.num_workers * (2 if dict(spec.options).get("concatenation") == "doubling" else 1)
    count = least + (spec.num_micro_batches - least) % period
    if count >= spec.num_micro_batches:
        return None
    stages = range(spec.num_stages)
    recomputing = (again,) * spec.num_stages
    try:
        short, longer = (
            replace(spec, num_micro_batches=number).schedule(2, recomputing) for number in (count, count + period)
        )
    except GeneratorError:
        return None
    added = insertions(short, longer)
    if added is None:
        return None
    passes, before = [spec.backward_passes(s) for s in stages], [spec.input_passes(s) for s in stages]
    graph = StepGraph(short, passes, before, added)
    return graph.with_repeated_insertions((spec.num_micro_batches - count) // period)


def makespan(spec: PipelineSchedule, again: bool, times: np.ndarray) -> float:
    """Of the long schedule, by the simulator."""
    terms = Terms(spec.num_stages)
    backward = times[terms.backward].tolist()
    return simulate(
        spec.schedule(2, (again,) * spec.num_stages),
        Times.of(
            spec.num_stages,
            forward=times[terms.forward].tolist(),
            backward=[spec.backward_passes(s) * one for s, one in enumerate(backward)],
            backward_input=[spec.input_passes(s) * one for s, one in enumerate(backward)],
            recompute=times[terms.recompute].tolist(),
            all_reduce=times[terms.all_reduce].tolist(),
            transfer=times[terms.transfer_forward].tolist(),
            transfer_backward=times[terms.transfer_backward].tolist(),
        ),
    ).makespan


@pytest.mark.parametrize(("depth", "count"), [(2, 9), (2, 16), (3, 21), (4, 17), (4, 32), (4, 60), (6, 36), (8, 40)])
@pytest.mark.parametrize("again", [False, True], ids=["", "recomputed"])
def test_a_short_schedule_takes_no_longer_than_the_long_one(depth: int, count: int, again: bool) -> None:
    dice = np.random.default_rng(depth * count)
    compared = set()
    for spec in schedules(depth, count, 64, stale=False):
        try:
            spec.schedule(2, (again,) * spec.num_stages)
        except GeneratorError:
            continue
        for least in (depth, 2 * depth):
            graph = condensed(spec, least, again)
            if graph is None:
                continue
            compared.add(spec.name)
            for spread in range(4):
                times = dice.exponential(1.0, graph.terms.count) * dice.integers(0, 2 + spread, graph.terms.count)
                if not again:
                    times[graph.terms.recompute] = 0.0
                step, path = graph.step(times)
                assert step <= makespan(spec, again, times) * (1 + 1e-9), (spec, least)
                assert path @ times == pytest.approx(step)
    assert len(compared) >= 4


@pytest.mark.parametrize("name", ["gpipe", "grouped-gpipe", "interleaved-1f1b"])
def test_even_stages_take_as_long_in_short(name: str) -> None:
    """Of 4 workers, 48 micro-batches and G groups, by the schedules' formulas: (48 G + 3) (1 + 2)."""
    for spec in schedules(4, 48, 64, stale=False):
        if spec.name != name:
            continue
        graph = condensed(spec, 8, again=False)
        assert graph is not None
        times = np.zeros(graph.terms.count)
        times[graph.terms.forward], times[graph.terms.backward] = 1.0, 2.0
        assert graph.step(times)[0] == (48 * spec.groups + 3) * 3.0
