"""Traced programs as data, and the prices of where their samples meet."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.documents import Fields
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.graph import LayerGraph, graph_from_document
from autoddl.costmodel.kinds.attention import attention
from autoddl.costmodel.kinds.opaque import crossing_steps, opaque
from autoddl.costmodel.program import Program, Result, Scaled, Source, TracedCall, at, program_from_fields

PROGRAM = Program(
    sources=(
        Source("t1", "layer", 0, shape=(Scaled(4), 8), outer=1),
        Source("t2", "constant", shape=(2,), outer=0, values=(0.5, -math.inf), dtype="float32"),
        Source("weight_0", "parameter", 0, shape=(8,), outer=0),
    ),
    calls=(
        TracedCall("reshape", {"in": ("t1",)}, {"out": ("t3",)}, {"shape": (Scaled(1), 32)}, path="a.b"),
        TracedCall("scalar_mul", {"in": ("t3",)}, {"out": ("t4",)}, {"float_operand": Scaled(2.0, power=-1)}),
        TracedCall(
            "gather_samples", {"x": ("t4",)}, {"out": ("t5",)}, {"elements": Scaled(32), "is_trained": True}, True
        ),
        TracedCall("sum_samples", {"x": ("t4",)}, {"out": ("t6",)}, {"elements": 32, "is_trained": True}, True),
        TracedCall("share_whole", {"x": ("t6",)}, {"out": ("t7",)}, {"elements": 32, "is_trained": True}),
        TracedCall("own_samples", {"x": ("t5",)}, {"out": ("t8",)}, {"elements": Scaled(32), "is_trained": False}),
    ),
    results=(Result("t8", (Scaled(1), 32), 1), Result("t4", (Scaled(1), 32), 1)),
)


def test_numbers_of_samples():
    assert at((Scaled(4, 1), 7, [Scaled(3.0, power=-1)]), 2) == (9, 7, [1.5])
    assert Source("t", "layer", shape=(Scaled(4), 8)).sample_elements == 32


def test_documents_keep_everything():
    document = PROGRAM.document()
    assert program_from_fields(Fields(document, "program")) == PROGRAM
    assert document["sources"][1]["values"] == [0.5, {"number": "-inf"}]  # JSON has no infinity


SCORES = Program(
    sources=(Source("weight_0", "parameter", 0, shape=(7, 8), outer=0),),
    calls=(TracedCall("transpose", {"input": ("weight_0",)}, {"out": ("t1",)}, {"perm": (1, 0)}),),
    results=(Result("t1", (1, 1, 8, 7, 7), 0, "add"), Result("t1", (Scaled(1), 1, 1, 7, 7), 1, "fill", -math.inf)),
)


def test_what_changes_scores_is_kept():
    layer = replace(attention("a", 7, 8, 4, causal=False, changes=2), scores=SCORES)
    graph = LayerGraph("g", "sequence", (layer,), ())
    assert graph.reads_order  # its biases belong to positions
    again = graph_from_document(graph.document(), "g")
    assert again["a"].scores == SCORES and again["a"].attributes["changes"] == 2
    with pytest.raises(UserError, match="changes is 1, its shapes say 2"):
        LayerGraph("g", "sequence", (replace(layer, attributes={**layer.attributes, "changes": 1}),), ())
    for program, is_of_scores, words in ((SCORES, False, "'add', should be none"), (PROGRAM, True, "should be add, ")):
        with pytest.raises(UserError, match=words):
            program_from_fields(Fields(program.document(), "program"), is_of_scores=is_of_scores)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"results": []}, "should have results"),
        ({"results": [{"variable": "t9"}]}, "the result 't9' is not assigned"),
        ({"calls": [{"kind": "relu", "arguments": {"x": ["t9"]}}]}, "relu reads 't9', which is not assigned before"),
        ({"calls": [{"path": "a"}]}, "field 'kind' is missing"),
        ({"sources": [{"variable": "t1", "origin": 3}]}, "origin is 3, should be a str"),
        ({"more": 1}, "unknown field"),
    ],
)
def test_invalid_documents_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        program_from_fields(Fields({**PROGRAM.document(), **change}, "program"))


def test_crossings_are_priced_by_hand():
    """4 ranks, 8 samples of 32 elements of 4 bytes."""
    axis = Axis(4, 1)
    forward, backward = crossing_steps(PROGRAM, [axis], 8, 4, 4)
    assert forward == (
        Step(Collective.ALL_GATHER, axis, 8 * 32 * 4),  # of all samples
        Step(Collective.ALL_REDUCE, axis, 32 * 4),  # of the partial sums
    )
    assert backward == (Step(Collective.ALL_REDUCE, axis, 32 * 4),)  # no gradient of untrained samples
    assert crossing_steps(PROGRAM, [], 8, 4, 4) == ((), ())


def test_layers_differ_by_what_they_send():
    layer = opaque("a", (4, 8), (1, 64), program=PROGRAM)
    silent = replace(layer, program=replace(PROGRAM, calls=PROGRAM.calls[:2], results=PROGRAM.results[1:]))
    assert layer.signature() != silent.signature()
    assert not layer.is_loss and replace(layer, program=replace(PROGRAM, is_loss=True)).is_loss
