"""The formulas of links, and how they are written."""

from __future__ import annotations

import pytest

from .emulated import ClusterSize, shown
from .links import UNLIMITED, Link, LinkState, parse_link


@pytest.mark.parametrize("size", [1, 1500, 1 << 16])
def test_a_packet_takes_its_bytes_over_the_bandwidth(size):
    """On wires that were idle: once, not for the sender and again for the receiver."""
    sender, receiver = LinkState(Link(1e6)), LinkState(Link(1e6))
    assert receiver.receive(sender.send(5.0, size), size) == pytest.approx(5.0 + size / 1e6)


def test_packets_wait_for_each_other():
    """No burst: n packets at once take n times one, and what was idle before does not count."""
    state = LinkState(Link(1e6))
    assert [state.send(100.0, 1000) for _ in range(4)] == pytest.approx([100.001, 100.002, 100.003, 100.004])


def test_the_slower_wire_decides():
    fast, slow = LinkState(Link(4e6)), LinkState(Link(1e6))
    arrived = [slow.receive(fast.send(0.0, 1000), 1000) for _ in range(3)]
    assert arrived == pytest.approx([0.001, 0.002, 0.003])


def test_two_senders_share_the_receivers_wire():
    senders, receiver = [LinkState(Link(1e6)) for _ in range(2)], LinkState(Link(1e6))
    arrived = [receiver.receive(sender.send(0.0, 1000), 1000) for sender in senders for _ in range(2)]
    assert max(arrived) == pytest.approx(0.004)


def test_connections_of_a_loopback_do_not_wait_for_each_other():
    state = LinkState(Link(1e6))
    assert [state.send(0.0, 1000, name) for name in "aab"] == pytest.approx([0.001, 0.002, 0.001])


@pytest.mark.parametrize(
    ("text", "link"),
    [
        ("300Mbit", Link(37.5e6)),
        ("2ms", Link(latency_s=2e-3)),
        ("1.5Gbit,50us", Link(187.5e6, 50e-6)),
        ("0s", UNLIMITED),
    ],
)
def test_links_are_read(text, link):
    assert parse_link(text) == link


@pytest.mark.parametrize("text", ["", "300", "300Mbit;2ms", "fast", "2m"])
def test_what_is_no_link_is_refused(text):
    with pytest.raises(ValueError, match="should be a bandwidth, a latency or both"):
        parse_link(text)


def test_a_cluster_is_described():
    size = ClusterSize(
        2, 4, parse_link("300Mbit,1ms"), other_wires={"host2": parse_link("100Mbit")}, cores={"host1": 0.5}
    )
    assert size.described() == (
        "2 hosts x 4 ranks, wires 300 Mbit/s + 1 ms, inside a host unlimited, host2 at 100 Mbit/s, host1 with 0.5 cores"
    )
    assert shown(UNLIMITED) == "unlimited"


def test_hosts_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="host 'host3' should be one of host1, host2"):
        ClusterSize(2, cores={"host3": 1.0})
