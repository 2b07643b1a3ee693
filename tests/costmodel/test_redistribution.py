"""Redistributions, executed on simulated ranks and counted byte by byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import lcm, prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoddl.costmodel.cluster import Link, load_cluster
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.distribution import Distribution, canonical, prime_factors
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.exchange import Exchange, exchange_between
from autoddl.costmodel.layoutprices import LayoutPrices
from autoddl.costmodel.redistribution import Redistribution, Route, _route, redistribute, steps
from autoddl.costmodel.sbp import PartialSum, Split
from autoddl.costmodel.workload import Workload

from .simulated_ranks import Network, all_distributions, all_states, assemble, execute, reversed_route, scatter

D = Distribution.parse


def run(source: Distribution, target: Distribution, shape: tuple[int, ...], seed: int = 0) -> Route:
    """Plan, execute forward and backward, check values, bytes and adjointness; the route."""
    rng = np.random.default_rng(seed)
    route = redistribute(source, target, shape)
    tensor = rng.integers(-99, 100, shape)

    network = Network()
    start = scatter(tensor, source, rng)
    end = execute(route, start, shape, network)
    np.testing.assert_array_equal(assemble(end, target, shape), tensor)
    assert {piece.shape for piece in end} == {target.local_shape(shape)}
    check_bytes(route, network, shape, source.num_ranks)

    # <A x, y> = <x, A' y> for any values on the ranks, whether they make a tensor or not.
    noise = [rng.integers(-9, 10, piece.shape) for piece in start]
    cotangent = [rng.integers(-9, 10, piece.shape) for piece in end]
    back, backward = reversed_route(route), Network()
    pulled = execute(back, cotangent, shape, backward)
    pushed = execute(route, noise, shape)
    assert sum((a * b).sum() for a, b in zip(pushed, cotangent)) == sum((a * b).sum() for a, b in zip(noise, pulled))
    check_bytes(back, backward, shape, source.num_ranks)
    assert sum(backward.received.values()) == sum(network.received.values())
    # ... and the gradient of a tensor at the target arrives as one at the source.
    gradient = execute(back, scatter(tensor, target.dual(), rng), shape)
    np.testing.assert_array_equal(assemble(gradient, source.dual(), shape), tensor)
    return route


def check_bytes(route: Route, network: Network, shape: tuple[int, ...], num_ranks: int) -> None:
    """What the ranks received is what the steps say that they send, each rank as much as any other where chunks are equal."""
    if any(isinstance(part, Exchange) for part in route):
        check_exchanged_bytes(route, network, shape, num_ranks)
        return
    predicted = sum(step.sent_bytes for step in steps(route, prod(shape)))
    received = [network.received.get(rank, 0) for rank in range(num_ranks)]
    assert sum(received) == pytest.approx(predicted * num_ranks, rel=1e-12, abs=1e-9)
    if not any(step.collective is Collective.ALL_REDUCE for step in steps(route, 1.0)):
        assert received == pytest.approx([predicted] * num_ranks, rel=1e-12, abs=1e-9)


def check_exchanged_bytes(route: Route, network: Network, shape: tuple[int, ...], num_ranks: int) -> None:
    """On average a rank sends what the steps say; the busiest at most as much as is priced, and on one level just that."""
    found = steps(route, prod(shape))
    assert sum(network.received.values()) == pytest.approx(sum(s.mean_sent_bytes for s in found) * num_ranks)
    assert len(network.pairs) == pytest.approx(sum(s.mean_messages for s in found) * num_ranks)
    busiest = max([*network.received.values(), *network.sent.values()], default=0)
    priced = sum(step.sent_bytes for step in found)
    assert busiest <= priced + 1e-9 and (busiest >= priced - 1e-9 or len(found) > 1)
    assert all(step.sent_bytes >= step.mean_sent_bytes - 1e-9 for step in found)


def shape_for(*ends: Distribution, num_dims: int, extra: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The smallest shape that divides at all ends, times ``extra``."""
    sizes = [end.split_sizes(num_dims) for end in ends]
    extra = extra or (1,) * num_dims
    return tuple(lcm(*(size[dim] for size in sizes)) * extra[dim] for dim in range(num_dims))


