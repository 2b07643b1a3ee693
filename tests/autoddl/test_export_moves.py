"""Statements of redistributions: executed for all ranks on numpy arrays, they move each element to the right place."""

from __future__ import annotations

import queue
import sys
import threading
from math import prod
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoddl.costmodel.distribution import Axis, canonical
from autoddl.costmodel.redistribution import redistribute, steps
from autoddl.export.library import library_text
from autoddl.pipelines.runtime.comm.moves import move_calls


class Parts:
    """The parts of a tensor on all ranks; has the methods of one rank's tensor."""

    def __init__(self, arrays):
        self.arrays = list(arrays)

    def reshape(self, *shape):
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return Parts(array.reshape(shape) for array in self.arrays)

    def permute(self, *order):
        return Parts(array.transpose(order) for array in self.arrays)

    def numel(self):
        return self.arrays[0].size


class Ranks:
    """The collectives that statements call, on `Parts`; counts the elements that each rank sends."""

    def __init__(self):
        self.sent = 0.0

    def groups(self, x, axis):
        size, stride = axis.size, axis.stride
        firsts = [rank for rank in range(len(x.arrays)) if rank // stride % size == 0]
        return [[first + k * stride for k in range(size)] for first in firsts]

    def all_gather(self, x, axis, dim):
        result = list(x.arrays)
        for group in self.groups(x, axis):
            whole = np.concatenate([x.arrays[rank] for rank in group], axis=dim)
            for rank in group:
                result[rank] = whole
        self.sent += (axis.size - 1) * x.numel()
        return Parts(result)

    def all_to_all(self, x, axis, split_dim, concat_dim):
        result = list(x.arrays)
        for group in self.groups(x, axis):
            pieces = [np.split(x.arrays[rank], axis.size, axis=split_dim) for rank in group]
            for k, rank in enumerate(group):
                result[rank] = np.concatenate([of_sender[k] for of_sender in pieces], axis=concat_dim)
        self.sent += (axis.size - 1) / axis.size * x.numel()
        return Parts(result)

    def axis(self, axis):
        return axis

    @staticmethod
    def take_shard(x, axis, dim):
        size, stride = axis.size, axis.stride
        return Parts(np.split(a, size, axis=dim)[r // stride % size] for r, a in enumerate(x.arrays))


class Array(np.ndarray):
    """An array with what the library reads of tensors."""

    device = SimpleNamespace(type="host")

    def contiguous(self):
        return np.ascontiguousarray(self).view(Array)


def library(used, given=()):
    """Return the text of the library for some names, without the definitions that need OneFlow."""
    text = library_text(used, (), {"Tensor", "flow", "_Function", "Ranks", *given})
    return "\n".join(
        ["from __future__ import annotations", *text.standard_imports, *(section for _, section in text.sections)]
    )


def exchanged(ranks, x, source, target):
    """Run the library's ``_exchanged`` on every rank, each in a thread; the ranks of the job are numbered from 100."""
    num_ranks = len(x.arrays)
    code = compile(library({"_exchanged", "Layout"}, {"send", "receive"}), "library", "exec")
    boxes = {(a, b): queue.Queue() for a in range(num_ranks) for b in range(num_ranks)}
    results, sent = {}, dict.fromkeys(range(num_ranks), 0)

    def work(rank):
        def send(part, receiver):
            assert receiver - 100 != rank
            sent[rank] += part.size
            boxes[rank, receiver - 100].put(part.copy())

        def receive(shape, dtype, sender, device):
            part = boxes[sender - 100, rank].get(timeout=20)
            assert part.shape == shape and part.dtype == dtype
            return part

        def narrow(array, dim, start, length):
            return np.take(array, range(start, start + length), axis=dim).view(Array)

        def join(parts, dim):
            return np.concatenate(parts, axis=dim).view(Array)

        flow = SimpleNamespace(narrow=narrow, cat=join)
        module = ModuleType(f"library_{rank}")
        space = vars(module)
        space.update({"np": np, "flow": flow, "send": send, "receive": receive})
        sys.modules[module.__name__] = module  # dataclasses look themselves up there
        try:
            exec(code, space)
        finally:
            del sys.modules[module.__name__]
        ends = (eval(end, space).cuts for end in (source, target))
        here = SimpleNamespace(rank=rank, first_rank=100, num_ranks=num_ranks)
        results[rank] = np.asarray(space["_exchanged"](x.arrays[rank].view(Array), here, *ends, (0, 2)))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == num_ranks and all(box.empty() for box in boxes.values())
    ranks.sent += sum(sent.values()) / num_ranks
    return Parts(results[rank] for rank in range(num_ranks))


def run(calls, x, levels):
    """Run statements; the collectives are those of `Ranks`, other functions those of the library."""
    ranks = Ranks()
    space = {"take_shard": ranks.take_shard}
    exec(library({"exchange_digits", "take_digit"}, {"Axis", "take_shard"}), space)
    for call in calls:
        if call.function == "exchange":
            x = exchanged(ranks, x, *map(layout_text, levels))
        elif call.function == "reshape":
            x = x.reshape(*call.arguments[1])
        elif call.function.startswith("ranks."):
            x = getattr(ranks, call.function.partition(".")[2])(x, **call.options)
        else:
            x = space[call.function](x, ranks, **call.options)
    return x, ranks.sent


def layout_text(levels):
    return f"Layout({', '.join(str((p0, 1, s)) for p0, s in levels)})"


def check(source_levels, target_levels, rows=3):
    source, target = canonical(source_levels), canonical(target_levels)
    num = source.num_ranks
    shape = (2 * num, 3 * num)
    whole = np.arange(prod(shape) * rows).reshape(shape[0], rows, shape[1])

    def part(distribution, rank):
        samples, features = distribution.slices(rank, shape)
        return np.ascontiguousarray(whole[samples, :, features])

    x = Parts(part(source, rank) for rank in range(num))
    route = redistribute(source, target, shape)
    calls = move_calls(route, x.arrays[0].shape)
    found, sent = run(calls, x, (source_levels, target_levels))
    for rank in range(num):
        assert np.array_equal(found.arrays[rank], part(target, rank)), (source, target, rank, calls)
    priced = steps(route, whole.size)
    assert sent == pytest.approx(sum(step.mean_sent_bytes for step in priced))
    assert sum(call.num_steps for call in calls) == len(priced)


def splits(size):
    """Return all pairs of divisors: samples over p ranks, features over ``size / p`` ranks."""
    return [(p0, size // p0) for p0 in range(1, size + 1) if size % p0 == 0]


LEVELS = [(2,), (4,), (8,), (2, 2), (2, 4), (4, 2), (6,), (12,), (2, 6), (3, 4)]


@st.composite
def ends(draw):
    sizes = draw(st.sampled_from(LEVELS))
    return tuple(tuple(draw(st.sampled_from(splits(size))) for size in sizes) for _ in range(2))


@settings(max_examples=60, deadline=None)
@given(ends())
@example((((1, 6),), ((3, 2),)))
@example((((3, 1), (4, 1)), ((1, 3), (1, 4))))
def test_written_moves_bring_every_element_to_its_place(pair):
    check(*pair)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        # Neighbours exchange samples for features: the dimensions themselves.
        (((2, 1),), ((1, 2),), [("ranks.all_to_all", {"axis": Axis(2, 1), "split_dim": 2, "concat_dim": 0})]),
        # Features are cut innermost axis first: of four ranks the slow one takes the lower digit.
        (
            ((4, 1),),
            ((1, 4),),
            [
                (
                    "exchange_digits",
                    {
                        "axis": Axis(4, 1),
                        "view": [1, 1, -1, 3, 2, 2, 3],
                        "split": [5, 4],
                        "concat": [0, 1],
                        "sizes": [2, 2],
                    },
                ),
                ("reshape", {}),
            ],
        ),
        # Columns of six to blocks of two rows by three columns: no digits to exchange.
        (((1, 6),), ((3, 2),), [("exchange", {})]),
    ],
)
def test_the_statements_of_small_moves(source, target, expected):
    one, other = canonical(source), canonical(target)
    num = one.num_ranks
    shape = (2 * num, 3 * num)
    local = (shape[0] // prod(p for p, _ in source), 3, shape[1] // prod(s for _, s in source))
    calls = move_calls(redistribute(one, other, shape), local)
    assert [(call.function, dict(call.options)) for call in calls] == expected
