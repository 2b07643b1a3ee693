"""What the ranks do in test_collectives.py."""

from __future__ import annotations

import oneflow as flow

from autoddl.costmodel.devices import CPU
from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.comm import collectives
from autoddl.pipelines.runtime.comm.mesh import RankAxis
from autoddl.pipelines.runtime.ranks.wire import Meter, measure, measure_baseline


def apply_and_differentiate(calls):
    """For each call (operation, axis, dims, one input per rank, one output gradient per rank): this rank's output and gradient."""
    rank = flow.env.get_rank()
    results = []
    for operation, axis, dims, inputs, output_gradients in calls:
        x = flow.tensor(inputs[rank], requires_grad=output_gradients is not None)
        y = getattr(collectives, operation)(x, axis, *dims)
        gradient = None
        if output_gradients is not None:
            (y * 1).backward(flow.tensor(output_gradients[rank]))  # times 1: on an axis of one, y is the leaf x itself
            gradient = x.grad.numpy()
        results.append((y.numpy(), gradient))
    return results


def on_members(calls):
    """For each call (operation, axis, dims, one input per rank): the output, on the ranks of the axis's mesh; others go on."""
    rank = flow.env.get_rank()
    outputs = []
    for operation, axis, dims, inputs in calls:
        if axis.first_rank <= rank < axis.first_rank + axis.num_ranks:
            outputs.append(getattr(collectives, operation)(flow.tensor(inputs[rank]), axis, *dims).numpy())
        else:
            outputs.append(None)
    return outputs


def count_bytes(calls):
    """For each call (operation, axis, dims, shape): the traffic of all ranks, forward and backward."""
    counted = []
    meter = Meter()
    for operation, axis, dims, shape in calls:
        x = flow.ones(*shape, requires_grad=True)
        y, forward = meter(lambda x=x, op=operation, axis=axis, dims=dims: getattr(collectives, op)(x, axis, *dims))
        gradient = flow.ones(*y.shape)
        _, backward = meter(lambda y=y, gradient=gradient: y.backward(gradient))
        counted.append((forward, backward))
    return counted


def count_small_messages(num_repeats):
    """Payload bytes per repetition of an all-gather of one float64 over all ranks, and of one point-to-point transfer."""
    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
    axis = RankAxis(world_size, 1, world_size)
    x = flow.ones(1, dtype=flow.float64)

    def gather():
        for _ in range(num_repeats):
            collectives.all_gather(x, axis, 0)

    def transfer():
        for _ in range(num_repeats):
            if rank == 0:
                collectives.send(x, world_size - 1)
            elif rank == world_size - 1:
                collectives.receive((1,), flow.float64, 0, CPU)

    baseline = measure_baseline()
    return [measure(section, baseline)[1].payload_bytes / num_repeats for section in (gather, transfer)]


def refusals(calls):
    """For each call (operation, axis, dims, shape, type name): the message of the UserError, None where there was none."""
    messages = []
    for operation, axis, dims, shape, type_name in calls:
        try:
            getattr(collectives, operation)(flow.zeros(*shape, dtype=getattr(flow, type_name)), axis, *dims)
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages


def pass_around(values):
    """Every rank sends its value to the next one, rank 0 first, through all ranks; returns what each got."""
    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
    mine = flow.tensor(values[rank])
    shape, dtype = tuple(mine.shape), mine.dtype
    if rank == 0:
        collectives.send(mine, 1)
        return collectives.receive(shape, dtype, world_size - 1, CPU).numpy()
    got = collectives.receive(shape, dtype, rank - 1, CPU)
    collectives.send(mine, (rank + 1) % world_size)
    return got.numpy()


def peer_refusals():
    rank, world_size = flow.env.get_rank(), flow.env.get_world_size()
    messages = []
    for call in (
        lambda: collectives.send(flow.ones(2), rank),
        lambda: collectives.receive((2,), flow.float32, world_size, CPU),
        lambda: collectives.send(flow.ones(2, dtype=flow.float16), (rank + 1) % world_size),
    ):
        try:
            call()
            messages.append(None)
        except UserError as error:
            messages.append(str(error))
    return messages