def sent(route: Route, shape: tuple[int, ...]) -> float:
    return sum(step.sent_bytes for step in steps(route, prod(shape)))


def as_text(route: Route, shape: tuple[int, ...]) -> list[tuple[str, int, float]]:
    return [(step.collective.value, step.axis.size, step.nbytes) for step in steps(route, prod(shape))]


# --------------------------------------------------------------------------------------------------- any two distributions


def ordered_factorisations(number: int) -> list[tuple[int, ...]]:
    if number == 1:
        return [()]
    divisors = [d for d in range(2, number + 1) if number % d == 0]
    return [(d, *rest) for d in divisors for rest in ordered_factorisations(number // d)]


@st.composite
def distributions(draw, num_ranks: int, num_dims: int, num_levels: int = 1) -> Distribution:
    """Any mesh over the ranks, any states, axes in any order of cutting inside one level."""
    meshes = st.sampled_from(ordered_factorisations(num_ranks))
    states = st.sampled_from(all_states(num_dims))
    if num_levels == 2:
        inner = draw(st.sampled_from([d for d in range(1, num_ranks + 1) if num_ranks % d == 0]))
        outer = num_ranks // inner
        levels = [draw(st.sampled_from(ordered_factorisations(size))) for size in (outer, inner)]
        return Distribution.on_mesh([[(size, draw(states)) for size in level] for level in levels])
    mesh = draw(meshes)
    plain = Distribution.on_mesh([[(size, draw(states)) for size in mesh]])
    order = draw(st.permutations(range(len(mesh))))
    return Distribution(tuple(plain.axes[i] for i in order), tuple(plain.states[i] for i in order))


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_random_pairs_arrive_with_the_bytes_that_are_priced(data):
    num_ranks = data.draw(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 15, 16, 18, 20, 24]))
    num_dims = data.draw(st.integers(1, 3))
    source = data.draw(distributions(num_ranks, num_dims))
    target = data.draw(distributions(num_ranks, num_dims))
    extra = data.draw(st.tuples(*[st.sampled_from([1, 1, 2, 3])] * num_dims))
    run(source, target, shape_for(source, target, num_dims=num_dims, extra=extra))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_two_levels_cut_at_the_same_place(data):
    outer, inner = data.draw(st.sampled_from([(2, 2), (2, 4), (4, 2), (3, 4), (2, 6), (4, 4)]))
    states = st.sampled_from(all_states(2))
    ends = []
    for _ in range(2):
        meshes = [data.draw(st.sampled_from(ordered_factorisations(size))) for size in (outer, inner)]
        ends.append(Distribution.on_mesh([[(size, data.draw(states)) for size in mesh] for mesh in meshes]))
    route = run(*ends, shape_for(*ends, num_dims=2))
    for step in steps(route, 1.0):
        # No step runs over the boundary between the nodes, and each knows its level.
        assert step.axis.level == (0 if step.axis.stride >= inner else 1)
        assert step.axis.stride * step.axis.size <= (outer * inner if step.axis.level == 0 else inner)


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (2, 3)], ids=str)
def test_every_pair_on_a_small_mesh(mesh):
    ends = all_distributions(mesh, 2)
    for source, target in product(ends, ends):
        run(source, target, shape_for(source, target, num_dims=2))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("(S0:2, S1:4)", "(S0:4, S1:2)"),
        ("(S1:2, S0:4)", "(S0:4, S1:2)"),
        ("(S0:2, P:4)", "(B:4, S1:2)"),
        ("(S0:2, S1:3)", "(S0:3, S1:2)"),
        ("(S0:2, P:3)", "(S1:3, B:2)"),
        ("(P:2, S0:6)", "(S0:3, P:4)"),
        ("(S0:4 | S1:2)", "(S1:4 | S0:2)"),
        ("(S0:2, S1:2 | S0:2, S1:2)", "(S1:2, S0:2 | P:2, B:2)"),
        ("(S0:2@4, S1:2@1, S1:2@2)", "(S0:4, S1:2)"),
    ],
)
def test_named_pairs(source, target):
    run(D(source), D(target), shape_for(D(source), D(target), num_dims=2))


