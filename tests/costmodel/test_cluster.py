"""Clusters: presets, formulas by hand, invalid files."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from importlib import resources
from math import inf, nan

import pytest

from autoddl.costmodel.cluster import Cluster, Link, from_document, load_cluster, preset_names
from autoddl.costmodel.collectives import Collective, Step
from autoddl.costmodel.distribution import Axis
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.units import format_bytes, format_seconds, to_si

PRESETS = [
    "a800",
    "b200",
    "dgx-a100",
    "dgx-h100",
    "dgx-h200",
    "dgx-v100",
    "gcp-a100",
    "h800",
    "jz-a100",
    "l40s",
    "local-cpu",
    "mi300x",
    "piz-daint",
    "rtx4090",
    "v100-a",
    "v100-b",
    "v100-c",
]
#: Presets whose nodes have 8 GPUs and bandwidths of collectives by the number of GPUs.
NODES_OF_8 = sorted({*PRESETS} - {"gcp-a100", "local-cpu", "piz-daint", "v100-a", "v100-b", "v100-c"})


def document_of(name: str) -> dict:
    return json.loads(resources.files("autoddl.costmodel.clusters").joinpath(f"{name}.json").read_text())


def test_all_presets_are_there():
    assert list(preset_names()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load(name):
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.num_devices == cluster.num_nodes * cluster.devices_per_node
    # A faster link inside the nodes than between them.
    inter, intra = cluster.links
    assert intra.bandwidth >= inter.bandwidth
    assert cluster.default_precision in ("float32", "mixed")


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_unit_and_a_source(name):
    found = []

    def visit(value, where):
        if isinstance(value, dict):
            if "value" in value:
                assert isinstance(value["unit"], str) and value["unit"], where
                assert len(value["source"].removeprefix("assumed:").strip()) > 10, where
                found.append(where)
            for key, child in value.items():
                if key not in ("value", "interval"):
                    visit(child, f"{where}.{key}")
        else:
            assert not isinstance(value, float), f"{where}: a number without unit"
            assert not isinstance(value, int) or where.split(".")[-1] in ("version", "num_nodes", "devices_per_node")

    visit(document_of(name), name)
    assert len(found) >= 9  # memory, its bandwidth, peak, efficiency, launch, and two numbers for each of two links


def test_figures_of_presets_in_si_units():
    google = load_cluster("gcp-a100")
    assert (google.num_nodes, google.devices_per_node) == (2, 16)
    assert google.device.memory_bytes == 40 * 2**30
    assert google.device.peak_flops == {"mixed": 312e12, "float32": 19.5e12}
    assert google.default_precision == "mixed"
    # 100 Gb/s of a node are 12.5 GB/s, shared by 16 devices.
    assert google.links[0].bandwidth == pytest.approx(12.5e9 / 16)
    assert google.links[1].bandwidth == 300e9  # 600 GB/s in both directions
    assert google.links[0].latency_s == 20e-6

    daint = load_cluster("piz-daint")
    assert daint.device.memory_bytes == 16 * 2**30 and daint.links[0].bandwidth == 9e9
    assert daint.levels[0].name == "inter-node" and daint.level_sizes == (64,)


def all_reduce_s(cluster: Cluster, size: int, nbytes: float, level: int = 1) -> float:
    return cluster.links[level].time(Step(Collective.ALL_REDUCE, Axis(size, 1, level), nbytes))


def test_an_all_reduce_by_hand():
    """64 MiB in a DGX A100.  Each GPU sends 2 * 7/8 * 64 MiB = 117.44 MB at 230 GB/s: 510.6 us.  Its 14 messages add
    14.0 + 14 * 1.9 = 40.6 us.  In groups of 2 it sends 67.11 MB: 291.8 us, and 14.0 + 2 * 1.9 = 17.8 us."""
    dgx = load_cluster("dgx-a100")
    assert all_reduce_s(dgx, 8, 64 * 2**20) == pytest.approx(551.2e-6, rel=1e-4)
    assert all_reduce_s(dgx, 2, 64 * 2**20) == pytest.approx(309.6e-6, rel=1e-4)
    # Between 16 nodes: 2 * 15/16 * 64 MiB = 125.83 MB at 24 GB/s are 5242.9 us; a tree's latency is 14.0 + 17.0 * 4 = 82.0 us.
    assert all_reduce_s(dgx, 16, 64 * 2**20, level=0) == pytest.approx(5324.9e-6, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "size", "gb_per_s"),
    [
        ("dgx-a100", 8, 230),
        ("jz-a100", 4, 230),
        ("dgx-h100", 8, 480),  # NVLink SHARP
        ("dgx-h100", 4, 370),  # NVLink SHARP gains nothing in groups of up to 4
        ("dgx-h200", 8, 475),
        ("h800", 8, 215),
        ("b200", 8, 830),
        ("dgx-v100", 8, 130),
    ],
)
def test_large_all_reduces_reach_the_published_bus_bandwidth(name, size, gb_per_s):
    """Bus bandwidth as nccl-tests define it: 2 (p-1)/p bytes over the time, here of 8 GiB."""
    nbytes = 8 * 2**30
    bus = 2 * (size - 1) / size * nbytes / all_reduce_s(load_cluster(name), size, nbytes)
    assert bus == pytest.approx(gb_per_s * 1e9, rel=0.01)


def test_all_reduces_follow_a_published_curve():
    """Microseconds of all-reduces of 8 H20 without NVLink SHARP, by MiB (kvcache-ai/Mooncake pull request 3484, nccl-tests).

    H20 has the NVLink of H100.  The bandwidth is that of the largest all-reduce; the latency is that of the preset."""
    published = {8: 81.16, 16: 121.33, 32: 195.40, 128: 700.25, 256: 1366.17, 512: 2671.60, 1024: 5252.64}
    latency_s, _ = load_cluster("dgx-h100").links[1].collectives[Collective.ALL_REDUCE]
    ring = Link(latency_s, 358e9)
    for mib, microseconds in published.items():
        step = Step(Collective.ALL_REDUCE, Axis(8, 1), mib * 2**20)
        assert ring.time(step) == pytest.approx(microseconds * 1e-6, rel=0.06), mib


@pytest.mark.parametrize("name", NODES_OF_8)
def test_groups_of_a_node(name):
    """Larger groups take longer to start; GPUs without NVSwitch have other bandwidths in groups of other sizes."""
    cluster = load_cluster(name)
    assert cluster.devices_per_node == 8 and cluster.default_precision == "mixed"
    assert set(cluster.device.half_speed) == set(cluster.device.peak_flops)
    assert 0 < cluster.device.framework_bytes < 0.2 * cluster.device.memory_bytes
    link = cluster.links[1]
    for collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        assert {size for kind, size in link.groups if kind is collective} == {2, 4}
        latencies = [link.times(Step(collective, Axis(size, 1), 1.0))[0] for size in (2, 4, 8)]
        assert latencies == sorted(latencies) and latencies[0] < latencies[-1]
    bandwidths = [link.groups[Collective.ALL_GATHER, 2][1], link.collectives[Collective.ALL_GATHER][1]]
    if name in ("dgx-v100", "mi300x"):  # links between pairs of GPUs: a group uses those inside it
        assert bandwidths[0] < bandwidths[1] / 2
    elif name in ("l40s", "rtx4090"):  # all 8 GPUs share the link between the sockets
        assert bandwidths[0] > bandwidths[1]
    else:
        assert bandwidths[0] == bandwidths[1]


@pytest.mark.parametrize(
    ("name", "gb_per_s"),
    [
        ("jz-a100", 4 * 12 / 8),  # 4 Omni-Path links of 100 Gb/s, 8 GPUs
        ("dgx-v100", 4 * 12 / 8),
        ("l40s", 0.9 * 400 / 8 / 8),
        ("rtx4090", 0.9 * 100 / 8 / 8),
        ("dgx-a100", 24),
        ("dgx-h100", 46),
    ],
)
def test_network_bandwidth_of_a_gpu(name, gb_per_s):
    cluster = load_cluster(name)
    assert cluster.links[0].bandwidth == pytest.approx(gb_per_s * 1e9)
    assert all(pair[1] == cluster.links[0].bandwidth for pair in cluster.links[0].groups.values())


def test_bandwidth_of_a_node_is_divided_again():
    google = load_cluster("gcp-a100")
    assert google.resized(devices_per_node=4).links[0].bandwidth == pytest.approx(12.5e9 / 4)
    assert google.resized(devices_per_node=4).links[1] == google.links[1]
    assert google.resized(num_nodes=7).links == google.links
    dgx = load_cluster("dgx-a100")  # a card for every device
    assert dgx.resized(devices_per_node=2).links == dgx.links


@pytest.mark.parametrize(
    ("nodes", "devices", "levels"),
    [
        (4, 8, [("inter-node", 4), ("intra-node", 8)]),
        (1, 8, [("intra-node", 8)]),
        (4, 1, [("inter-node", 4)]),
        (1, 1, [("intra-node", 1)]),
    ],
)
def test_levels(nodes, devices, levels):
    cluster = load_cluster("dgx-a100").resized(nodes, devices)
    assert [(level.name, level.size) for level in cluster.levels] == levels
    # Steps are timed at the link of their level, whichever levels there are.
    for index, level in enumerate(cluster.levels):
        step = Step(Collective.ALL_GATHER, Axis(2, 1, index), 2e9)
        link = cluster.links[0 if level.name == "inter-node" else 1]
        latency_s, bandwidth = link.groups.get((Collective.ALL_GATHER, 2), (link.latency_s, link.bandwidth))
        assert cluster.time(step) == latency_s + 1e9 / bandwidth


def test_a_time_is_its_latency_and_its_transfer():
    """3 of 4 parts of 4 MB; the transfer is proportional to the bytes, with a copy term as without."""
    ring = Link(1e-6, 1e9)
    step = Step(Collective.ALL_GATHER, Axis(4, 1), 4e6)
    assert ring.times(step) == pytest.approx((3e-6, 3e-3))
    copying = Link(1e-6, 1e9, {Collective.ALL_GATHER: (2e-6, 5e8)}, {}, {Collective.ALL_GATHER: 1e-10})
    assert copying.times(step) == pytest.approx((6e-6, 6e-3 + 4e-4))
    grouped = Link(1e-6, 1e9, {}, {(Collective.ALL_GATHER, 4): (5e-6, 1e8)}, {Collective.ALL_GATHER: 1e-10})
    assert grouped.times(step) == pytest.approx((15e-6, 30e-3))
    for link in (ring, copying, grouped):
        latency_s, transfer_s = link.times(step)
        assert link.time(step) == latency_s + transfer_s
        assert link.times(replace(step, nbytes=1.0)) == pytest.approx((latency_s, transfer_s / 4e6))


def test_messages_do_not_use_the_terms_of_collectives():
    """The link's own terms are those of point-to-point transfers, if these were calibrated."""
    own = {collective: (1.0, 1.0) for collective in Collective}
    groups = {(collective, 2): (1.0, 1.0) for collective in Collective}
    link = Link(1e-6, 1e9, own, groups, dict.fromkeys(Collective, 1.0))
    assert link.message_time(3, 2e6) == pytest.approx(3e-6 + 2e-3)


