"""What changes of layout send inside ``nn.Graph``: the table of docs/graph-executor.md, and why other changes are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoddl.costmodel.graph_meshes import FEATURES, SAMPLES, GraphMesh, is_simple_change

pytestmark = pytest.mark.usefixtures("ranks_of_graphs")
JOBS = Path(__file__).with_name("graph_layout_jobs.py")
LENGTH = 512
ROLES = {"0": SAMPLES, "1": FEATURES}
#: Bytes that all four ranks send between evenly split layouts, as a multiple of the tensor.
SENT = {
    (((4,), "0"), ((4,), "1")): 0.75,
    (((4,), "0"), ((2, 2), "01")): 0.5,
    (((4,), "1"), ((2, 2), "10")): 0.5,
    (((4,), "1"), ((2, 2), "01")): 1.25,
    (((4,), "0"), ((2, 2), "10")): 1.25,
    (((2, 2), "01"), ((2, 2), "10")): 1.75,
}
#: The same for gathers and sums inside of layers; the last two are those of a weight that is split by columns and by rows.
INSIDE = {
    (((4,), "1"), ((4,), "B")): 3.0,
    (((4,), "P"), ((4,), "1")): 3.0,
    (((4,), "P"), ((4,), "B")): 6.0,
    (((2, 2), "01"), ((2, 2), "0B")): 1.0,
    (((2, 2), "0P"), ((2, 2), "01")): 1.0,
    (((2, 2), "P0"), ((2, 2), "B0")): 2.0,
    (((2, 2), "11"), ((2, 2), "B1")): 3.0,
    (((2, 2), "P1"), ((2, 2), "11")): 2.25,
}


def mesh_of(layout):
    sizes, states = layout
    return GraphMesh(tuple((ROLES[state], size) for state, size in zip(states, sizes)))


def test_changes_send_what_the_documentation_says(counted_ranks):
    """There and back. Slow: nn.Graph compiles twenty graphs."""
    changes = {**SENT, **{(target, source): sent for (source, target), sent in SENT.items()}, **INSIDE}
    counted = counted_ranks(4).run(f"{JOBS}:count_changes", list(changes), LENGTH)[0]
    assert all(is_right for _, is_right in counted)
    tensor_bytes = 4 * LENGTH**2
    for (change, expected), (sent, _) in zip(changes.items(), counted):
        # 512 bytes of each of at most 24 messages, and noise.
        assert sent / tensor_bytes == pytest.approx(expected, rel=0.01, abs=0.02), change


@pytest.mark.parametrize("change", SENT)
def test_changes_that_send_more_than_one_all_to_all_are_refused(change):
    source, target = map(mesh_of, change)
    assert is_simple_change(source, target) == is_simple_change(target, source) == (SENT[change] < 1)
