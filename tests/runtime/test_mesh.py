from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.errors import UserError
from autoddl.pipelines.runtime.comm.mesh import RankAxis, partners_of

from .rank_meshes import RankMesh

meshes = st.builds(
    RankMesh,
    st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple),
    first_rank=st.integers(0, 5),
)


def test_the_table_of_the_docstring():
    first, second = RankMesh((2, 4)).axes
    assert (first.stride, first.groups()) == (4, [(0, 4), (1, 5), (2, 6), (3, 7)])
    assert (second.stride, second.groups()) == (1, [(0, 1, 2, 3), (4, 5, 6, 7)])
    assert RankMesh((8,)).axis(0).groups() == [tuple(range(8))]
    assert RankMesh((2, 2), first_rank=4).axis(0).group(7) == (5, 7)


@given(mesh=meshes)
def test_axes_are_those_of_an_array(mesh):
    """numpy's row-major order of the same ranks is the reference."""
    array = np.arange(mesh.first_rank, mesh.first_rank + mesh.num_ranks).reshape(mesh.lengths)
    for i, axis in enumerate(mesh.axes):
        expected = {tuple(group) for group in np.moveaxis(array, i, -1).reshape(-1, mesh.lengths[i]).tolist()}
        assert set(axis.groups()) == expected
        assert len(axis.groups()) == len(expected)
    for coordinates, rank in np.ndenumerate(array):
        assert mesh.coordinates(int(rank)) == coordinates
        for axis, coordinate in zip(mesh.axes, coordinates):
            assert axis.index(int(rank)) == coordinate
            assert axis.group(int(rank))[coordinate] == rank


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: RankAxis(3, 1, 4), "size 3 and stride 1 does not fit 4 ranks: 3 x 1 must divide 4"),
        (lambda: RankAxis(2, 3, 8), "2 x 3 must divide 8"),
        (lambda: RankAxis(0, 1, 4), "size 0; it must be at least 1"),
        (lambda: RankAxis(2, 0, 4), "stride 0"),
        (lambda: RankAxis(2, 1, 4, -1), "first_rank -1"),
        (lambda: RankMesh((2, 0)), r"\(2, 0\) has an axis shorter than 1"),
        (lambda: RankMesh((2, 2), 4).axis(0).group(3), "rank 3 is not on the mesh of ranks 4 to 7"),
        (lambda: RankMesh((2, 2)).coordinates(4), "rank 4 is not on the mesh of ranks 0 to 3"),
    ],
)
def test_what_is_no_mesh(make, words):
    with pytest.raises(UserError, match=words):
        make()


@pytest.mark.parametrize("num_places", range(1, 10))
def test_in_a_tournament_all_pairs_meet_once(num_places):
    """In n - 1 rounds, or n if n is odd; in each, whom a place meets meets it."""
    rounds = list(zip(*(partners_of(place, num_places) for place in range(num_places))))
    assert len(rounds) == num_places - 1 + num_places % 2
    for partners in rounds:
        assert all(partners[other] == place for place, other in enumerate(partners) if other is not None)
        assert partners.count(None) == num_places % 2
    for place in range(num_places):
        met = sorted(partners[place] for partners in rounds if partners[place] is not None)
        assert met == [other for other in range(num_places) if other != place]
