"""Which GPU a rank takes, decided without OneFlow; and ranks that are nodes of their own, on CPU ranks of OneFlow."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from autoddl.costmodel.errors import UserError
from autoddl.export.library import library_text
from autoddl.pipelines.runtime.ranks.devices import GpuChoice, choose_gpu, claim_gpu, prepare_device, take_gpu
from autoddl.pipelines.runtime.ranks.gpus import Gpu, list_gpus, parse_gpus, visible_gpus

GIB = 2**30
FOUR = tuple(
    Gpu(index, f"GPU-{uuid}", "A100", "515.65.01", (8, 0), 80 * GIB, 79 * GIB)
    for index, uuid in enumerate(("8f2a-0", "8f2b-1", "c0de-2", "beef-3"))
)
HERE = socket.gethostname()


# ---- What a process sees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("", []),
        ("-1", []),
        ("2,-1,0", [2]),
        ("0,9,1", [0]),
        ("1gpu,2", [1, 2]),
        ("x", []),
        ("0,0", []),
        ("0,1,0", []),
        ("GPU-c0de-2,GPU-8f2a", [2, 0]),
        ("GPU-8f2", []),  # two begin so
        ("GPU-beef-3,GPU-none,GPU-c0de-2", [3]),
        ("1,GPU-8f2b-1", []),  # the same one twice
        ("MIG-c0de-2", []),
    ],
)
def test_visible_gpus(visible, seen):
    assert [gpu.index for gpu in visible_gpus(FOUR, visible)] == seen


def test_gpus_are_listed(tmp_path, monkeypatch):
    """By any driver: before 510 `nvidia-smi` does not know the compute capability, and refuses the question."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        '#!/bin/sh\ncase "$1" in *compute_cap*) exit 2;; esac\necho 0, GPU-a, Tesla V100-SXM2-16GB, 450.80.02, 16160, [N/A]\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert list_gpus() == (Gpu(0, "GPU-a", "Tesla V100-SXM2-16GB", "450.80.02", (0, 0), 16160 << 20, 0),)
    tool.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert list_gpus() == ()
    monkeypatch.setenv("PATH", "/nowhere")
    assert list_gpus() == ()
    assert parse_gpus("No devices were found\n") == ()


# ---- Which one a rank takes -----------------------------------------------------------------------------------------------


def rank(local_rank: int, **more: object) -> dict[str, str]:
    """The environment of a rank of four on two hosts, unless said otherwise."""
    values = {"RANK": 5, "LOCAL_RANK": local_rank, "WORLD_SIZE": 8, **more}
    return {name: str(value) for name, value in values.items()}


def test_ranks_that_see_all_gpus_take_that_of_their_number():
    for local_rank in range(4):
        assert choose_gpu(rank(local_rank, LOCAL_WORLD_SIZE=4), FOUR) == GpuChoice(FOUR[local_rank], local_rank)
    assert choose_gpu(rank(1, CUDA_VISIBLE_DEVICES="3,1"), FOUR) == GpuChoice(FOUR[1], 1)
    assert choose_gpu(rank(0, CUDA_VISIBLE_DEVICES="3,1"), FOUR) == GpuChoice(FOUR[3], 0)


SLURM = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": 2}


@pytest.mark.parametrize("local_rank", [0, 3])
def test_ranks_that_slurm_binds_to_a_gpu_take_the_one_they_see(local_rank):
    """OneFlow would take the GPU of index LOCAL_RANK, so each rank becomes a node, with LOCAL_RANK 0."""
    binding = {**SLURM, "SLURM_LOCALID": local_rank, "CUDA_VISIBLE_DEVICES": local_rank}
    assert choose_gpu(rank(local_rank, **binding), FOUR) == GpuChoice(FOUR[local_rank], 0, None, True)
    # With cgroups a task sees no other GPU at all, and its own has the index 0.
    binding["CUDA_VISIBLE_DEVICES"] = 0
    assert choose_gpu(rank(local_rank, **binding), FOUR[2:3]) == GpuChoice(FOUR[2], 0, None, True)


def test_ranks_that_mpirun_binds_to_a_gpu():
    binding = {"OMPI_COMM_WORLD_LOCAL_RANK": 2, "OMPI_COMM_WORLD_LOCAL_SIZE": 4, "CUDA_VISIBLE_DEVICES": 1}
    assert choose_gpu(rank(2, **binding), FOUR) == GpuChoice(FOUR[1], 0, None, True)


def test_one_task_per_node_is_an_ordinary_rank():
    alone = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_NODES": 8, "SLURM_LOCALID": 0, "CUDA_VISIBLE_DEVICES": 2}
    assert choose_gpu(rank(0, **alone), FOUR) == GpuChoice(FOUR[2], 0)


def test_slurm_shows_all_gpus_to_each_task():
    assert choose_gpu(rank(3, **SLURM, SLURM_LOCALID=3), FOUR) == GpuChoice(FOUR[3], 3)


def test_a_rank_that_is_a_node_sees_its_own_gpu_only():
    own = {"AUTODDL_OWN_NODES": 1, "LOCAL_WORLD_SIZE": 2}
    assert choose_gpu(rank(1, **own, CUDA_VISIBLE_DEVICES="3,2"), FOUR) == GpuChoice(FOUR[2], 0, "GPU-c0de-2", True)