def test_meshes_without_a_common_refinement_go_through_what_both_can_express():
    route = run(D("(S0:2, S1:3)"), D("(S0:3, S1:2)"), (6, 6))
    assert len(route) == 2
    assert str(route[0].target.states) == str(route[1].source.states)
    # Split over all ranks in between (all-to-alls), not copied everywhere (which would send five sixths).
    assert {step.collective for step in steps(route, 1.0)} == {Collective.ALL_TO_ALL}
    assert sent(route, (6, 6)) < 5 / 6 * 36


def test_staying_costs_nothing():
    for text in ("(S0:4, B:2, S1:8)", "(P:2, S1:2)", "()"):
        route = redistribute(D(text), D(text), (64, 64))
        assert [move for part in route for move in part.moves] == []


def test_axes_of_length_one_change_nothing():
    with_units = redistribute(D("(S0:1, S1:4, P:1)"), D("(B:1, B:4)"), (4, 4))
    assert as_text(with_units, (4, 4)) == as_text(redistribute(D("(S1:4)"), D("(B:4)"), (4, 4)), (4, 4))


# ------------------------------------------------------------------------------------------------- the cases of the paper


@pytest.mark.parametrize(("p0", "p1", "p2"), [(2, 2, 2), (1, 4, 2), (2, 1, 4), (4, 2, 1), (3, 2, 2)])
def test_output_of_a_product_is_reduce_scattered_over_p2(p0, p1, p2):
    """(S0:p0, S1:p1, P:p2) -> (S0:p0, S1:p1, S1:p2): n is the unreduced output of a device."""
    rows, features = 2 * p0, 4 * p1 * p2
    route = run(D(f"(S0:{p0}, S1:{p1}, P:{p2})"), D(f"(S0:{p0}, S1:{p1}, S1:{p2})"), (rows, features))
    expected = [("reduce-scatter", p2, rows * features / (p0 * p1))] if p2 > 1 else []
    assert as_text(route, (rows, features)) == expected


