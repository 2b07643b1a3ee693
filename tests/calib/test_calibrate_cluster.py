"""`autoddl calibrate` on an emulated cluster, whose links have a bandwidth and a latency.

How near it comes depends on how busy the machine is, and is measured by tests/bench/bench_cluster.py. Here stands what holds on any
machine: nothing is faster than its link, both levels are measured, and ranks of all hosts are own ones.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from autoddl.calib.measurements import read_samples
from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.cluster import load_cluster
from autoddl.costmodel.collectives import Collective
from autoddl.pipelines.runtime.load import is_available

from ..cluster.emulated import ClusterSize, EmulatedCluster, cluster_available, emulated
from ..cluster.links import parse_link
from ..processes import PATIENCE_S, START

AVAILABLE, LINKS = is_available(), cluster_available()
pytestmark = [
    pytest.mark.ranks("launches"),
    pytest.mark.skipif(not AVAILABLE, reason=AVAILABLE.reason),
    pytest.mark.skipif(not LINKS, reason=LINKS.reason),
]
SIZES = "4KiB,512KiB"
COLLECTIVES = "all-reduce,all-gather,point-to-point"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmulatedCluster]:
    size = ClusterSize(2, 2, parse_link("200Mbit,4ms"), parse_link("800Mbit,1ms"))
    with emulated(tmp_path_factory.mktemp("cluster"), size) as started:
        yield started


def test_nothing_is_faster_than_its_link(cluster, tmp_path):
    """Four ranks on two hosts, with three collectives of two sizes: it takes some 20 seconds."""
    words = ["calibrate", "--hosts", cluster.slots, "--ssh", cluster.ssh, "--sizes", SIZES, "--repetitions", "1"]
    options = ["--communication-only", "--collectives", COLLECTIVES, "--quiet", "-o", "ours.json"]
    command = cluster.command("login", sys.executable, "-c", START, *words, *options, folder=tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    samples = read_samples(tmp_path / "ours.csv")
    assert {(s.level, s.ranks, s.stride) for s in samples} == {
        ("intra-node", 2, 1),
        ("inter-node", 2, 2),
        ("both", 4, 1),
    }
    assert {(s.ranks_per_node, s.network) for s in samples} == {(2, "eth0")}
    for sample in (one for one in samples if one.level != "both"):
        link = cluster.size.wire if sample.level == "inter-node" else cluster.size.loopback
        if sample.collective == TRANSFER:
            sent, messages = sample.bytes, 1
        else:
            collective = Collective(sample.collective)
            sent, messages = collective.sent_bytes(2, sample.bytes), collective.messages(2)
        assert sample.seconds >= messages * link.latency_s + sent / link.bandwidth, sample
    levels = {level.name: level.link for level in load_cluster(tmp_path / "ours.json").levels}
    assert levels["inter-node"].latency_s > 0 and levels["intra-node"].latency_s > 0
    traffic = cluster.wires.traffic()
    assert all(min(traffic[host]) > 10 * 2**19 for host in cluster.size.hosts), traffic  # both kinds of links were used