def test_gpus_that_nobody_lists():
    """Without `nvidia-smi` OneFlow has to tell whether there are GPUs."""
    assert choose_gpu(rank(1), ()) == GpuChoice(None, 1)
    assert choose_gpu(rank(1, AUTODDL_OWN_NODES=1), ()) == GpuChoice(None, 0, "1", True)
    assert choose_gpu(rank(1, AUTODDL_OWN_NODES=1, CUDA_VISIBLE_DEVICES="7, 5"), ()) == GpuChoice(None, 0, "5", True)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            rank(4),
            f"rank 5: host {HERE} shows it 4 GPUs for LOCAL_RANK 4; there should be one for each rank of the host",
        ),
        (rank(0, LOCAL_WORLD_SIZE=8), f"rank 5: host {HERE} shows it 4 GPUs for 8 ranks; "),
        (
            rank(0, LOCAL_WORLD_SIZE=2, CUDA_VISIBLE_DEVICES="1"),
            "shows it 1 GPU (CUDA_VISIBLE_DEVICES=1) for 2 ranks; ",
        ),
        (rank(0, CUDA_VISIBLE_DEVICES=""), "shows it no GPUs (CUDA_VISIBLE_DEVICES=) for LOCAL_RANK 0; "),
        (rank(1, CUDA_VISIBLE_DEVICES="2,2"), "shows it no GPUs (CUDA_VISIBLE_DEVICES=2,2) for LOCAL_RANK 1; "),
        # Ranks that a shell of Slurm's started by itself: they share what the shell's task sees.
        (rank(1, **SLURM, SLURM_LOCALID=0, CUDA_VISIBLE_DEVICES="2"), "shows it 1 GPU (CUDA_VISIBLE_DEVICES=2) for "),
        (
            rank(0, **SLURM, SLURM_LOCALID=0, CUDA_VISIBLE_DEVICES="2", LOCAL_WORLD_SIZE=2),
            "shows it 1 GPU (CUDA_VISIBLE_DEVICES=2) for 2 ranks",
        ),
    ],
)
def test_ranks_without_a_gpu(environ, message):
    with pytest.raises(UserError) as caught:
        choose_gpu(environ, FOUR)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.skipif(sys.platform != "linux", reason="names of Linux's sockets")
def test_two_ranks_on_one_gpu():
    """Of one job, on one host; a rank that has ended has given its GPU back, and other jobs are others' affair."""
    job = {"MASTER_ADDR": "h1", "MASTER_PORT": str(os.getpid())}
    first = claim_gpu(FOUR[1], {**rank(0), **job})
    with pytest.raises(UserError) as caught:
        claim_gpu(FOUR[1], {**rank(1), **job})
    assert str(caught.value).startswith(
        f"rank 5: GPU 1 (A100, GPU-8f2b-1) of host {HERE} is that of another rank of this job; each rank should see a "
        "GPU of its own"
    )
    claim_gpu(FOUR[2], {**rank(1), **job}).close()
    claim_gpu(FOUR[1], {**rank(1), **job, "MASTER_ADDR": "h2"}).close()
    first.close()
    claim_gpu(FOUR[1], {**rank(1), **job}).close()


# ---- What is set ------------------------------------------------------------------------------------------------------------


def test_cpu_ranks_do_nothing():
    for device in ({}, {"AUTODDL_DEVICE": "cpu"}):
        environ = {**rank(3), **device}
        before = dict(environ)
        assert prepare_device(environ) is None
        assert environ == before


def fake_oneflow(num_gpus: int) -> Any:
    """OneFlow, as far as `take_gpu` uses it, with the index that it sets."""
    chosen: list[int] = []
    cuda = SimpleNamespace(
        device_count=lambda: num_gpus,
        get_device_properties=lambda index: SimpleNamespace(name=f"NVIDIA {index}", total_memory=80 * GIB),
    )
    return SimpleNamespace(
        cuda=cuda, _oneflow_internal=SimpleNamespace(SetCudaDeviceIndex=chosen.append), chosen=chosen
    )


def test_a_rank_says_which_gpu_it_takes(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    flow = fake_oneflow(2)
    assert take_gpu(flow) == f"rank 3: GPU 1 (NVIDIA 1, 80.0 GiB) of host {HERE}"
    assert take_gpu(flow, 6, 79.25 * GIB) == f"rank 3: GPU 6 (NVIDIA 1, 79.2 GiB free) of host {HERE}"
    assert flow.chosen == [1, 1]


def test_gpus_that_oneflow_does_not_see(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError) as caught:
        take_gpu(fake_oneflow(1))
    assert str(caught.value) == (
        f"rank 3: OneFlow sees 1 GPU on host {HERE} and would use the one of index 1 (LOCAL_RANK); CUDA_VISIBLE_DEVICES=0 should "
        "show one for each rank"
    )


def test_deciding_needs_no_oneflow():
    code = "import sys, autoddl.pipelines.runtime.ranks.devices; sys.exit('oneflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_exported_files_can_take_their_gpus():
    """The function is copied into files with what it needs, which is little."""
    library = library_text({"take_gpu"}, (), ())
    text = "\n".join(text for _, text in library.sections)
    names = {node.name for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert names == {"take_gpu", "_counted", "UserError"}
    assert library.standard_imports == ("import os", "import socket", "from typing import Any")
