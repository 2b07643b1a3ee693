"""Meshes of nn.Graph against their definition: what every rank's place in the strategy is."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.graph_meshes import (
    EAGER,
    EXECUTORS,
    FEATURES,
    GRAPH,
    SAMPLES,
    GraphMesh,
    are_one_family,
    families_of,
    graph_mesh,
    is_executable,
    is_simple_change,
    why_not_executable,
    why_not_graph,
)
from autoddl.costmodel.strategy import Strategy, transposed
from autoddl.zoo import mlp

ROLES = (SAMPLES, FEATURES)
Axes = tuple[tuple[str, int], ...]


# ---- A naive definition --------------------------------------------------------------------------------------------------------


def places(axes: list[tuple[str, int]]) -> list[tuple[int, ...]]:
    """The place of each rank, in order: its slice of the samples and of the features, with outer axes as the leading digits."""
    found = []
    for digits in product(*(range(length) for _, length in axes)):
        place = dict.fromkeys(ROLES, 0)
        for (role, length), digit in zip(axes, digits):
            place[role] = place[role] * length + digit
        found.append(tuple(place.values()))
    return found


def factors(strategy: Strategy) -> list[tuple[str, int]]:
    return [(role, n) for p0, p1, p2 in strategy.splits for role, n in ((SAMPLES, p0), (FEATURES, p1), (FEATURES, p2))]


def meshes_of_two_axes(num_devices: int) -> list[Axes]:
    """All meshes of at most two axes, none of length 1, on so many devices."""
    if num_devices == 1:
        return [((SAMPLES, 1),)]
    found: list[Axes] = [((role, num_devices),) for role in ROLES]
    for outer in range(2, num_devices // 2 + 1):
        if num_devices % outer == 0:
            found += [((one, outer), (other, num_devices // outer)) for one, other in (ROLES, ROLES[::-1])]
    return found


@st.composite
def all_strategies(draw: st.DrawFn, largest: int = 48) -> Strategy:
    """One to three levels of small sizes, Summa too."""
    levels = [tuple(draw(st.sampled_from([1, 1, 2, 3, 4])) for _ in range(3)) for _ in range(draw(st.integers(1, 3)))]
    while prod(map(prod, levels)) > largest:
        levels[draw(st.integers(0, len(levels) - 1))] = (1, 1, 1)
    return Strategy(tuple(levels), summa=draw(st.sampled_from([False] * 9 + [True])))


@given(all_strategies())
@settings(max_examples=300)
def test_a_mesh_is_the_one_where_every_rank_has_its_place(strategy):
    """Of all meshes of at most two axes at most one does; there is a mesh if and only if there is such a one."""
    expected = places(factors(strategy))
    found = [mesh for mesh in meshes_of_two_axes(strategy.num_devices) if places(list(mesh)) == expected]
    assert len(found) <= 1
    mesh = graph_mesh(strategy)
    both = strategy.p1 > 1 and strategy.p2 > 1
    assert mesh == (None if strategy.summa or both or not found else GraphMesh(found[0]))
    why = why_not_graph(strategy)
    assert (why == "") == (mesh is not None) and "\n" not in why and ("Summa" in why) == strategy.summa


@given(all_strategies(), st.integers(0, 3))
def test_levels_of_one_device_change_nothing(strategy, where):
    where = min(where, len(strategy.splits))
    splits = (*strategy.splits[:where], (1, 1, 1), *strategy.splits[where:])
    assert graph_mesh(Strategy(splits, strategy.summa)) == graph_mesh(strategy)


@given(all_strategies(), st.sampled_from([0, 1, 2]), st.integers(1, 4), st.integers(1, 4))
def test_a_level_of_one_role_may_be_one_or_two(strategy, which, outer, inner):
    """(nodes and a part of a node as one axis)"""

    def level(length: int) -> tuple[int, int, int]:
        return tuple(length if role == which else 1 for role in range(3))  # type: ignore[return-value]

    one = Strategy((level(outer * inner), *strategy.splits), strategy.summa)
    two = Strategy((level(outer), level(inner), *strategy.splits), strategy.summa)
    assert graph_mesh(one) == graph_mesh(two)


@given(all_strategies())
def test_a_transposed_matrix_has_the_same_mesh(strategy):
    """So that an embedding and a head that share a weight are executed alike."""
    plain = Strategy(strategy.splits)
    assert graph_mesh(plain) == graph_mesh(transposed(plain))


@pytest.mark.parametrize(
    ("splits", "mesh"),
    [
        (((1, 1, 1),), "(samples:1)"),
        (((1, 1, 1), (1, 1, 1)), "(samples:1)"),
        (((4, 1, 1),), "(samples:4)"),
        (((2, 1, 1), (8, 1, 1)), "(samples:16)"),
        (((2, 1, 1), (4, 2, 1)), "(samples:8, features:2)"),
        (((1, 1, 2), (1, 1, 8)), "(features:16)"),
        (((1, 2, 1), (2, 1, 1)), "(features:2, samples:2)"),
        (((2, 2, 2),), "None"),
        (((1, 2, 1), (2, 2, 1)), "None"),
        (((2, 2, 1), (2, 2, 1)), "None"),
    ],
)
def test_examples(splits, mesh):
    assert str(graph_mesh(Strategy(splits))) == mesh


def test_reasons():
    assert why_not_graph(Strategy(((2, 2, 1), (2, 2, 1)))) == (
        "nn.Graph compiles meshes of at most 2 axes, this one has 4 (samples:2, features:2, samples:2, features:2)"
    )
    assert why_not_graph(Strategy(((2, 2, 2),))).startswith("its weight is split by columns (p1) and by rows (p2)")
    assert why_not_graph(Strategy(((2, 2, 1),), summa=True)) == "nn.Graph has no Summa product"


@pytest.mark.parametrize("num_devices", [1, 2, 4, 6, 12, 64])
def test_families_are_the_largest_sets_in_which_every_change_is_simple(num_devices):
    meshes = [GraphMesh(axes) for axes in meshes_of_two_axes(num_devices)]
    found = {frozenset(family.split("|")[1:]) for family in families_of(GRAPH, num_devices)}
    sets = {
        frozenset(chosen)
        for size in (1, 2, 3)
        for chosen in combinations(meshes, size)
        if all(is_simple_change(*pair) for pair in combinations(chosen, 2))
    }
    largest = {frozenset(map(str, one)) for one in sets if not any(one < other for other in sets)}
    assert found == (largest if num_devices > 1 else {frozenset()})
    assert families_of(EAGER, num_devices) == (EAGER,)


def test_strategies_of_one_family():
    data, model = Strategy(((8, 1, 1),)), Strategy(((1, 8, 1),))
    columns, rows, other = Strategy(((4, 2, 1),)), Strategy(((4, 1, 2),)), Strategy(((2, 4, 1),))
    assert are_one_family(GRAPH, [data, columns, rows]) and are_one_family(GRAPH, [data, model])
    assert not are_one_family(GRAPH, [columns, other]) and not are_one_family(GRAPH, [columns, model])
    assert not are_one_family(GRAPH, [Strategy(((2, 2, 2),))]) and are_one_family(EAGER, [columns, other])


def test_the_first_layer_that_cannot_be_executed_is_named():
    graph = mlp([64, 64, 64])
    first, second = (layer.name for layer in graph.layers)
    good, bad, other = Strategy(((4, 2, 1),)), Strategy(((2, 2, 2),)), Strategy(((2, 4, 1),))
    for executor in EXECUTORS:
        assert why_not_executable(executor, graph, {first: good, second: good}) == ""
    assert why_not_executable(EAGER, graph, {first: good, second: bad}) == ""
    assert why_not_executable(GRAPH, graph, {first: good, second: bad}).startswith(
        f"executor 'graph' cannot execute {second} at (2,2,2): its weight is split by columns"
    )
    assert why_not_executable(GRAPH, graph, {first: good, second: other}) == (
        f"executor 'graph' cannot change the layout of the input of {second} from (samples:4, features:2) to "
        "(samples:2, features:4): nn.Graph would send more than the price; only one mesh axis may change"
    )
    assert is_executable(GRAPH, Strategy(((2, 1, 1), (1, 2, 1))))
