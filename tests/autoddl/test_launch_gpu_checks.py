"""What `autoddl launch` compares before it starts ranks on GPUs: OneFlow's build, driver, devices, precision and network."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autoddl.costmodel.cluster import load_cluster
from autoddl.launching import oneflowbuild
from autoddl.launching.demands import Demands, differences
from autoddl.launching.facts import GpuFacts, HostFacts
from autoddl.launching.gpuchecks import capability_of, plan_faults
from autoddl.launching.hosts import Host, Placement, place
from autoddl.launching.interfaces import ProbeServer, Target, nccl_interfaces, probe
from autoddl.launching.oneflowbuild import OneFlowBuild, architectures, oneflow_build
from autoddl.pipelines.runtime.load import is_available
from autoddl.pipelines.runtime.ranks.gpus import Gpu
from autoddl.pipelines.runtime.ranks.interfaces import Interface, list_interfaces

from .launches import PATIENCE_S

GIB = 2**30
ONEFLOW = is_available()
needs_oneflow = pytest.mark.skipif(not ONEFLOW, reason=ONEFLOW.reason)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's interfaces and libraries")


# ---- OneFlow's build ------------------------------------------------------------------------------------------------------


def library_with(folder: Path, entries: list[tuple[int, int]]) -> Path:
    """A file in ELF's format whose section .nv_fatbin has two fat binaries with these (kind, architecture), and some padding."""
    binary = b"".join(
        struct.pack("<HHIQIIHHIIIQ", kind, 0x101, 64, 16, 0, 0, 7, 1, code, 0, 0, 0x11).ljust(64, b"\0") + b"\xff" * 16
        for kind, code in entries
    )
    fat = 2 * (struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(binary)) + binary + b"\0" * 8)
    names = b"\0.nv_fatbin\0.nv_fatbin_other\0.names\0"
    header = b"\x7fELF\x02".ljust(0x28, b"\0") + struct.pack(
        "<QIHHHHHH", 64 + len(fat) + len(names), 0, 64, 0, 0, 64, 4, 3
    )
    begins = 64, 64 + len(fat)
    sections = [(0, 0, 0), (1, begins[0], len(fat)), (12, begins[0] + 8, 0), (28, begins[1], len(names))]
    table = b"".join(
        struct.pack("<IIQQQQIIQQ", name, 1, 0, 0, begin, size, 0, 0, 8, 0) for name, begin, size in sections
    )
    path = folder / "liboneflow-1.so"
    path.write_bytes(header + fat + names + table)
    return path


def test_gpu_code_is_read_from_a_library(tmp_path):
    entries = [(2, 70), (2, 86), (1, 86)]
    assert architectures(library_with(tmp_path, entries)) == set(entries)
    assert architectures(library_with(tmp_path, [])) == set()
    other = tmp_path / "other"
    other.write_bytes(b"no library at all".ljust(100))
    assert architectures(other) == set()


