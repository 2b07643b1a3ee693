"""What GPUs need to run a plan, compared with what a host has: OneFlow's build, driver, compute capability, precision, network.

**Driver.** A program built for CUDA 11.x runs with any driver from 450.80.02 on ("CUDA 11.x minor version compatibility"), with
all of CUDA 11.7 from 515.43.04 on: tables 2 and 3 of https://docs.nvidia.com/cuda/archive/11.7.1/cuda-toolkit-release-notes.
OneFlow has machine code, and no PTX that an older driver could not translate, so the first of these is enough.

**Precision.** Products in float16 are fast from compute capability 7.0 on (tensor cores); bfloat16 exists from 8.0 on (CUDA C++
Programming Guide, "Arithmetic Instructions").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autoddl.costmodel.precision import precision_of
from autoddl.costmodel.units import counted, format_bytes
from autoddl.pipelines.runtime.ranks.gpus import VISIBLE_VARIABLE, Gpu, visible_gpus
from autoddl.pipelines.runtime.ranks.interfaces import Interface

from .facts import GpuFacts
from .interfaces import IFNAME_VARIABLE, nccl_interfaces
from .oneflowbuild import OneFlowBuild
from .unmet import UnmetDemand

if TYPE_CHECKING:
    from .demands import Demands

__all__ = ["capability_of", "gpu_faults", "interface_faults", "nccl_interface", "plan_faults"]

#: Lowest drivers, by major version of CUDA: that which runs any minor version, and that which is made for CUDA 11.7.
_LOWEST_DRIVERS = {"11": ((450, 80, 2), "450.80.02"), "12": ((525, 60, 13), "525.60.13")}
_FULL_DRIVER = "515.43.04"
_TENSOR_CORES, _BFLOAT16 = (7, 0), (8, 0)
#: What the OneFlow 0.9.0 of PyPI was built for, as `oneflow_build` reads it from the wheel.
_WHEEL = OneFlowBuild("11.7", (60, 61, 70, 75, 80, 86))
#: Compute capabilities of products (https://developer.nvidia.com/cuda-gpus), for plans and for drivers that do not tell it.
_CAPABILITIES = {
    r"P100": (6, 0),
    r"P40|P4\b|GTX 10\d\d": (6, 1),
    r"V100|TITAN V": (7, 0),
    r"T4|RTX 20\d\d|QUADRO RTX": (7, 5),
    r"A100|A800|A30\b": (8, 0),
    r"A10\b|A10G|A16\b|A2\b|A40\b|A[456]000|RTX 30\d\d": (8, 6),
    r"L4\b|L40S?\b|RTX 40\d\d|6000 ADA": (8, 9),
    r"H100|H200|H800|H20\b|GH200": (9, 0),
    r"B100|B200|GB200": (10, 0),
}


def capability_of(name: str) -> tuple[int, int] | None:
    """The compute capability of a product; None if it is not in the table.

    >>> capability_of("NVIDIA A100-SXM4-80GB"), capability_of("Tesla V100-SXM2-16GB"), capability_of("a GPU of mine")
    ((8, 0), (7, 0), None)
    """
    for pattern, capability in _CAPABILITIES.items():
        if re.search(rf"\b(?:{pattern})", name.upper()):
            return capability
    return None


# ---- Devices --------------------------------------------------------------------------------------------------------------


def gpu_faults(
    name: str,
    demands: Demands,
    ranks: Sequence[int],
    found: GpuFacts,
    environment: Mapping[str, str],
    joined_as: int | None,
    *,
    with_oneflow: bool,
) -> Iterator[UnmetDemand]:
    """What is missing on a host whose ranks run on its GPUs.

    Args:
        name: of the host.
        demands: requirements of the plan.
        ranks: of the host, in the order of their GPUs.
        found: facts about the host.
        environment: additional variables of the ranks.
        joined_as: ``LOCAL_RANK`` of the only rank that is started here, by a launcher that joins a job; None for all ranks.
        with_oneflow: whether the job needs OneFlow.
    """
    if with_oneflow:
        yield from _build_faults(name, found.build)
    setting = environment.get(VISIBLE_VARIABLE, found.visible_devices)
    seen = visible_gpus(found.gpus, setting)
    is_bound = joined_as is not None and len(seen) == 1  # the launcher shows each task only its own GPU
    first = 0 if joined_as is None or is_bound else joined_as
    gpus = seen[first : first + len(ranks)]
    if len(gpus) < len(ranks):
        hidden = "" if len(seen) == len(found.gpus) else f" of {len(found.gpus)} visible ({VISIBLE_VARIABLE}={setting})"
        wanted = len(ranks) if joined_as is None else demands.devices_per_node
        advice = "" if found.gpus else "; nvidia-smi lists them; device=cpu runs the plan on CPU ranks"
        yield UnmetDemand(
            f"host {name} has {counted(len(seen), 'GPU')}{hidden}; the plan is for {wanted} per node ({demands.device}){advice}",
            can_be_forced=not found.gpus,  # there may be GPUs without nvidia-smi, as in some containers
        )
        return
    if with_oneflow:
        yield from _driver_faults(name, gpus[0].driver, found.build.cuda)
        for gpu in gpus:
            if fault := _capability_fault(name, gpu, found.build):
                yield fault
                break
    for gpu in gpus:
        if fault := _precision_fault(f"host {name}: {_named(gpu)}", _capability(gpu), demands.precision):
            yield fault
            break
    yield from _memory_faults(name, demands, ranks, gpus)


def _build_faults(name: str, build: OneFlowBuild) -> Iterator[UnmetDemand]:
    if not build.cuda:
        yield UnmetDemand(
            f"host {name}: OneFlow is built without CUDA there; it should be oneflow==0.9.0 of PyPI, built for CUDA {_WHEEL.cuda}"
        )
    if build.missing_libraries:
        first, *more = build.missing_libraries
        others = f" and {len(more)} more libraries" if more else ""
        yield UnmetDemand(
            f"host {name}: {first}{others} of cuBLAS 11 and cuDNN 8 are not found; install nvidia-cublas-cu11==11.10.3.66 and "
            "nvidia-cudnn-cu11==8.5.0.96, or set LD_LIBRARY_PATH"
        )


def _driver_faults(name: str, driver: str, cuda: str) -> Iterator[UnmetDemand]:
    lowest, shown = _LOWEST_DRIVERS.get(cuda.partition(".")[0], ((0,), ""))
    if tuple(map(int, re.findall(r"\d+", driver))) < lowest:
        full = f" (all of CUDA {cuda}: {_FULL_DRIVER})" if cuda == _WHEEL.cuda else ""
        yield UnmetDemand(
            f"host {name} has NVIDIA driver {driver}; OneFlow's CUDA {cuda} needs {shown} or a newer one{full}"
        )


def _capability(gpu: Gpu) -> tuple[int, int] | None:
    return gpu.capability if gpu.capability != (0, 0) else capability_of(gpu.name)


def _capability_fault(name: str, gpu: Gpu, build: OneFlowBuild) -> UnmetDemand | None:
    capability = _capability(gpu)
    if not build.cuda or capability is None or build.has_code_for(capability):
        return None
    return UnmetDemand(f"host {name}: {_named(gpu)} {_no_code(capability, build)}")


def _no_code(capability: tuple[int, int], build: OneFlowBuild) -> str:
    known = ", ".join(_shown(divmod(code, 10)) for code in build.machine_code)
    return (
        f"has compute capability {_shown(capability)}; OneFlow has code for {known}, which runs on GPUs of the same major and the "
        "same or a higher minor number"
    )


def _precision_fault(what: str, capability: tuple[int, int] | None, precision: str) -> UnmetDemand | None:
    compute = precision_of(precision).compute
    if capability is None:
        return None
    if compute == "bfloat16" and capability < _BFLOAT16:
        return UnmetDemand(
            f"{what} has compute capability {_shown(capability)} and no bfloat16 (from {_shown(_BFLOAT16)} on); plan with "
            "precision mixed or float32"
        )
    if compute == "float16" and capability < _TENSOR_CORES:
        return UnmetDemand(
            f"{what} has compute capability {_shown(capability)} and no tensor cores (from {_shown(_TENSOR_CORES)} on): "
            "products in float16 are not faster than in float32",
            is_warning=True,
        )
    return None


def _memory_faults(name: str, demands: Demands, ranks: Sequence[int], gpus: Sequence[Gpu]) -> Iterator[UnmetDemand]:
    """GPUs whose memory is too small, or not free; 0 bytes mean that the driver does not tell."""
    for rank, gpu in zip(ranks, gpus):
        needed = demands.memory_bytes[rank]
        if 0 < gpu.memory_bytes < needed:
            yield UnmetDemand(
                f"host {name}: GPU {gpu.index} has {format_bytes(gpu.memory_bytes)} of memory; the plan needs "
                f"{format_bytes(needed)} of rank {rank}",
                can_be_forced=True,
            )
            return
        if 0 < gpu.free_bytes < needed:
            yield UnmetDemand(
                f"host {name}: GPU {gpu.index} has {format_bytes(gpu.free_bytes)} of its {format_bytes(gpu.memory_bytes)} "
                f"of memory free; the plan needs {format_bytes(needed)} of rank {rank}; nvidia-smi shows what uses it",
                can_be_forced=True,
            )
            return


def plan_faults(demands: Demands) -> Iterator[UnmetDemand]:
    """What is wrong with any host of the plan's devices, as far as their name tells: for jobs whose hosts are not known yet."""
    capability = capability_of(demands.device)
    what = f"the plan's device {demands.device}"
    if capability is None:
        return
    if not _WHEEL.has_code_for(capability):
        yield UnmetDemand(f"{what} {_no_code(capability, _WHEEL)}", can_be_forced=True)
    if fault := _precision_fault(what, capability, demands.precision):
        yield fault


