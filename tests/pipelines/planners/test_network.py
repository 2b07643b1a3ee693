"""Placements, transfers and all-reduces against hand-worked numbers and an element-wise count."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoddl.costmodel.cluster import load_cluster
from autoddl.pipelines.planners.network import (
    Network,
    place_append_first,
    place_fresh_first,
    place_scatter_first,
)

SHARED = load_cluster("v100-a")  # 25 Gb/s per node, shared; 130 GB/s per device inside
NODE = 25e9 / 8
INSIDE = 130e9


@pytest.mark.parametrize(
    ("policy", "used", "count", "placed"),
    [
        (place_fresh_first, (0, 0, 0), 3, (3, 0, 0)),
        (place_fresh_first, (3, 0, 0), 3, (0, 3, 0)),
        (place_fresh_first, (3, 0, 0), 9, (1, 4, 4)),
        (place_append_first, (3, 0, 0), 3, (1, 2, 0)),
        (place_append_first, (2, 3, 0), 3, (2, 1, 0)),
        (place_scatter_first, (0, 0, 0), 6, (2, 2, 2)),
        (place_scatter_first, (1, 1, 0), 4, (2, 2, 0)),
        (place_scatter_first, (3, 1, 0), 4, (1, 3, 0)),
        (place_scatter_first, (3, 3, 0), 4, (1, 1, 2)),  # the used ones lack room
    ],
)
def test_policies(policy, used, count, placed) -> None:
    assert policy(used, count, 4) == placed


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple).filter(lambda used: sum(used) < 4 * len(used)),
    st.data(),
)
def test_policies_place_exactly_what_there_is(used, data) -> None:
    count = data.draw(st.integers(1, 4 * len(used) - sum(used)))
    for policy in (place_fresh_first, place_append_first, place_scatter_first):
        placed = policy(used, count, 4)
        assert sum(placed) == count
        assert all(0 <= new <= 4 - old for new, old in zip(placed, used))


def test_transfers_use_the_whole_card_of_a_node() -> None:
    network = Network(SHARED)
    # 8 replicas to 8 replicas on the other machine: all bytes over one card.
    assert network.transfer((8, 0), (0, 8)).seconds_per_byte == pytest.approx(1 / NODE)
    # One device to one on the other machine has the whole card as well.
    assert network.transfer((1, 0), (0, 1)).seconds_per_byte == pytest.approx(1 / NODE)
    # Inside a machine: one link to one link; 4 to 4 side by side.
    assert network.transfer((1, 0), (1, 0)).seconds_per_byte == pytest.approx(1 / INSIDE)
    assert network.transfer((4, 0), (4, 0)).seconds_per_byte == pytest.approx(1 / 4 / INSIDE)
    # Scattered alike: replica i talks to replica i of its own machine.
    assert network.transfer((4, 4), (4, 4)).seconds_per_byte == pytest.approx(1 / 8 / INSIDE)
    # 15 replicas, 7 of them on the receiver's machine, to one: 8/15 of the bytes cross.
    assert network.transfer((8, 7), (0, 1)).seconds_per_byte == pytest.approx(8 / 15 / NODE)


def test_own_cards_are_not_shared() -> None:
    cluster = load_cluster("dgx-a100").resized(2, 8)  # a card of 200 Gb/s per device, of which NCCL reaches 24 GB/s
    card = 24e9
    network = Network(cluster)
    assert network.transfer((8, 0), (0, 8)).seconds_per_byte == pytest.approx(1 / 8 / card)
    assert network.transfer((1, 0), (0, 1)).seconds_per_byte == pytest.approx(1 / card)
    assert network.transfer((8, 0), (0, 2)).seconds_per_byte == pytest.approx(1 / 2 / card)


@given(st.data())
def test_transfer_volume_is_what_element_slices_say(data) -> None:
    placements = st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any)
    source, target = data.draw(placements), data.draw(placements)
    senders = [m for m in (0, 1) for _ in range(source[m])]
    receivers = [m for m in (0, 1) for _ in range(target[m])]
    elements = len(senders) * len(receivers)
    crossing = {0: 0, 1: 0}
    for element in range(elements):
        sender = senders[element * len(senders) // elements]
        receiver = receivers[element * len(receivers) // elements]
        crossing[sender] += sender != receiver
    cluster = load_cluster("v100-a").resized(2, 4)
    expected = Fraction(max(crossing.values()), elements)
    got = Network(cluster).transfer(source, target).seconds_per_byte
    # Inside a machine nothing takes longer than the whole micro-batch over one link.
    assert got >= float(expected) / NODE * (1 - 1e-12)
    assert got <= max(float(expected) / NODE, 1 / INSIDE) * (1 + 1e-12)


def test_all_reduce_is_hierarchical() -> None:
    network = Network(SHARED)
    nbytes = 1e9
    inner, outer = SHARED.links[1].latency_s, SHARED.links[0].latency_s
    # 8 devices of one machine: a ring over NVLink.
    assert network.all_reduce((8, 0)).time(nbytes) == pytest.approx(14 * inner + 2 * 7 / 8 * nbytes / INSIDE)
    # Both machines: the ring inside, and half of twice the bytes over each card.
    expected = 14 * inner + 2 * 7 / 8 * nbytes / INSIDE + 2 * outer + nbytes / NODE
    assert network.all_reduce((8, 8)).time(nbytes) == pytest.approx(expected)
    # One device has nothing to average.
    assert network.all_reduce((0, 1)).time(nbytes) == 0
    # Four groups at a time share the card.
    assert network.all_reduce((1, 1), sharing=4).time(nbytes) == pytest.approx(2 * outer + 4 * nbytes / NODE)


def test_the_two_grids() -> None:
    network = Network(SHARED)
    assert network.grid(8, 2, pipelines_inside=True).workers == ((1, 1),) * 8
    assert network.grid(8, 2, pipelines_inside=False).workers == ((2, 0),) * 4 + ((0, 2),) * 4
    assert network.grid(8, 2, pipelines_inside=True).sharing == 8
    assert network.grid(2, 8, pipelines_inside=False).sharing == 1