@pytest.mark.parametrize(("q0", "q1", "q2"), [(2, 2, 2), (1, 4, 2), (2, 1, 4), (4, 2, 1), (3, 2, 2)])
def test_input_of_a_product_is_all_gathered_over_q1(q0, q1, q2):
    """(S0:q0, S1:q1, S1:q2) -> (S0:q0, B:q1, S1:q2), features innermost first: n is the gathered input of a device.

    In the canonical order q2 cuts first, so what q1 gathers is one contiguous slice.
    """
    rows, features = 2 * q0, 4 * q1 * q2
    canonical_order = D(f"(S0:{q0}@{q1 * q2}, S1:{q2}@1, S1:{q1}@{q2})")
    route = run(canonical_order, D(f"(S0:{q0}, B:{q1}, S1:{q2})"), (rows, features))
    expected = [("all-gather", q1, rows * features / (q0 * q2))] if q1 > 1 else []
    assert as_text(route, (rows, features)) == expected


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 9, 16, 25, 27, 32])
def test_a_change_of_p0_is_one_all_to_all(num_ranks):
    """On one level, one p0 dividing the other: the formula's size, (r - 1)/r of the local tensor over r = their ratio.

    (Of powers of primes: the meshes of p0 = 2 and p0 = 3 of 6 ranks have no common refinement.)
    """
    assert len(set(prime_factors(num_ranks))) == 1
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    shape = (num_ranks, num_ranks)
    for p0, q0 in product(divisors, divisors):
        if p0 == q0:
            continue
        ratio = max(p0, q0) // min(p0, q0)
        source, target = canonical(((p0, num_ranks // p0),)), canonical(((q0, num_ranks // q0),))
        assert as_text(redistribute(source, target, shape), shape) == [("all-to-all", ratio, num_ranks)]


def test_a_change_of_p0_along_a_chain_of_meshes_is_one_all_to_all_for_composite_numbers_too():
    for p0, q0 in [(1, 2), (1, 4), (2, 4), (2, 12), (1, 12), (4, 12), (3, 6), (6, 12), (12, 6)]:
        source, target = canonical(((p0, 12 // p0),)), canonical(((q0, 12 // q0),))
        route = redistribute(source, target, (12, 12))
        ratio = max(p0, q0) // min(p0, q0)
        assert as_text(route, (12, 12)) == [("all-to-all", ratio, 12)], (p0, q0)


# ------------------------------------------------------------------------------------------------ canonical to canonical


def classes(levels: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
    return list(product(*([(d, size // d) for d in range(1, size + 1) if size % d == 0] for size in levels)))


@pytest.mark.parametrize("levels", [(4,), (8,), (6,), (12,), (2, 2), (2, 4), (4, 2), (3, 2), (2, 6)], ids=str)
def test_canonical_to_canonical(levels):
    for a, b in product(classes(levels), repeat=2):
        source, target = canonical(a), canonical(b)
        run(source, target, shape_for(source, target, num_dims=2))


@pytest.mark.parametrize("levels", [(8,), (2, 4), (4, 4)], ids=str)
def test_powers_of_two_never_gather(levels):
    """Between evenly split tensors only all-to-alls are needed, if the tensor has digits enough to park in."""
    num_ranks = prod(levels)
    for a, b in product(classes(levels), repeat=2):
        route = redistribute(canonical(a), canonical(b), (num_ranks**2, num_ranks**2))
        assert {step.collective for step in steps(route, 1.0)} <= {Collective.ALL_TO_ALL}


@pytest.mark.parametrize("links", [None, (5e-6, 25e9), (1e-4, 25e9)], ids=["dgx-a100", "equal", "slow to start"])
@pytest.mark.parametrize("levels", [(8,), (12,), (2, 4), (6, 4), (3, 4), (3, 8)], ids=str)
def test_smaller_micro_batches_never_make_a_step_cheaper(levels, links):
    """What the sweep over micro-batches rests on: k passes of 1/k of the samples cost as much, or more, or the prices say so."""
    cluster = load_cluster("dgx-a100").resized(*((1, *levels) if len(levels) == 1 else levels))
    cluster = cluster.with_links(*links) if links else cluster
    passes = (1, 2, 3, 4, 6, prod(levels))
    for a, b in product(classes(levels), repeat=2):
        rows, features = shape_for(canonical(a), canonical(b), num_dims=2)
        whole, prices = rows * lcm(*passes), LayoutPrices(cluster)
        cost = {}
        for k in passes:
            workload = Workload(whole, whole // k, "mixed")
            cost[k] = prices.costs((features, features, 1, 1000 * features), (a,), (b,), workload)[0, 0]
        for few, many in product(passes, passes):
            if many % few == 0:
                assert cost[few] <= cost[many] * (1 + 1e-12) or prices.may_shrink, (a, b, few, many)
        if set(prime_factors(prod(levels))) == {2}:
            assert not prices.may_shrink


def test_prices_say_where_smaller_micro_batches_may_be_cheaper():
    """From p0 = 1 to 3 of three nodes, on links as fast as those inside: 24 rows go by moves, 3 by an exchange of fewer bytes."""
    source, target = ((1, 3), (1, 8)), ((3, 1), (1, 8))
    cluster, elements = load_cluster("dgx-a100").resized(3, 8), 24 * 10**6
    faster_inside = replace(cluster, links=(Link(5e-6, 25e9), Link(2e-6, 300e9)))
    for links, may_shrink in [(faster_inside, False), (cluster.with_links(5e-6, 25e9), True)]:
        prices = LayoutPrices(links)
        large, small = (
            prices.costs((24, 24, 1, elements), (source,), (target,), Workload(24, samples, "mixed"))[0, 0]
            for samples in (24, 3)
        )
        assert (small < large, prices.may_shrink) == (may_shrink, may_shrink)


# ----------------------------------------------------------------- meshes without a common refinement: exchanges of pieces


def canonical_pairs(levels: tuple[int, ...]) -> list[tuple[Distribution, Distribution]]:
    return [(canonical(a), canonical(b)) for a, b in product(classes(levels), repeat=2) if a != b]


def always(levels: tuple[int, ...]) -> tuple[int, int]:
    """A shape that divides for every route."""
    return (prod(levels) ** 2,) * 2


def by_level(steps_) -> dict[int, tuple[float, float]]:
    """(bytes, messages) of the busiest rank on each network level."""
    loads: dict[int, tuple[float, float]] = {}
    for step in steps_:
        nbytes, messages = loads.get(step.axis.level, (0.0, 0.0))
        loads[step.axis.level] = nbytes + step.sent_bytes, messages + step.messages
    return loads


@pytest.mark.parametrize("levels", [(3, 8), (12, 8), (6,), (12,), (6, 6), (5, 4), (9, 4), (8, 8)], ids=str)
def test_even_splits_are_never_gathered(levels):
    """Whatever changes, no rank has more than its share on the way, and a level outside of all that changes carries nothing."""
    for a, b in product(classes(levels), repeat=2):
        found = steps(redistribute(canonical(a), canonical(b), always(levels)), prod(levels))
        assert all(step.collective is Collective.ALL_TO_ALL for step in found), (a, b)
        assert all(step.nbytes == pytest.approx(1.0) for step in found), (a, b)
        touched = [level for level in range(len(levels)) if a[level] != b[level]]
        assert all(step.axis.level >= min(touched) for step in found), (a, b)
        # 3 x 8 ranks used to gather over all of them, and sent 23 times their share; 12 x 8 ranks 95 times.
        assert all(nbytes < 5.0 for nbytes, _ in by_level(found).values()), (a, b)


@pytest.mark.parametrize(
    ("levels", "count"), [((6,), 12), ((3, 8), 20), ((12,), 30), ((6, 6), 12), ((12, 8), 3)], ids=str
)
def test_exchanges_on_simulated_ranks(levels, count):
    """Some pairs, forward and backward; what ranks of an exchange receive is just what they lack."""
    pairs = [pair for pair in canonical_pairs(levels) if isinstance(redistribute(*pair, always(levels))[0], Exchange)]
    rng = np.random.default_rng(prod(levels))
    assert len(pairs) >= 2
    for which in rng.permutation(len(pairs))[:count]:
        source, target = pairs[which]
        shape = shape_for(source, target, num_dims=2)
        route = run(source, target, shape)
        assert isinstance(route[0], Exchange), "it divides wherever both ends do"
        network = Network()
        execute(route, scatter(np.zeros(shape), source, rng), shape, network)
        share = prod(shape) // source.num_ranks
        for rank in range(source.num_ranks):
            ends = [end.slices(rank, shape) for end in (source, target)]
            kept = prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(*ends))
            assert network.received.get(rank, 0) == network.sent.get(rank, 0) == share - kept


def test_an_exchange_worked_by_hand():
    """The table of the module's docstring: ranks send three pieces of a third of their part, or keep one and send two."""
    (step,) = steps(redistribute(canonical(((1, 6),)), canonical(((3, 2),)), (6, 6)), 36 * 4)
    assert (step.axis.size, step.messages, step.sent_bytes) == (6, 3, 6 * 4)
    # Ranks 0 and 5 keep one.
    assert step.mean_messages == (2 + 3 + 3 + 3 + 3 + 2) / 6
    assert step.mean_sent_bytes == pytest.approx(step.mean_messages * 2 * 4)
    # 3 messages of 5 us and 24 bytes at 1 GB/s, on the only level.
    link = load_cluster("dgx-a100").resized(1, 6).with_links(5e-6, 1e9)
    assert link.time(step) == pytest.approx(3 * 5e-6 + 24 / 1e9)


def test_levels_of_an_exchange_run_one_after_another():
    """Three nodes of two, from p0 = 1 and 2 to p0 = 3 and 1: each message counts where its ranks are."""
    levels = (3, 2)
    source, target, shape = canonical(((1, 3), (2, 1))), canonical(((3, 1), (1, 2))), (6, 6)
    route = redistribute(source, target, shape)
    loads: dict[tuple[int, str, int], list[int]] = {}
    for rank, other in product(range(6), repeat=2):
        mine, wanted = source.slices(rank, shape), target.slices(other, shape)
        size = prod(max(0, min(a.stop, b.stop) - max(a.start, b.start)) for a, b in zip(mine, wanted))
        if rank != other and size:
            level = 0 if rank // levels[1] != other // levels[1] else 1
            for key in ((level, "sends", rank), (level, "gets", other)):
                loads.setdefault(key, []).append(size)
    found = by_level(steps(route, 36))
    assert isinstance(route[0], Exchange) and set(found) == {0, 1}
    for level, (nbytes, messages) in found.items():
        own = [sizes for key, sizes in loads.items() if key[0] == level]
        assert (nbytes, messages) == (pytest.approx(max(map(sum, own))), max(map(len, own)))


@pytest.mark.parametrize("levels", [(3, 8), (12, 8), (12,), (6, 6)], ids=str)
def test_exchanges_are_never_slower(levels):
    """Than the moves that they replace, on any links; where these gather, no level carries more bytes for it."""
    num_exchanges = num_gathers = 0
    for source, target in canonical_pairs(levels):
        chosen = redistribute(source, target, always(levels))
        moves = _route(source, target, always(levels))
        assert moves is not None
        if not isinstance(chosen[0], Exchange):
            assert chosen == moves, "what is as good has not changed"
            continue
        num_exchanges += 1
        before, after = (by_level(steps(route, prod(levels))) for route in (moves, chosen))
        gathers = any(step.collective is Collective.ALL_GATHER for step in steps(moves, 1.0))
        num_gathers += gathers
        for level, (nbytes, messages) in after.items():
            assert nbytes <= before[level][0] + 1e-9
            assert messages <= before[level][1] or gathers
    assert num_exchanges > 0
    # All 18 of 56 pairs on 3 x 8 ranks, and 144 of 552 on 12 x 8.
    assert num_gathers == {(3, 8): 18, (12, 8): 144}.get(levels, num_gathers)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_exchanges_between_any_even_splits(data):
    """Those that are not chosen, too: meshes and orders of axes of any kind."""
    num_ranks = data.draw(st.sampled_from([2, 4, 6, 8, 12, 18]))
    ends = [data.draw(distributions(num_ranks, 2)) for _ in range(2)]
    ends = [Distribution(e.axes, tuple(s if isinstance(s, Split) else Split(0) for s in e.states)) for e in ends]
    exchange = exchange_between(*ends, 2)
    assert exchange is not None
    shape = shape_for(*ends, num_dims=2)
    rng, network = np.random.default_rng(0), Network()
    tensor = rng.integers(-99, 100, shape)
    end = execute((exchange,), scatter(tensor, ends[0], rng), shape, network)
    np.testing.assert_array_equal(assemble(end, ends[1], shape), tensor)
    check_exchanged_bytes((exchange,), network, shape, num_ranks)


def test_copies_and_summands_are_never_exchanged():
    for source, target in [("(S0:2, S1:3)", "(B:3, S1:2)"), ("(P:2, S1:3)", "(S0:3, S1:2)")]:
        assert exchange_between(D(source), D(target), 2) is None


# --------------------------------------------------------------------------------------------------- lower bounds, errors


def elements_to_receive(source: Distribution, target: Distribution, shape: tuple[int, ...]) -> float:
    """What the ranks of an evenly split or copied tensor have to receive at least, on average: what they do not hold."""
    index = np.arange(prod(shape)).reshape(shape)
    missing = 0
    for rank in range(source.num_ranks):
        needed = set(index[target.slices(rank, shape)].flat)
        missing += len(needed - set(index[source.slices(rank, shape)].flat))
    return missing / source.num_ranks


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_nothing_sends_less_than_it_must(data):
    num_ranks = data.draw(st.sampled_from([4, 6, 8, 12]))
    source, target = (data.draw(distributions(num_ranks, 2)) for _ in range(2))
    if any(isinstance(state, PartialSum) for end in (source, target) for state in end.states):
        return
    shape = shape_for(source, target, num_dims=2)
    assert sent(redistribute(source, target, shape), shape) >= elements_to_receive(source, target, shape) - 1e-9


@pytest.mark.parametrize(
    ("source", "target"),
    [("(S0:4, S1:2)", "(S0:4, B:2)"), ("(B:8)", "(S0:8)"), ("(S0:8)", "(S1:8)"), ("(S0:2, S1:4)", "(B:8)")],
)
def test_simple_redistributions_are_optimal(source, target):
    shape = (8, 8)
    route = redistribute(D(source), D(target), shape)
    assert sent(route, shape) == elements_to_receive(D(source), D(target), shape)


def test_local_changes_send_nothing():
    for source, target in [("(B:4)", "(S0:4)"), ("(B:4)", "(P:4)"), ("(S1:4)", "(P:4)"), ("(B:2, S0:2)", "(P:2, P:2)")]:
        route = run(D(source), D(target), (4, 4))
        assert steps(route, 16) == ()
        assert any(part.moves for part in route)


def test_sums_end_as_copies_by_one_all_reduce():
    assert as_text(run(D("(P:4)"), D("(B:4)"), (4, 4)), (4, 4)) == [("all-reduce", 4, 16)]


def test_outer_level_gathers_while_the_tensor_is_small():
    route = run(D("(S0:2 | S0:4)"), D("(B:2 | B:4)"), (8, 1))
    assert [(s.axis.level, s.axis.size, s.nbytes) for s in steps(route, 8)] == [(0, 2, 2), (1, 4, 8)]
    back = reversed_route(route)
    assert [(s.collective.value, s.axis.level, s.nbytes) for s in steps(back, 8)] == [
        ("reduce-scatter", 1, 8),
        ("reduce-scatter", 0, 2),
    ]


def test_a_reversed_route_reversed_is_the_route():
    for source, target in [("(S0:2, P:4)", "(B:4, S1:2)"), ("(S0:2, S1:3)", "(S0:3, S1:2)")]:
        route = redistribute(D(source), D(target), (24, 24))
        assert reversed_route(reversed_route(route)) == route


@pytest.mark.parametrize(
    ("source", "target", "shape", "message"),
    [
        ("(S0:4)", "(S0:2)", (8, 8), "(S0:4) is on 4 ranks, (S0:2) on 2"),
        ("(S0:4)", "(B:4)", (6, 8), "dimension 0 of shape (6, 8) does not divide into the 4 slices of (S0:4)"),
        ("(B:4)", "(S1:4)", (8, 6), "dimension 1 of shape (8, 6)"),
        ("(B:4)", "(S2:4)", (8, 8), "(S2:4) splits dimension 2"),
    ],
)
def test_errors_name_the_fault(source, target, shape, message):
    with pytest.raises(UserError, match=r"^[^\n]*$") as error:
        redistribute(D(source), D(target), shape)
    assert message in str(error.value)


def test_executor_notices_a_missing_move():
    """The checks above are able to fail."""
    source, target, shape = D("(S0:2, S1:2)"), D("(B:2, S0:2)"), (4, 4)
    (part,) = redistribute(source, target, shape)
    assert len(part.moves) == 2
    broken = Redistribution(part.source, part.target, part.digits, part.holdings, part.moves[:1], part.fractions[:1])
    rng = np.random.default_rng(0)
    tensor = rng.integers(-99, 100, shape)
    end = execute((broken,), scatter(tensor, source, rng), shape)
    with pytest.raises((AssertionError, ValueError)):
        np.testing.assert_array_equal(assemble(end, target, shape), tensor)
