"""Emulated clusters: what links delay and count, and that nothing is left. No verdict depends on how busy the machine is."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..processes import PATIENCE_S
from .emulated import ClusterSize, EmulatedCluster, cluster_available, emulated
from .ending import processes_in
from .links import parse_link

AVAILABLE = cluster_available()
pytestmark = [
    pytest.mark.ranks("launches"),
    pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason),
]
PROBE = str(Path(__file__).with_name("probe.py"))
FOLDER = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCluster]:
    """Two hosts; latencies and transfer times far above what the machine itself needs."""
    size = ClusterSize(2, 2, parse_link("80Mbit,20ms"), parse_link("800Mbit,5ms"), cores={"host2": 0.5})
    with emulated(tmp_path_factory.mktemp("cluster"), size) as started:
        yield started


def seconds(cluster: EmulatedCluster, to: str, size: int, sender: str = "host1") -> float:
    """Until a message from a host has been answered."""
    address = cluster.addresses[to]
    server = subprocess.Popen(
        cluster.command(to, sys.executable, PROBE, "serve", address), stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        return float(cluster.run(sender, sys.executable, PROBE, "ask", address, str(size)))
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(("to", "latency_s", "bandwidth"), [("host2", 20e-3, 10e6), ("host1", 5e-3, 100e6)])
def test_messages_are_no_faster_than_their_link(cluster, to, latency_s, bandwidth):
    """There and back; a large message takes its bytes over the bandwidth in addition, from the first one on."""
    assert seconds(cluster, to, 1) >= 2 * latency_s
    assert seconds(cluster, to, 1 << 20) >= 2 * latency_s + (1 << 20) / bandwidth


def test_bytes_are_counted_by_link(cluster):
    """From host2, whose loopback no other test uses: connections of earlier ones may still acknowledge and close."""
    before = cluster.wires.traffic()
    seconds(cluster, "host1", 1 << 20, sender="host2")
    after = cluster.wires.traffic()
    sent = after["host2"].wire_bytes - before["host2"].wire_bytes
    assert 3 << 20 <= sent < 1.05 * (3 << 20)
    assert after["host2"].loopback_bytes == before["host2"].loopback_bytes
    seconds(cluster, "host1", 1 << 20)
    last = cluster.wires.traffic()
    assert 3 << 20 <= last["host1"].loopback_bytes - after["host1"].loopback_bytes < 1.05 * (3 << 20)


def test_a_wire_is_cut_and_restored(cluster):
    """What is sent meanwhile is lost on the way to the host and from it, and other hosts do not notice."""
    ask = [sys.executable, "-c", "import socket; socket.create_connection(('host2', 22), timeout=0.5)"]
    cluster.wires.cut("host2")
    try:
        assert subprocess.run(cluster.command("host1", *ask), capture_output=True).returncode == 1
        cluster.run("login", *ask[:2], ask[2].replace("host2", "host1").replace("0.5", "60"))
    finally:
        cluster.wires.restore("host2")
    cluster.run("host1", *ask[:2], ask[2].replace("0.5", "60"))


def test_a_link_is_replaced(cluster):
    cluster.wires.limit("host1", parse_link("40Mbit,100ms"))
    try:
        assert seconds(cluster, "host2", 1) >= 2 * (100e-3 + 20e-3) / 2
        assert "rate 40Mbit" in queue_of(cluster, "host1")
    finally:
        cluster.wires.limit("host1", cluster.size.wire)


def queue_of(cluster: EmulatedCluster, host: str) -> str:
    """How the kernel describes what packets to other hosts wait in."""
    return cluster.run(host, "tc", "qdisc", "show", "dev", "eth0")


@pytest.mark.parametrize(("wire", "packet"), [("80Mbit", 10_000), ("1Mbit", 1_500), ("10Gbit", 65_500)])
def test_a_packet_passes_its_wire_in_a_millisecond(cluster, wire, packet):
    """80 Mbit/s are 10,000 bytes in a millisecond; packets are between those of Ethernet and the largest of a device."""
    cluster.wires.limit("host1", parse_link(wire))
    try:
        assert f" mtu {packet} " in cluster.run("host1", "ip", "link", "show", "eth0")
    finally:
        cluster.wires.limit("host1", cluster.size.wire)


def test_packets_wait_in_the_kernel_of_their_host(cluster):
    """In a token bucket of the wire's bandwidth that holds a packet, which takes a millisecond, and a millisecond more."""
    queue = queue_of(cluster, "host1")
    assert "tbf" in queue and "rate 80Mbit" in queue
    burst = int(re.search(r"burst (\d+)b", queue)[1])
    assert 10e6 * 1e-3 <= burst <= 2 * 10e6 * 1e-3
    cluster.wires.limit("host1", parse_link("1ms"))
    try:
        assert "tbf" not in queue_of(cluster, "host1")
    finally:
        cluster.wires.limit("host1", cluster.size.wire)


