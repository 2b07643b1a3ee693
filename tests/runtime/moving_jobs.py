"""What the ranks do in the tests of redistributions; imported by ranks, never collected."""

from __future__ import annotations

from typing import Any

import numpy as np

from autoddl.costmodel.distribution import Distribution
from autoddl.costmodel.redistribution import redistribute, steps
from autoddl.costmodel.sbp import PartialSum
from autoddl.pipelines.runtime.load import load_oneflow


def local_part(value: np.ndarray, lying: Distribution, rank: int, seed: int) -> np.ndarray:
    """What ``rank`` holds of ``value``: summands of partial sums are random, and add up over each group."""
    part = value[lying.slices(rank, value.shape)]
    groups = 1
    for axis, state in zip(lying.axes, lying.states):
        if isinstance(state, PartialSum):
            groups *= axis.size
    if groups == 1:
        return np.ascontiguousarray(part)
    # Every rank draws the summands of all ranks of its group: the primary one holds what is missing from the whole.
    members = [r for r in range(lying.num_ranks) if _same_but_partial(lying, r, rank)]
    noise = {
        r: np.random.default_rng([seed, r]).integers(-8, 9, part.shape).astype(part.dtype)
        for r in members
        if not is_primary(lying, r)
    }
    if rank in noise:
        return noise[rank]
    return np.ascontiguousarray(part - sum(noise.values()))


def is_primary(distribution: Distribution, rank: int, kind: type = PartialSum) -> bool:
    """Whether ``rank`` has coordinate 0 on every axis whose state is of ``kind``."""
    axes = zip(distribution.axes, distribution.states)
    return all(axis.coordinate(rank) == 0 for axis, state in axes if isinstance(state, kind))


def _same_but_partial(lying: Distribution, a: int, b: int) -> bool:
    return all(
        axis.coordinate(a) == axis.coordinate(b)
        for axis, state in zip(lying.axes, lying.states)
        if not isinstance(state, PartialSum)
    )


def move_pairs(
    pairs: list[tuple[str, str]], shape: tuple[int, ...], num_ranks: int, measured: bool, first_rank: int = 0
) -> list[dict[str, Any]]:
    """For each pair of distributions over the ranks from ``first_rank`` on what this rank holds after, forward and backward, and
    the traffic."""
    from autoddl.pipelines.runtime.backend import HOST
    from autoddl.pipelines.runtime.comm.moving import move_tensor
    from autoddl.pipelines.runtime.ranks.wire import Meter
    from autoddl.pipelines.runtime.stepping import Stepper

    flow = load_oneflow()
    rank = flow.env.get_rank() - first_rank
    if not 0 <= rank < num_ranks:
        return []
    stepper = Stepper(num_ranks, HOST, first_rank)
    meter = Meter() if measured else None
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 997
    gradient = (np.arange(np.prod(shape), dtype=np.float32).reshape(shape) * 7) % 991
    results = []
    for number, (a, b) in enumerate(pairs):
        source, target = Distribution.parse(a), Distribution.parse(b)
        route = redistribute(source, target, shape)
        x = flow.tensor(local_part(value, source, rank, 2 * number)).requires_grad_(True)
        dy = flow.tensor(local_part(gradient, target.dual(), rank, 2 * number + 1))

        def section(x=x, dy=dy, route=route):
            y = move_tensor(x * 1.0, route, stepper, range(len(shape)))
            flow.autograd.backward([y], [dy])
            return y

        with stepper.logging() as log:
            y, traffic = (section(), None) if meter is None else meter(section)
        expected = steps(route, value.nbytes)
        results.append(
            {
                "forward": y.numpy(),
                "backward": x.grad.numpy(),
                "payload": traffic.payload_bytes if traffic else None,
                "ran": [str(step) for step in log],
                "expected": [*map(str, expected), *(str(step.adjoint()) for step in reversed(expected))],
                "sent_bytes": 2 * sum(step.mean_sent_bytes for step in expected),
                "messages": 2 * sum(step.mean_messages for step in expected),
            }
        )
    return results


def record_pairs(pairs: list[tuple[str, str]], shape: tuple[int, ...]) -> list[tuple[list[float], float, set[str]]]:
    """For each pair of distributions: bytes of each recorded communication, bytes of the step list, kinds of spans that send."""
    from autoddl.pipelines.runtime.backend import HOST
    from autoddl.pipelines.runtime.comm.moving import move_tensor
    from autoddl.pipelines.runtime.recording import Recorder
    from autoddl.pipelines.runtime.stepping import Stepper

    flow = load_oneflow()
    rank, num_ranks = flow.env.get_rank(), flow.env.get_world_size()
    value, stepper, found = np.ones(shape, np.float32), Stepper(num_ranks, HOST), []
    for a, b in pairs:
        source, target = Distribution.parse(a), Distribution.parse(b)
        route = redistribute(source, target, shape)
        stepper.recorder = recorder = Recorder()
        x = flow.tensor(local_part(value, source, rank, 0)).requires_grad_(True)
        with recorder.step(), recorder.task("fc", "forward"):
            y = move_tensor(x * 1.0, route, stepper, range(len(shape)))
            flow.autograd.backward([y], [flow.ones_like(y)])
        spans = recorder.record().spans
        sent = [span.what.sent_bytes for span in spans if span.what is not None]
        expected = 2 * sum(step.sent_bytes for step in steps(route, value.nbytes))
        found.append((sent, expected, {span.kind for span in spans} - {"waiting", "computation"}))
    return found


def replay_exchanges(pairs: list[tuple[str, str]], shape: tuple[int, ...]) -> list[tuple[int, float, float]]:
    """For each exchange what ranking strategies would time of it: (payload, bytes, messages) of all ranks, forward."""
    from autoddl.calib.replay import steps_alone
    from autoddl.pipelines.runtime.backend import HOST
    from autoddl.pipelines.runtime.ranks.wire import Meter

    meter, found = Meter(), []
    num_ranks = load_oneflow().env.get_world_size()
    for a, b in pairs:
        expected = steps(redistribute(Distribution.parse(a), Distribution.parse(b), shape), 4 * np.prod(shape))
        _, traffic = meter(steps_alone([(None, step) for step in expected], HOST))
        sent, messages = (
            num_ranks * sum(getattr(step, name) for step in expected) for name in ("mean_sent_bytes", "mean_messages")
        )
        found.append((traffic.payload_bytes, sent, messages))
    return found
