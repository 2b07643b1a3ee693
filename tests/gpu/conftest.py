from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE, GPU
from autoddl.pipelines.runtime.ranks.launcher import RankPool

from ..gpumarks import FIGURES

#: The first operation on a GPU loads kernels, and the first collective connects NCCL's ranks.
GPU_STALL_S = 120.0
#: Products of single precision shall be of single precision: by default GPUs compute them in TF32.
GPU_VARIABLES = {"ONEFLOW_EP_CUDA_ENABLE_TF32_EXECUTION": "0", DEVICE_VARIABLE: GPU}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """All tests of GPUs have cases with both types of devices."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", [GPU, CPU])


@pytest.fixture(scope="session")
def gpu_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], RankPool]]:
    """``gpu_ranks(n)``: n ranks with a GPU each. They are in the machine's own network, which NCCL uses."""
    pools: dict[int, RankPool] = {}

    def pool(num_ranks: int) -> RankPool:
        if num_ranks not in pools or not pools[num_ranks].is_open:
            log_dir: Path = tmp_path_factory.mktemp(f"gpus{num_ranks}")
            pools[num_ranks] = RankPool(
                num_ranks, stall_timeout_s=GPU_STALL_S, log_dir=log_dir, environment=GPU_VARIABLES
            )
        return pools[num_ranks]

    yield pool
    for started in pools.values():
        started.close()


@pytest.fixture
def on(device: str, ranks: Callable, gpu_ranks: Callable) -> Callable[[int], RankPool]:
    """``on(n)``: n ranks on the device of the case."""
    return gpu_ranks if device == GPU else ranks


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """``note(line)``: a line of figures for the end of the run, which no verdict depends on."""
    return lambda line: request.node.user_properties.append((FIGURES, f"{request.node.name}: {line}"))