def test_what_ssh_starts_on_a_slow_host_has_its_quota(cluster):
    """The control group of a process that ssh started says how long it may run in each period."""
    show = "cat /proc/self/cgroup"
    words = [*cluster.ssh.split(), "host2", show]
    found = subprocess.run(cluster.command("login", *words), capture_output=True, text=True, timeout=PATIENCE_S)
    (group,) = {line.rpartition("/")[2] for line in found.stdout.splitlines() if "cluster-" in line}
    (folder,) = [Path(root, group) for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup") if Path(root, group).is_dir()]
    if (folder / "cpu.max").exists():
        quota, period = map(int, (folder / "cpu.max").read_text().split())
    else:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    assert quota / period == 0.5
    other = subprocess.run(
        cluster.command("login", *cluster.ssh.split(), "host1", show), capture_output=True, text=True
    )
    assert other.returncode == 0 and "cluster-" not in other.stdout


POLL = """
import os, resource
before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
for _ in range(1000):
    os.sched_yield()
print(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
"""


def test_threads_that_poll_on_a_host_sleep(cluster):
    """The kernel counts how often a process gave up its core to sleep; a yield alone is no sleep.

    A thread that loses its core on the way to sleep is not counted, so on a busy machine some are missing.
    """
    words = [*cluster.ssh.split(), "host1", shlex.join([sys.executable, "-c", POLL])]
    assert int(cluster.run("login", *words)) > 500
    assert int(cluster.run("login", sys.executable, "-c", POLL)) < 100


MAKER = f"""
import os, sys, time
sys.path.insert(0, os.path.dirname({FOLDER!r}))
from pathlib import Path
from cluster.emulated import ClusterSize, EmulatedCluster
from cluster.links import parse_link
cluster = EmulatedCluster(Path(sys.argv[1]), ClusterSize(1, wire=parse_link("1ms"), cores={{"host1": 1.0}}))
cluster.start("host1", "sleep", "1000", log=Path(sys.argv[1], "log"))
print(os.readlink(f"/proc/{{cluster.pid('host1')}}/ns/net"), os.readlink(f"/proc/{{cluster.pid('login')}}/ns/net"), flush=True)
time.sleep(1000)
"""


def test_nothing_is_left_of_a_cluster_whose_maker_was_killed(tmp_path):
    """Of processes and control groups."""
    with subprocess.Popen([sys.executable, "-c", MAKER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as maker:
        try:
            assert maker.stdout is not None
            namespaces = maker.stdout.readline().split()
            assert len(namespaces) == 2
            deadline = time.monotonic() + PATIENCE_S
            while len(processes_in(namespaces)) < 4:  # the last one enters its host while the maker goes on
                assert time.monotonic() < deadline, processes_in(namespaces)
                time.sleep(0.05)
        finally:
            maker.kill()
    groups = [Path(root, f"cluster-{maker.pid}-host1") for root in ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup")]
    deadline = time.monotonic() + PATIENCE_S
    while processes_in(namespaces) or any(group.exists() for group in groups):
        assert time.monotonic() < deadline, (processes_in(namespaces), groups)
        time.sleep(0.05)


def test_the_command_runs_another_one_on_a_cluster():
    words = ["--hosts", "2", "--ranks", "3", "--wire", "1Gbit,1ms", "--", "sh", "-c"]
    script = (
        "hostname; echo $CLUSTER_HOSTS $CLUSTER_SLOTS; for h in host1 host2; do $CLUSTER_SSH $h hostname; done; exit 7"
    )
    done = subprocess.run([sys.executable, FOLDER, *words, script], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (7, "login\nhost1,host2 host1:3,host2:3\nhost1\nhost2\n")
    assert done.stderr == "2 hosts x 3 ranks, wires 1000 Mbit/s + 1 ms, inside a host unlimited\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--wire", "fast", "--", "true"], "link 'fast' should be a bandwidth, a latency or both"),
        (["--cores-of", "host9=1", "--", "true"], "host 'host9' should be one of host1, host2"),
        (["--wire-of", "host1", "--", "true"], "'host1' should be HOST=VALUE"),
        ([], "the command is missing: give it after --"),
    ],
)
def test_wrong_options_are_named(words, message):
    done = subprocess.run([sys.executable, FOLDER, *words], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1]