def test_products_by_hand():
    """A100, mixed: 4096^3 product. Work 2 * 4096^3 = 137.4 GFLOP at 0.6 * 312 TFLOP/s = 187.2e12: 0.734 ms; 3 matrices of
    32 MiB through 2039 GB/s: 0.0494 ms; launch 5 us.  The 5 GFLOP of a product at half speed are added once per kernel: 26.7 us."""
    preset = load_cluster("dgx-a100")
    own = {"efficiency": 0.6, "memory_bandwidth": 2039e9, "launch_s": 5e-6, "half_speed": {"mixed": 5e9}}
    cluster = replace(preset, device=replace(preset.device, **own))
    fixed = 5e-6 + 5e9 / 187.2e12
    by_hand = fixed + 2 * 4096**3 / 187.2e12 + 3 * 4096**2 * 2 / 2039e9
    assert cluster.matmul_time(4096, 4096, 4096, "mixed", 2) == pytest.approx(by_hand)
    # Two in one kernel: one launch.
    assert cluster.matmul_time(4096, 4096, 4096, "mixed", 2, count=2) == pytest.approx(2 * by_hand - fixed)
    # A thin product is bound by memory: its efficiency is a fraction of the peak's.
    thin = cluster.matmul_time(4096, 4, 4096, "mixed", 2)
    assert 2 * 4096 * 4 * 4096 / thin < 0.1 * 312e12
    assert cluster.elementwise_time(2039e9) == pytest.approx(1 + 5e-6)