@needs_oneflow
def test_the_wheel_is_built_for_cuda():
    """For compute capabilities 6.0 to 8.6, as code and not as PTX; OneFlow itself says which CUDA it was compiled with."""
    build = oneflow_build()
    assert build == OneFlowBuild("11.7", (60, 61, 70, 75, 80, 86))
    code = (
        "from autoddl.pipelines.runtime.load import load_oneflow as load; load(); import oneflow.sysconfig as system; "
    )
    command = [sys.executable, "-c", code + "print(system.get_cuda_version())"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split()[-1] == "11070"
    # P100, GTX 1080, V100, T4, A100, A40 and L40; but not K80, M40, H100 and B200.
    assert all(build.has_code_for(one) for one in ((6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9)))
    assert not any(build.has_code_for(one) for one in ((3, 7), (5, 2), (9, 0), (10, 0)))


def test_ptx_runs_on_later_gpus():
    build = OneFlowBuild("11.7", (80,), (80,))
    assert [build.has_code_for(one) for one in ((7, 5), (8, 0), (9, 0))] == [False, True, True]


def test_builds_without_cuda_and_without_libraries(tmp_path, monkeypatch):
    package = tmp_path / "oneflow"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (tmp_path / "oneflow.libs").mkdir()
    (tmp_path / "oneflow.libs" / "liboneflow-1.so").write_bytes(b"\x7fELF\x02".ljust(64, b"\0"))
    spec = importlib.util.spec_from_file_location(
        "oneflow", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    monkeypatch.setattr(oneflowbuild.importlib.util, "find_spec", lambda name: spec if name == "oneflow" else None)
    monkeypatch.setattr(
        oneflowbuild, "_linker_libraries", lambda: ["libcublas.so.11", "libcudnn.so.8", "libcublas.so.12"]
    )
    build = oneflow_build()
    assert (build.cuda, build.machine_code) == ("", ())
    assert build.missing_libraries[:2] == ("libcublasLt.so.11", "libcudnn_ops_infer.so.8")
    assert "libcublas.so.11" not in build.missing_libraries


# ---- What a host lacks ----------------------------------------------------------------------------------------------------

BUILD = OneFlowBuild("11.7", (60, 61, 70, 75, 80, 86))
ETHERNET = (Interface("lo", True, "127.0.0.1"), Interface("eth0", True, "10.0.0.2"))


def gpu(index: int, **changes: Any) -> Gpu:
    return dataclasses.replace(Gpu(index, f"GPU-a{index}", "A100", "515.65.01", (8, 0), 80 * GIB, 79 * GIB), **changes)


GPUS = Demands(2, 2, "A100", True, (60.0 * GIB, 60.0 * GIB, 30.0 * GIB, 70.0 * GIB), (), "mixed", "cuda")
FACTS = GpuFacts((gpu(0), gpu(1)), None, BUILD, ETHERNET)
HERE = HostFacts("h", "3.10", "1", "0.9.0", "", 8 * GIB, {"/p": "aa" * 32}, "/work", True, "", FACTS)


def found(facts: GpuFacts | None, demands: Demands = GPUS, **options: Any) -> list[tuple[str, bool, bool]]:
    """What the second of two hosts lacks."""
    hosts = place([Host("h1"), Host("h2")], demands.num_nodes, demands.devices_per_node)
    second = dataclasses.replace(HERE, gpu_facts=facts)
    all_found = differences(demands, hosts, [HERE, second], HERE, **options)
    return [(one.text, one.can_be_forced, one.is_warning) for one in all_found]


def with_gpus(**changes: Any) -> GpuFacts:
    return dataclasses.replace(FACTS, gpus=(gpu(0), gpu(1, **changes)))


def test_hosts_that_have_everything():
    assert found(FACTS) == []
    assert (
        found(dataclasses.replace(FACTS, gpus=(gpu(0, memory_bytes=40 * GIB, free_bytes=39 * GIB), gpu(1), gpu(2))))
        == []
    )
    assert found(with_gpus(memory_bytes=0, free_bytes=0)) == []  # a driver that does not tell
    assert found(with_gpus(capability=(8, 9))) == []
    assert found(with_gpus(name="Tesla V100-SXM2-32GB", capability=(7, 0))) == []
    assert found(with_gpus(driver="450.80.02")) == []


HOPPER = {"name": "NVIDIA H100 80GB HBM3", "capability": (9, 0)}
PASCAL = {"name": "NVIDIA TITAN X (Pascal)", "capability": (6, 1)}


@pytest.mark.parametrize(
    ("facts", "text", "can_be_forced", "is_warning"),
    [
        (None, "host h2 has not told what GPUs it has; install AutoDDL there as it is here", False, False),
        (
            dataclasses.replace(FACTS, gpus=()),
            "host h2 has 0 GPUs; the plan is for 2 per node (A100); nvidia-smi lists them; device=cpu runs the plan on CPU ranks",
            True,
            False,
        ),
        (
            dataclasses.replace(FACTS, visible_devices="1"),
            "host h2 has 1 GPU of 2 visible (CUDA_VISIBLE_DEVICES=1); the plan is for 2 per node (A100)",
            False,
            False,
        ),
        (
            dataclasses.replace(FACTS, build=OneFlowBuild()),
            "host h2: OneFlow is built without CUDA there; it should be oneflow==0.9.0 of PyPI, built for CUDA 11.7",
            False,
            False,
        ),
        (
            dataclasses.replace(
                FACTS, build=dataclasses.replace(BUILD, missing_libraries=("libcudnn.so.8", "libx.so"))
            ),
            "host h2: libcudnn.so.8 and 1 more libraries of cuBLAS 11 and cuDNN 8 are not found; install "
            "nvidia-cublas-cu11==11.10.3.66 and nvidia-cudnn-cu11==8.5.0.96, or set LD_LIBRARY_PATH",
            False,
            False,
        ),
        (
            dataclasses.replace(FACTS, gpus=(gpu(0, driver="440.33.01"), gpu(1, driver="440.33.01"))),
            "host h2 has NVIDIA driver 440.33.01; OneFlow's CUDA 11.7 needs 450.80.02 or a newer one (all of CUDA 11.7: 515.43.04)",
            False,
            False,
        ),
        (
            with_gpus(**HOPPER),
            "host h2: GPU 1 (NVIDIA H100 80GB HBM3) has compute capability 9.0; OneFlow has code for 6.0, 6.1, 7.0, 7.5, 8.0, 8.6, "
            "which runs on GPUs of the same major and the same or a higher minor number",
            False,
            False,
        ),
        (
            with_gpus(**PASCAL),
            "host h2: GPU 1 (NVIDIA TITAN X (Pascal)) has compute capability 6.1 and no tensor cores (from 7.0 on): products in "
            "float16 are not faster than in float32",
            False,
            True,
        ),
        (
            with_gpus(memory_bytes=40 * GIB, free_bytes=40 * GIB),
            "host h2: GPU 1 has 40 GiB of memory; the plan needs 70 GiB of rank 3",
            True,
            False,
        ),
        (
            with_gpus(free_bytes=3 * GIB),
            "host h2: GPU 1 has 3 GiB of its 80 GiB of memory free; the plan needs 70 GiB of rank 3; nvidia-smi shows what uses it",
            True,
            False,
        ),
    ],
)
def test_what_a_host_lacks(facts, text, can_be_forced, is_warning):
    assert found(facts) == [(text, can_be_forced, is_warning)]


def test_bfloat16_on_a_gpu_without_it():
    """Also if the driver is too old to tell the compute capability, and the name has to."""
    demands = dataclasses.replace(GPUS, precision="bfloat16")
    volta = {"name": "Tesla V100-SXM2-32GB", "memory_bytes": 80 * GIB}
    for capability in ((7, 0), (0, 0)):
        assert found(with_gpus(**volta, capability=capability), demands) == [
            (
                "host h2: GPU 1 (Tesla V100-SXM2-32GB) has compute capability 7.0 and no bfloat16 (from 8.0 on); plan with "
                "precision mixed or float32",
                False,
                False,
            )
        ]
    assert found(FACTS, demands) == []


def test_variables_of_the_ranks_come_before_those_of_the_host():
    hidden = dataclasses.replace(FACTS, visible_devices="1")
    assert found(hidden, environment={"CUDA_VISIBLE_DEVICES": "1,0"}) == []
    small = with_gpus(memory_bytes=40 * GIB, free_bytes=40 * GIB)
    assert len(found(small)) == 1
    assert (
        found(small, environment={"CUDA_VISIBLE_DEVICES": "1,0"}) == []
    )  # rank 2, which needs 30 GiB, has that GPU now


def test_a_rank_that_joins_is_checked_alone():
    """It has the GPU of its own index if it sees all of the host's, and the only one if that is all it sees."""
    own = [Placement(Host("localhost"), range(3, 4))]
    small = with_gpus(memory_bytes=40 * GIB, free_bytes=40 * GIB)
    for gpus, visible, texts in (
        (small.gpus, None, ["host localhost: GPU 1 has 40 GiB of memory; the plan needs 70 GiB of rank 3"]),
        (small.gpus, "0", []),
        (small.gpus, "1", ["host localhost: GPU 1 has 40 GiB of memory; the plan needs 70 GiB of rank 3"]),
        (small.gpus[:1], None, []),
        (
            small.gpus[:0],
            "0",
            ["host localhost has 0 GPUs; the plan is for 2 per node (A100); nvidia-smi lists them; "],
        ),
    ):
        facts = dataclasses.replace(HERE, gpu_facts=dataclasses.replace(small, gpus=gpus, visible_devices=visible))
        texts_found = [one.text for one in differences(GPUS, own, [facts], facts, joined_as=1)]
        assert len(texts_found) == len(texts) and all(map(str.startswith, texts_found, texts)), texts_found


def test_only_count_and_memory_matter_without_oneflow():
    facts = dataclasses.replace(with_gpus(**HOPPER), build=OneFlowBuild(), interfaces=())
    assert found(facts, with_oneflow=False) == []


@pytest.mark.parametrize(
    ("device", "precision", "texts"),
    [
        ("NVIDIA A100 SXM4 80 GB", "bfloat16", []),
        ("one of my own", "bfloat16", []),
        (
            "NVIDIA H100",
            "mixed",
            ["the plan's device NVIDIA H100 has compute capability 9.0; OneFlow has code for 6.0, "],
        ),
        ("NVIDIA V100 16 GB", "mixed", []),
        (
            "NVIDIA V100 16 GB",
            "bfloat16",
            ["the plan's device NVIDIA V100 16 GB has compute capability 7.0 and no bfloat16"],
        ),
    ],
)
def test_what_the_name_of_a_device_tells(device, precision, texts):
    demands = dataclasses.replace(GPUS, device=device, precision=precision)
    assert all(map(str.startswith, (fault.text for fault in plan_faults(demands)), texts))
    assert len(list(plan_faults(demands))) == len(texts)


def test_devices_of_our_clusters_are_known():
    names = {name: load_cluster(name).device.name for name in ("dgx-a100", "gcp-a100", "v100-a", "dgx-h100")}
    assert [capability_of(name) for name in names.values()] == [(8, 0), (8, 0), (7, 0), (9, 0)]


# ---- The network of NCCL --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "setting", "chosen"),
    [
        ("lo eth0 ib0", None, "ib0"),
        ("lo docker0 eth0 eth1", None, "eth0 eth1"),
        ("lo docker0", None, "docker0"),
        ("lo", None, "lo"),
        ("lo eth0 eth1", "eth1", "eth1"),
        ("lo eth0 eth10", "eth1", "eth10"),
        ("lo eth0 eth10", "=eth1", ""),
        ("lo eth0 ib0", "^lo,ib", "eth0"),
        ("lo eth0 ib0", "^=lo", "eth0 ib0"),
    ],
)
def test_interfaces_that_nccl_uses(names, setting, chosen):
    interfaces = [Interface(name, True, "10.0.0.1") for name in names.split()]
    assert [one.name for one in nccl_interfaces(interfaces, setting)] == chosen.split()


DOWN, BARE = Interface("eth1", False, "10.1.0.2"), Interface("eth2", True, "")


@pytest.mark.parametrize(
    ("interfaces", "setting", "text"),
    [
        (ETHERNET, "ens", "NCCL_SOCKET_IFNAME=ens names none of its network interfaces; it should name one of eth0"),
        (
            (*ETHERNET, DOWN),
            "eth1",
            "network interface eth1, which NCCL uses, is down (NCCL_SOCKET_IFNAME=eth1); it should name one of eth0",
        ),
        (
            (*ETHERNET, BARE),
            "eth2",
            "network interface eth2 has no IPv4 address (NCCL_SOCKET_IFNAME=eth2); it should name one of eth0",
        ),
        (
            ETHERNET[:1],
            None,
            "NCCL uses network interface lo, which no other host reaches (NCCL_SOCKET_IFNAME is not set); the host has no other "
            "with an address",
        ),
    ],
)
def test_interfaces_that_nccl_cannot_use(interfaces, setting, text):
    for place_of_setting in ("host", "ranks"):
        of_host = setting if place_of_setting == "host" else None
        facts = dataclasses.replace(FACTS, interfaces=interfaces, ifname=of_host)
        environment = {"NCCL_SOCKET_IFNAME": setting} if setting and place_of_setting == "ranks" else {}
        of_second = [one for one in found(facts, environment=environment) if "host h2" in one[0]]
        assert of_second == [(f"host h2: {text}", False, False)]


def test_interfaces_are_listed():
    (loopback,) = (one for one in list_interfaces() if one.name == "lo")
    assert loopback.address == "127.0.0.1"
    assert {one.name for one in list_interfaces()} == {name for _, name in socket.if_nameindex()}


def test_a_probe_finds_out_who_answers():
    with contextlib.closing(ProbeServer("127.0.0.1")) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
        closed.close()
        targets = [
            Target("right", "127.0.0.1", server.port, server.token),
            Target("wrong", "127.0.0.1", server.port, "0" * 16),
            Target("deaf", "127.0.0.1", port, "0" * 16),
        ]
        assert probe("127.0.0.1", targets) == {"wrong": "another process answers there", "deaf": "Connection refused"}
    with pytest.raises(OSError, match="Cannot assign"):
        ProbeServer("192.0.2.77")  # an address of the documentation, nobody's
