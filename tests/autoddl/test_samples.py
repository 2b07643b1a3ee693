"""Where the samples of a trace lie, and which operators mix them."""

from __future__ import annotations

import pytest

from autoddl.costmodel.program import Scaled
from autoddl.extraction.operators import ModelTensor, Operator, OperatorGraph
from autoddl.extraction.samples import State, find_samples

BATCH = 2
N = Scaled(1)


def found(kind, inputs, output, attributes=None, scaled=None):
    """The context and the state of the output of one operator; inputs are (argument, dims, state or None if fixed)."""
    names = [f"in{i}" for i in range(len(inputs))]
    arguments: dict[str, tuple[str, ...]] = {}
    for name, (argument, _) in zip(names, inputs):
        arguments[argument] = (*arguments.get(argument, ()), name)
    op = Operator("op", kind, "", arguments, {"out": ("y",)}, attributes or {})
    dims = {**{name: shape for name, (_, shape) in zip(names, inputs)}, "y": output}
    data = [name for name in names if isinstance(dims[name][0], Scaled)]
    graph = OperatorGraph(
        operators=(op,),
        shapes={name: tuple(int(d.of(BATCH)) if isinstance(d, Scaled) else d for d in s) for name, s in dims.items()},
        inputs=tuple(data),
        variables={n: ModelTensor(n, dims[n], True) for n in names if n not in data},
        outputs=("y",),
        batch=BATCH,
        data=tuple(data),
        dims=dims,
        scaled={"op": scaled} if scaled else {},
    )
    samples = find_samples(graph)
    return samples.contexts["op"], samples.states["y"], samples.summed.get("op")


SPLIT = State("split", 0, 1)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes", "state"),
    [
        ("relu", [("x", (N, 3))], (N, 3), {}, SPLIT),
        ("broadcast_add", [("x", (N, 3)), ("y", (4, 1, 3))], (4, N, 3), {}, State("split", 1, 1)),
        # Windows: 4 for each sample, which come after its samples.
        ("reshape", [("in", (N, 4, 5))], (Scaled(4), 5), {}, SPLIT),
        ("transpose", [("in", (N, 4, 5))], (4, 5, N), {"perm": (1, 2, 0)}, State("split", 2, 1)),
        ("concat", [("in", (N, 3)), ("in", (N, 3))], (Scaled(2), 3), {"axis": 0}, State("split", 0, 2)),
        ("concat", [("in", (N, 3)), ("in", (N, 4))], (N, 7), {"axis": 1}, SPLIT),
        ("matmul", [("a", (N, 3)), ("b", (3, 5))], (N, 5), {}, SPLIT),
        ("batch_matmul", [("a", (N, 3, 4)), ("b", (N, 4, 5))], (N, 3, 5), {}, SPLIT),
        ("softmax", [("in", (N, 3))], (N, 3), {}, SPLIT),
        ("reduce_sum", [("input_tensor", (N, 3))], (N,), {"axis": (1,), "keepdims": False}, SPLIT),
        ("embedding", [("weight", (9, 3)), ("indices", (N, 4))], (N, 4, 3), {}, SPLIT),
        ("conv2d", [("in", (N, 3, 8, 8)), ("weight", (4, 3, 3, 3))], (N, 4, 6, 6), {}, SPLIT),
    ],
)
def test_operators_of_single_samples(kind, inputs, output, attributes, state):
    assert found(kind, inputs, output, attributes) == ("split", state, None)


@pytest.mark.parametrize(
    ("kind", "inputs", "output", "attributes"),
    [
        # All pairs of samples.
        ("matmul", [("a", (N, 3)), ("b", (N, 3))], (N, N), {"transpose_b": True}),
        ("softmax", [("in", (N,))], (N,), {}),
        ("var", [("input", (N, 3))], (3,), {"dim": (0,)}),
        ("roll", [("in", (N, 3))], (N, 3), {"dims": (0,)}),
        ("cumsum", [("x", (N, 3))], (N, 3), {"dim": 0}),
        # Without a rule an operator is taken to mix samples.
        ("fft", [("x", (N, 3))], (N, 3), {}),
    ],
)
def test_operators_that_mix_samples_read_all_of_them(kind, inputs, output, attributes):
    context, state, summed = found(kind, inputs, output, attributes)
    assert (context, state.kind, summed) == ("whole", "whole", None)


def test_sums_over_samples_are_sums_of_partial_results():
    sum_of = found("reduce_sum", [("input_tensor", (N, 3))], (3,), {"axis": (0,), "keepdims": False})
    assert sum_of == ("split", State("whole"), "sum")
    loss = found("binary_cross_entropy_with_logits_reduce_mean", [("input", (N, 3)), ("target", (N, 3))], (), {})
    assert loss == ("split", State("whole"), "mean")


def test_parts_of_a_concatenation_have_their_samples_first():
    """The second of three batches in one tensor: samples n to 2 n."""
    tensors = {"x": (N, 4), "all": (Scaled(3), 4), "second": (N, 4)}
    joined = Operator("cat", "concat", "", {"in": ("x", "x", "x")}, {"out": ("all",)}, {"axis": 0})
    cut = Operator("cut", "narrow", "", {"in": ("all",)}, {"out": ("second",)}, {"dim": 0, "start": 2, "length": 2})
    graph = OperatorGraph(
        operators=(joined, cut),
        shapes={
            name: tuple(int(d.of(BATCH)) if isinstance(d, Scaled) else d for d in s) for name, s in tensors.items()
        },
        inputs=("x",),
        variables={},
        outputs=("second",),
        batch=BATCH,
        data=("x",),
        dims=tensors,
        scaled={"cut": {"start": N, "length": N}},
    )
    states = find_samples(graph).states
    assert states["all"] == State("split", 0, 3) and states["second"] == SPLIT


def test_what_grows_with_the_samples_alone():
    assert found("constant", [], (N, 3), scaled={"shape": (N, 3)})[:2] == ("split", SPLIT)
    # The numbers of the samples are not alike.
    assert found("arange", [], (N,), scaled={"integer_limit": N})[0] == "whole"
    assert found("constant", [], (4, 3))[0] == "fixed"