def test_hash_ignores_descriptions():
    document = document_of("dgx-a100")
    cluster = from_document(document, "x")
    prose = copy.deepcopy(document)
    prose["description"] = prose["name"] = "something else"
    prose["links"]["inter-node"]["latency"]["source"] = "measured"
    assert from_document(prose, "y").hash == cluster.hash
    assert cluster.resized(num_nodes=8).hash == cluster.hash
    others = [
        cluster.resized(num_nodes=4),
        cluster.resized(devices_per_node=4),
        cluster.with_links(latency_s=1e-6),
        cluster.with_links(bandwidth=1e9),
    ]
    for path, value in [
        (("device", "memory", "value"), 79),
        (("device", "efficiency", "value"), 0.5),
        (("device", "launch", "value"), 6),
        (("device", "peak", "mixed", "value"), 300),
        (("links", "intra-node", "bandwidth", "value"), 301),
    ]:
        changed = copy.deepcopy(document)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        others.append(from_document(changed, "z"))
    assert len({other.hash for other in others} | {cluster.hash}) == len(others) + 1


def test_links_replaced():
    cluster = load_cluster("dgx-a100").with_links(latency_s=1e-6)
    assert [link.latency_s for link in cluster.links] == [1e-6, 1e-6]
    assert [link.bandwidth for link in cluster.links] == [24e9, 230e9]
    cluster = load_cluster("dgx-a100").with_links(bandwidth=1e9)
    assert [link.bandwidth for link in cluster.links] == [1e9, 1e9]
    assert load_cluster("dgx-a100").with_links() == load_cluster("dgx-a100")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latency_s": -1.0}, "latency -1 s should be from 0 to 1000 s"),
        ({"latency_s": nan}, "latency nan s should be"),
        ({"latency_s": inf}, "latency inf s should be"),
        ({"bandwidth": 0.0}, r"bandwidth 0 bytes/s should be from 1 to 1e\+18 bytes/s"),
        ({"bandwidth": -5e9}, r"bandwidth -5e\+09 bytes/s should be"),
        ({"bandwidth": inf}, "bandwidth inf"),
    ],
)
def test_links_out_of_range(arguments, message):
    with pytest.raises(UserError, match=message):
        load_cluster("dgx-a100").with_links(**arguments)