def _named(gpu: Gpu) -> str:
    return f"GPU {gpu.index} ({gpu.name})"


def _shown(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


# ---- The network of NCCL ----------------------------------------------------------------------------------------------------


def _ifname(found: GpuFacts, environment: Mapping[str, str]) -> str | None:
    return environment.get(IFNAME_VARIABLE, found.ifname)


def nccl_interface(found: GpuFacts, environment: Mapping[str, str]) -> Interface | None:
    """The interface on which NCCL listens on a host; None if there is none.

    Args:
        found: facts about the host.
        environment: additional variables of the ranks.
    """
    usable = [one for one in nccl_interfaces(found.interfaces, _ifname(found, environment)) if one.address]
    return usable[0] if usable else None


def interface_faults(name: str, found: GpuFacts, environment: Mapping[str, str]) -> Iterator[UnmetDemand]:
    """What is wrong with the network interface that NCCL uses on a host, for a job on several hosts."""
    setting = _ifname(found, environment)
    chosen = nccl_interfaces(found.interfaces, setting)
    because = f"{IFNAME_VARIABLE}={setting}" if setting else f"{IFNAME_VARIABLE} is not set"
    others = [one.name for one in found.interfaces if one.is_up and one.address and not one.address.startswith("127.")]
    better = f"it should name one of {', '.join(others)}" if others else "the host has no other with an address"
    interface = nccl_interface(found, environment)
    if interface is None:
        if chosen:
            fault = f"network interface {chosen[0].name} has no IPv4 address ({because})"
        else:
            fault = f"{because} names none of its network interfaces"
    elif not interface.is_up:
        fault = f"network interface {interface.name}, which NCCL uses, is down ({because})"
    elif interface.address.startswith("127."):
        fault = f"NCCL uses network interface {interface.name}, which no other host reaches ({because})"
    else:
        return
    yield UnmetDemand(f"host {name}: {fault}; {better}")
