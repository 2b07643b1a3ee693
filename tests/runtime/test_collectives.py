"""Collectives along one mesh axis, on real ranks: values, gradients, bytes, and who has to call them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoddl.pipelines.runtime.comm.handshake import NO_HANDSHAKE, Handshake
from autoddl.pipelines.runtime.comm.mesh import RankAxis
from autoddl.pipelines.runtime.ranks.wire import MESSAGE_BYTES

from .rank_meshes import RankMesh
from .sent_bytes import Sent, check_sent

JOBS = Path(__file__).with_name("collective_jobs.py")
MESHES = [(2,), (4,), (2, 2), (8,), (2, 4), (2, 2, 2)]


def axes_of(meshes):
    """Each once, with its name: meshes have some in common."""
    return {axis: f"{mesh}[{i}]" for mesh in meshes for i, axis in enumerate(RankMesh(mesh).axes)}


AXES = axes_of(MESHES)
#: Groups of 3 and of 6 ranks, of which no binary mesh has any.
ODD_AXES = axes_of([(3,), (2, 3), (6,)])
#: Every rank is on a host of its own, and shakes hands before each exchange.
ALWAYS = Handshake(ranks_per_host=1, least_bytes=0)
HANDSHAKES = {
    replace(axis, handshake=ALWAYS): f"{name} with handshakes"
    for axis, name in axes_of([(2,), (2, 2), (2, 3)]).items()
    if axis.size == 2
}


# ---- What each operation means: all ranks' inputs of one group in, all ranks' outputs out --------------------------------


def split(x, p, dim):
    return np.split(x, p, axis=dim)


MEANING = {
    "all_gather": lambda xs, dim: [np.concatenate(xs, axis=dim)] * len(xs),
    "reduce_scatter": lambda xs, dim: split(sum(xs), len(xs), dim),
    "all_reduce": lambda xs: [sum(xs)] * len(xs),
    "all_to_all": lambda xs, cut, join: [
        np.concatenate([split(x, len(xs), cut)[k] for x in xs], axis=join) for k in range(len(xs))
    ],
    "take_shard": lambda xs, dim: [split(x, len(xs), dim)[k] for k, x in enumerate(xs)],
    "pad_shard": lambda xs, dim: [
        np.concatenate([x if j == k else np.zeros_like(x) for j in range(len(xs))], axis=dim) for k, x in enumerate(xs)
    ],
}


def adjoint(meaning, input_shape, output_gradients):
    """The gradient of each input: the transposed matrix of ``meaning``, found by applying it to all basis vectors at once."""
    p, size = len(output_gradients), int(np.prod(input_shape))
    basis = np.eye(p * size).reshape(
        p, *input_shape, p * size
    )  # one basis vector for each index of a further dimension
    outputs = meaning(list(basis))
    gradients = sum(np.tensordot(g, y, axes=g.ndim) for y, g in zip(outputs, output_gradients))
    return list(gradients.reshape(p, *input_shape))


def expected_gradients(operation, dims, input_shape, output_gradients):
    return adjoint(lambda xs: MEANING[operation](xs, *dims), input_shape, output_gradients)


def whole_numbers(generator, shape, dtype="float64"):
    """Random data whose sums are exact in any order."""
    return generator.integers(-9, 10, shape).astype(dtype)


def by_group(axis, values):
    """The values of the ranks in each group along ``axis``, with the ranks."""
    return [(group, [values[rank] for rank in group]) for group in axis.groups()]


def calls_along(axis, generator):
    """Every operation along every dimension of a small tensor."""
    p = axis.size
    for operation in MEANING:
        num_dims_taken = {"all_reduce": 0, "all_to_all": 2}.get(operation, 1)
        for dims in itertools.permutations(range(3), num_dims_taken):
            shape = [2, 1, 3]
            if dims:  # the dimension that is cut, or joined
                shape[dims[0]] *= p
            inputs = [whole_numbers(generator, shape) for _ in range(axis.num_ranks)]
            outputs = {r: y for g, xs in by_group(axis, inputs) for r, y in zip(g, MEANING[operation](xs, *dims))}
            gradients = [whole_numbers(generator, outputs[rank].shape) for rank in range(axis.num_ranks)]
            yield operation, axis, dims, inputs, gradients


@pytest.mark.parametrize(
    "axis", [*AXES, *ODD_AXES, *HANDSHAKES], ids=[*AXES.values(), *ODD_AXES.values(), *HANDSHAKES.values()]
)
def test_values_and_gradients(ranks, axis):
    calls = list(calls_along(axis, np.random.default_rng(0)))
    results = ranks(axis.num_ranks).run(f"{JOBS}:apply_and_differentiate", calls, timeout_s=60)
    for number, (operation, _, dims, inputs, output_gradients) in enumerate(calls):
        for group, xs in by_group(axis, inputs):
            outputs = MEANING[operation](xs, *dims)
            gradients = expected_gradients(operation, dims, xs[0].shape, [output_gradients[rank] for rank in group])
            for rank, output, gradient in zip(group, outputs, gradients):
                got_output, got_gradient = results[rank][number]
                np.testing.assert_array_equal(got_output, output, err_msg=f"{operation}{dims}, rank {rank}")
                np.testing.assert_array_equal(
                    got_gradient, gradient, err_msg=f"gradient of {operation}{dims}, rank {rank}"
                )


@st.composite
def collective_calls(draw):
    """A mesh of 4 ranks, one of its axes, with or without handshakes, an operation, dimensions, a shape, a type."""
    axis = draw(st.sampled_from(RankMesh(draw(st.sampled_from([(4,), (2, 2), (1, 4), (2, 1, 2)]))).axes))
    axis = replace(axis, handshake=draw(st.sampled_from([NO_HANDSHAKE, ALWAYS])))
    operation = draw(st.sampled_from(sorted(MEANING)))
    shape = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    dims = tuple(draw(st.permutations(range(len(shape)))))
    dims = dims[: {"all_reduce": 0, "all_to_all": 2}.get(operation, 1)]
    if dims:
        shape[dims[0]] *= axis.size
    if draw(st.booleans()):  # a dimension may be counted from the back
        dims = tuple(dim - len(shape) for dim in dims)
    dtype = draw(st.sampled_from(["float32", "float64", "int64", "int32"]))
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    return operation, axis, dims, [whole_numbers(generator, shape, dtype) for _ in range(axis.num_ranks)]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=collective_calls())
def test_any_shape_and_type(ranks, call):
    operation, axis, dims, inputs = call
    results = ranks(4).run(f"{JOBS}:on_members", [call], timeout_s=60)
    for group, xs in by_group(axis, inputs):
        for rank, expected in zip(group, MEANING[operation](xs, *dims)):
            got = results[rank][0]
            assert got.dtype == inputs[0].dtype
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("dtype", ["bool", "int8"])
def test_small_types_can_be_moved(ranks, dtype):
    axis = RankMesh((4,)).axis(0)
    generator = np.random.default_rng(1)
    inputs = [whole_numbers(generator, (4, 3), "int8").astype(dtype) for _ in range(4)]
    calls = [("all_gather", axis, (1,), inputs), ("all_to_all", axis, (0, 1), inputs)]
    results = ranks(4).run(f"{JOBS}:on_members", calls, timeout_s=60)
    for number, (operation, _, dims, _) in enumerate(calls):
        for rank, expected in enumerate(MEANING[operation](inputs, *dims)):
            np.testing.assert_array_equal(results[rank][number], expected)


# ---- Bytes --------------------------------------------------------------------------------------------------------------

# Per rank, of the n bytes named in the module's table, and how many messages.
SENT = {
    "all_gather": lambda p, n: ((p - 1) * n, p - 1),  # n is the input here: the output is p times as large
    "reduce_scatter": lambda p, n: ((p - 1) / p * n, p - 1),
    "all_reduce": lambda p, n: (2 * (p - 1) / p * n, 2 * (p - 1)),
    "all_to_all": lambda p, n: ((p - 1) / p * n, p - 1),
    "take_shard": lambda p, n: (0, 0),
    "pad_shard": lambda p, n: (0, 0),
}
SENT_BACKWARD = {
    **SENT,
    "all_gather": lambda p, n: ((p - 1) * n, p - 1),  # reduce-scatter of the output's gradient
}


@pytest.mark.parametrize("axis", [*AXES, *HANDSHAKES], ids=[*AXES.values(), *HANDSHAKES.values()])
def test_bytes_are_those_of_theory(counted_ranks, axis):
    """A handshake is one message of 4 bytes between two ranks: half a message of each."""
    shape = (8 * 4, 8 * 8, 48)  # 0.4 MB of float32: a message of an eighth of it is 49 KB
    calls = [
        ("all_gather", axis, (2,), shape),
        ("reduce_scatter", axis, (1,), shape),
        ("all_reduce", axis, (), shape),
        ("all_to_all", axis, (2, 0), shape),
    ]
    if axis.size == axis.num_ranks == 4:  # once: all that is local, other dimensions
        calls += [
            ("all_gather", axis, (0,), shape),
            ("reduce_scatter", axis, (0,), shape),
            ("all_reduce", axis, (), (787, 251)),  # which nothing divides
            ("all_to_all", axis, (0, 1), shape),
            ("take_shard", axis, (1,), shape),
            ("pad_shard", axis, (1,), shape),
        ]

    def count():
        counted = counted_ranks(axis.num_ranks).run(f"{JOBS}:count_bytes", calls, timeout_s=120)[0]
        found = []
        for (operation, _, dims, shape), got in zip(calls, counted):
            n = 4 * int(np.prod(shape))
            for direction, table, traffic in zip(("forward", "backward"), (SENT, SENT_BACKWARD), got):
                ideal, num_messages = (axis.num_ranks * value for value in table[operation](axis.size, n))
                if axis.handshake is ALWAYS and ideal:
                    ideal, num_messages = ideal + 4 * axis.num_ranks / 2, num_messages + axis.num_ranks / 2
                what, payload = f"{operation}{dims} of {shape}, {direction}", traffic.payload_bytes
                if ideal:
                    found.append(Sent(f"{what}, raw", payload, ideal, num_readings=0))
                # Once OneFlow's own messages are taken off, as exact as the barriers' bytes are constant.
                found.append(Sent(what, payload, ideal, num_messages, relative=0.0))
        return found

    check_sent(axis.num_ranks, count(), count)


def test_each_message_costs_what_the_accounting_says(counted_ranks):
    gather, transfer = counted_ranks(4).run(f"{JOBS}:count_small_messages", 100, timeout_s=60)[0]
    assert gather / (4 * 3) == pytest.approx(MESSAGE_BYTES + 8, abs=8)
    assert transfer == pytest.approx(MESSAGE_BYTES + 8, abs=20)


# ---- Who calls ------------------------------------------------------------------------------------------------------------


def test_a_mesh_within_the_job_needs_its_own_ranks_only(ranks):
    """Ranks 4 to 7 form a mesh (2, 2), ranks 2 and 3 another; ranks 0 and 1 do nothing."""
    generator = np.random.default_rng(2)
    inputs = [whole_numbers(generator, (4, 4)) for _ in range(8)]
    axes = [*RankMesh((2, 2), first_rank=4).axes, RankMesh((2,), first_rank=2).axis(0)]
    calls = [(op, axis, dims, inputs) for axis in axes for op, dims in [("all_reduce", ()), ("all_to_all", (1, 0))]]
    results = ranks(8).run(f"{JOBS}:on_members", calls, timeout_s=60)
    for number, (operation, axis, dims, _) in enumerate(calls):
        for group in axis.groups():
            for rank, expected in zip(group, MEANING[operation]([inputs[r] for r in group], *dims)):
                np.testing.assert_array_equal(results[rank][number], expected)
    assert results[0] == results[1] == [None] * len(calls)


def test_groups_may_differ_in_history(ranks):
    """A long random sequence over many meshes: no two ranks make the same calls, those that they share come in one order."""
    meshes = [
        RankMesh(m, f) for m, f in [((4,), 0), ((2, 2), 0), ((2,), 0), ((2,), 2), ((2,), 1), ((3,), 1), ((1,), 3)]
    ]
    choose, generator = random.Random(3), np.random.default_rng(3)
    calls = []
    for _ in range(100):
        mesh = choose.choice(meshes)
        operation, dims = choose.choice([("all_gather", (1,)), ("all_reduce", ()), ("reduce_scatter", (0,))])
        inputs = [whole_numbers(generator, (12, choose.choice([1, 500]))) for _ in range(4)]
        inputs = [whole_numbers(generator, inputs[0].shape) for _ in range(4)]
        calls.append((operation, choose.choice(mesh.axes), dims, inputs))
    results = ranks(4).run(f"{JOBS}:on_members", calls, timeout_s=60)
    for number, (operation, axis, dims, inputs) in enumerate(calls):
        for group in axis.groups():
            for rank, expected in zip(group, MEANING[operation]([inputs[r] for r in group], *dims)):
                np.testing.assert_array_equal(results[rank][number], expected, err_msg=f"call {number}")


# ---- Point to point, refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int32", "int8", "bool"])
def test_point_to_point(ranks, dtype):
    values = [whole_numbers(np.random.default_rng(rank), (3, 2), "int8").astype(dtype) for rank in range(4)]
    got = ranks(4).run(f"{JOBS}:pass_around", values, timeout_s=60)
    for rank in range(4):
        np.testing.assert_array_equal(got[rank], values[rank - 1])


AXIS = RankMesh((2, 2)).axis(0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            ("reduce_scatter", AXIS, (0,), (3, 4), "float32"),
            "over 2 ranks of dimension 0 of a tensor of shape (3, 4): 2 does not",
        ),
        (("take_shard", AXIS, (-1,), (4, 3), "float32"), "dimension 1 of a tensor of shape (4, 3)"),
        (("all_to_all", AXIS, (0, 1), (3, 4), "float32"), "2 does not divide 3"),
        (("all_to_all", AXIS, (0, -2), (4, 4), "float32"), "splits and concatenates dimension 0"),
        (
            ("all_gather", AXIS, (2,), (4, 4), "float32"),
            "along dimension 2 of a tensor of shape (4, 4), which has 2 dimensions",
        ),
        (("all_gather", AXIS, (-3,), (4, 4), "float32"), "along dimension -3"),
        (("all_reduce", AXIS, (), (4,), "float16"), "all-reduce of float16 is not possible on CPU ranks"),
        (("reduce_scatter", AXIS, (0,), (4,), "bool"), "reduce-scatter of bool"),
        (("all_reduce", RankMesh((2,), first_rank=7).axis(0), (), (4,), "float32"), "ranks 7 to 8, but the job has 4"),
    ],
)
def test_impossible_calls_are_refused(ranks, call, words):
    for message in itertools.chain(*ranks(4).run(f"{JOBS}:refusals", [call], timeout_s=60)):
        assert words in message


def test_ranks_outside_the_mesh_are_refused(ranks):
    call = ("all_reduce", RankMesh((2,), first_rank=1).axis(0), (), (4,), "float32")
    messages = ranks(4).run_each(f"{JOBS}:refusals", [([call],), ([],), ([],), ([call],)], timeout_s=60)
    assert messages[0] == ["rank 0 is not on the mesh of ranks 1 to 2"]
    assert messages[3] == ["rank 3 is not on the mesh of ranks 1 to 2"]


def test_impossible_transfers_are_refused(ranks):
    for rank, (to_itself, beyond, half) in enumerate(ranks(2).run(f"{JOBS}:peer_refusals", timeout_s=60)):
        assert to_itself == f"rank {rank} cannot send to rank {rank}; it must be another of the ranks 0 to 1"
        assert beyond == f"rank {rank} cannot receive from rank 2; it must be another of the ranks 0 to 1"
        assert "float16" in half


def test_an_axis_of_one_costs_nothing(ranks):
    """Nothing to exchange: works for any type, and returns the tensor itself."""
    x = np.ones((2, 2))
    calls = [(op, RankAxis(1, 2, 4), dims, [x] * 4) for op, dims in [("all_gather", (0,)), ("all_reduce", ())]]
    for outputs in ranks(4).run(f"{JOBS}:on_members", calls, timeout_s=60):
        for output in outputs:
            np.testing.assert_array_equal(output, x)