def test_sizes_out_of_range():
    with pytest.raises(UserError, match="nodes 0 should be at least 1"):
        load_cluster("dgx-a100").resized(num_nodes=0)
    with pytest.raises(UserError, match="devices per node -3 should be at least 1"):
        load_cluster("dgx-a100").resized(devices_per_node=-3)
    with pytest.raises(UserError, match="should be at most 1048576 devices"):
        load_cluster("dgx-a100").resized(num_nodes=10**12)


def changed(path: tuple[str, ...], value: object) -> dict:
    document = document_of("dgx-a100")
    place = document
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return document


def quantity(value: float, unit: str) -> dict:
    return {"value": value, "unit": unit, "source": "a test"}


def test_figures_that_files_may_leave_out():
    """Without them a device has one efficiency for all products, nothing is hidden, and the framework occupies nothing."""
    bare = document_of("dgx-a100")
    for name in ("core_efficiency", "half_speed", "framework_memory"):
        bare["device"].pop(name, None)
    bare.pop("hidden_communication", None)
    cluster = from_document(bare, "bare")
    device = cluster.device
    assert (device.core_efficiency, device.half_speed, device.framework_bytes, cluster.hidden_part) == (None, {}, 0, 0)
    hashes = {cluster.hash}
    for path, value, read in (
        (("device", "core_efficiency"), quantity(0.5, "1"), lambda found: found.device.core_efficiency == 0.5),
        (
            ("device", "half_speed"),
            {"mixed": quantity(2, "GFLOP")},
            lambda found: found.device.half_speed == {"mixed": 2e9},
        ),
        (("device", "framework_memory"), quantity(3, "GiB"), lambda found: found.device.framework_bytes == 3 * 2**30),
        (("hidden_communication",), quantity(0.7, "1"), lambda found: found.hidden_part == 0.7),
    ):
        document = copy.deepcopy(bare)
        (document["device"] if len(path) > 1 else document)[path[-1]] = value
        found = from_document(document, "more")
        assert read(found) and found.hash not in hashes
        hashes.add(found.hash)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "autoddl-plan", "format 'autoddl-plan' should be 'autoddl-cluster'"),
        (("version",), 2, "version 2 is not supported, only 1 is"),
        (("version",), True, "version is true, should be a whole number"),
        (("num_nodes",), 0, "num_nodes is 0, should be a whole number of at least 1"),
        (("num_nodes",), 2.5, "num_nodes is 2.5, should be a whole number"),
        (("num_nodes",), 10**7, "should be at most 1048576 devices"),
        (("device",), None, "field 'device' is missing"),
        (("device", "memory"), 80, "device: memory: 80 should be an object"),
        (("device", "memory", "unit"), "GB/s", "unit 'GB/s' is not a unit of size"),
        (("device", "memory", "value"), -80, "memory: value is -80, should be a finite number of at least 0"),
        (("device", "memory", "value"), 0, "memory is 0 GiB, should be from 1 to 1e+18 in SI units"),
        (("device", "memory", "source"), None, "memory: field 'source' is missing"),
        (("device", "memory", "value"), "80", 'value is "80", should be a number'),
        (("device", "efficiency", "value"), 1.5, "efficiency is 1.5 1, should be from 1e-06 to 1"),
        (("device", "peak"), {}, "names [], should name one or more of float32, mixed, fp8"),
        (
            ("device", "half_speed"),
            {"fp8": quantity(1, "GFLOP")},
            "names ['fp8'], should name rates of peak: mixed, float32",
        ),
        (("device", "half_speed"), {"mixed": quantity(1, "GB")}, "unit 'GB' is not a unit of flops"),
        (("device", "core_efficiency"), quantity(1.2, "1"), "core_efficiency is 1.2 1, should be from 1e-06 to 1"),
        (("device", "framework_memory"), quantity(2, "s"), "unit 's' is not a unit of size"),
        (("hidden_communication",), quantity(-0.5, "1"), "hidden_communication: value is -0.5, should be"),
        (("device", "name"), "two\nlines", 'name is "two\\nlines", should be a string of one line'),
        (("device", "memory_bytes"), 80, 'unknown field "memory_bytes"; known ones are'),
        (("links", "inter-node", "bandwidth", "value"), -25, "bandwidth: value is -25, should be"),
        (("links", "inter-node", "bandwidth", "value"), 1e308, "bandwidth is 1e+308 GB/s, should be from 1 to 1e+18"),
        (("links", "inter-node", "bandwidth", "value"), 5e-324, "should be from 1 to 1e+18"),
        (("links", "inter-node", "latency", "value"), 1e308, "latency is 1e+308 us, should be from 0 to 1000"),
        (("links", "inter-node", "per"), "rack", "per is 'rack', should be 'device' or 'node'"),
        (("links", "intra-rack"), {}, 'unknown field "intra-rack"'),
        (("links", "intra-node", "collectives"), {"gather": {}}, "unknown collective 'gather'"),
    ],
)
def test_bad_documents(path, value, message):
    with pytest.raises(UserError) as error:
        from_document(changed(path, value), "c.json")
    assert str(error.value).startswith("c.json") and message in str(error.value) and "\n" not in str(error.value)


def test_calibrated_collectives_share_a_node_too():
    own = {
        "latency": {"value": 3, "unit": "us", "source": "measured"},
        "bandwidth": {"value": 80, "unit": "GB/s", "source": "measured", "interval": [79, 81]},
    }
    document = changed(("links", "inter-node", "collectives"), {"all-to-all": own})
    document["links"]["inter-node"]["per"] = "node"
    cluster = from_document(document, "c.json")
    assert cluster.links[0].collectives == {Collective.ALL_TO_ALL: (3e-6, 10e9)}
    assert cluster.hash != load_cluster("dgx-a100").hash
    # Replacing the links from the command line replaces those of single collectives too.
    assert cluster.with_links(bandwidth=1e9).links[0].collectives == {}


def test_files(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(document_of("dgx-h100")))
    assert isinstance(load_cluster(path), Cluster) and load_cluster(path).hash == load_cluster("dgx-h100").hash
    path.write_text(path.read_text()[:500])
    with pytest.raises(UserError, match=r"mine.json: not a JSON document"):
        load_cluster(path)
    with pytest.raises(UserError, match="neither a file nor one of a800, b200, dgx-a100, "):
        load_cluster("dgx-a10")
    with pytest.raises(UserError, match="neither a file nor"):
        load_cluster("x" * 5000)
    with pytest.raises(UserError, match="cannot be read"):
        load_cluster(tmp_path)


def test_units():
    assert to_si(5, "us", "time", "x") == 5e-6
    assert to_si(2, "GiB", "size", "x") == 2**31
    assert to_si(100, "Gb/s", "rate", "x") == 12.5e9
    assert to_si(3, "TFLOP/s", "compute", "x") == 3e12
    with pytest.raises(UserError, match="latency: unit 'GB' is not a unit of time"):
        to_si(1, "GB", "time", "latency")
    assert [format_seconds(s) for s in (0, 1.5e-9, 2e-5, 0.12, 75)] == ["0 s", "1.5 ns", "20 us", "120 ms", "75 s"]
    assert [format_bytes(b) for b in (0, 512, 1536, 3 * 2**30)] == ["0 B", "512 B", "1.5 KiB", "3 GiB"]
    # No exponents where a unit has four digits.
    assert [format_bytes(b) for b in (999.4, 1010 * 2**20)] == ["999 B", "1010 MiB"]
    assert format_seconds(12345) == "12345 s"
