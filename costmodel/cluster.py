"""The cluster: devices, their memory and speed, and the links between them.

**Compute.**  A local product of an (m x k) and a (k x n) matrix takes

    t = launch + (F + F0) / (efficiency * peak) + (m k + k n + m n) * itemsize / memory_bandwidth,     F = 2 m k n FLOPs

so that its speed depends on its size: the arithmetic of F FLOPs runs at the part efficiency * F / (F + F0) of the peak, and F0
FLOPs are the size of a product at half speed.  So F0 / (efficiency * peak) is a fixed time per product (filling and draining the
multiprocessors).  The products inside attention run at an efficiency of their own, and have no such term.  Element-wise work takes
launch + bytes / memory_bandwidth.

**Links.**  Each network level has a latency alpha and a bandwidth 1/beta *per device*, measured while all devices of a node
communicate, since every step of a plan runs on all devices at once.  A bandwidth that is given per node (a shared network
card) is divided by the number of devices of the node.

**Calibrated terms.**  A measured cluster may have more terms than one (alpha, beta) per level.  All are affine in bytes:

- a collective, or a collective in groups of one size, may have its own (alpha, beta);
- *copy*: seconds per byte of the tensor for local reductions and copies of a collective, added if the group size has no terms
  of its own;
- *crowding*: increments of alpha and beta (for compute, of a factor) if ranks share the ``cores_per_node`` cores of a node.  They
  are multiplied by ``excess`` = max(0, devices_per_node / cores_per_node - 1).

**Overlap.**  A cluster file may have the part of the communication of linear layers that is hidden under their products
(``hidden_communication``), as measured with an executor that overlaps them.

A cluster is a JSON file.  Every number has a unit and a source (datasheet, paper, measured).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from .calibration import Calibration, calibration_from_fields, interval_of
from .collectives import Collective, Step
from .documents import Fields, canonical_hash, check_document, load_document
from .errors import UserError, quote, shortened
from .limits import MAX_DEVICES, RANGES
from .localwork import LocalWork, elementwise, matmul
from .precision import PRECISIONS, RATES, precision_of
from .reading import is_whole, shown_path
from .suggestions import did_you_mean
from .units import to_si

if TYPE_CHECKING:
    from .layerwork import LayerWork

__all__ = ["Cluster", "Device", "Link", "load_cluster", "preset_names"]

FORMAT = "autoddl-cluster"
LEVEL_NAMES = ("inter-node", "intra-node")


@dataclass(frozen=True)
class Link:
    """The links of one network level.

    Every time is affine in bytes; see :meth:`times`.

    Attributes:
        latency_s: seconds per message (alpha) from one device to another, and of collectives that have no terms of their own.
        bandwidth: bytes/s per device (1 / beta), of the same messages.
        collectives: (latency_s, bandwidth) of collectives that were calibrated separately.
        groups: (latency_s, bandwidth) of a collective in groups of one size.
        copies: seconds per byte of a collective's local reductions and copies.
    """

    latency_s: float
    bandwidth: float
    collectives: dict[Collective, tuple[float, float]] = field(default_factory=dict, hash=False)
    groups: dict[tuple[Collective, int], tuple[float, float]] = field(default_factory=dict, hash=False)
    copies: dict[Collective, float] = field(default_factory=dict, hash=False)

    def time(self, step: Step) -> float:
        """Seconds that ``step`` takes on this link (formulas: :mod:`autoddl.costmodel.collectives`)."""
        latency_s, transfer_s = self.times(step)
        return latency_s + transfer_s

    def times(self, step: Step) -> tuple[float, float]:
        """Seconds of ``step`` as (latency, transfer).

        The latency does not depend on the bytes of the step, and the transfer is proportional to them.  So a step of one byte has
        the seconds per byte as its transfer.

        >>> from autoddl.costmodel.distribution import Axis
        >>> link = Link(latency_s=1e-6, bandwidth=1e9)
        >>> link.times(Step(Collective.ALL_GATHER, Axis(2, 1), 1e6))
        (1e-06, 0.0005)
        """
        if not (self.groups or self.collectives or self.copies):  # the usual case; a plan calls this thousands of times
            return step.messages * self.latency_s, step.sent_bytes / self.bandwidth
        size: Any = step.axis.size
        if isinstance(size, np.ndarray) and self.groups:  # a group of strategies
            latency_s, bandwidth, copy = self._terms_up_to(step.collective, int(size.max()))[:, size]
        else:
            latency_s, bandwidth, copy = self._terms(step.collective, size)
        return step.messages * latency_s, step.sent_bytes / bandwidth + step.nbytes * copy

    def _terms(self, collective: Collective, size: Any) -> tuple[float, float, float]:
        """(latency_s, bandwidth, copies) of a collective in groups of one size."""
        own = self.groups.get((collective, size)) if self.groups else None
        if own is not None:
            return (*own, 0.0)
        return *self.collectives.get(collective, (self.latency_s, self.bandwidth)), self.copies.get(collective, 0.0)

    def _terms_up_to(self, collective: Collective, largest: int) -> np.ndarray:
        """:meth:`_terms` in groups of each size up to at least ``largest``, shape (3, sizes)."""
        known = self._known_terms.get(collective)
        if known is None or known.shape[1] <= largest:
            known = np.array([self._terms(collective, size) for size in range(largest + 1)]).T
            self._known_terms[collective] = known
        return known

    @cached_property
    def _known_terms(self) -> dict[Collective, np.ndarray]:
        return {}

    def message_time(self, messages: float, nbytes: float) -> float:
        """Seconds of messages from one device to another, ``nbytes`` in total.

        They use ``latency_s`` and ``bandwidth``, whatever terms collectives have: calibration fits these two to point-to-point
        transfers if such transfers were measured.

        >>> Link(latency_s=1e-6, bandwidth=1e9).message_time(2, 1e6)
        0.001002
        """
        return messages * self.latency_s + nbytes / self.bandwidth


@dataclass(frozen=True)
class Level:
    """One network level of a plan's mesh.

    Attributes:
        name: ``inter-node`` or ``intra-node``.
        size: number of nodes, or of devices per node.
        link: the links of this level.
    """

    name: str
    size: int
    link: Link


@dataclass(frozen=True)
class Device:
    """One device.

    Attributes:
        name: of the device type.
        memory_bytes: capacity of the memory.
        memory_bandwidth: bytes/s.
        peak_flops: FLOP/s per rate (``float32``, ``mixed``, ``fp8``); the first entry is the default precision.
        efficiency: fraction of the peak that large matrix products reach.
        launch_s: seconds to launch one kernel.
        core_efficiency: fraction of the peak that the products inside attention reach; None for ``efficiency``.
        half_speed: per rate, the FLOPs of a product that reaches half of the efficiency; 0 for rates that are not named.
        framework_bytes: memory that the framework itself occupies: context, communication buffers, fragmentation.
    """

    name: str
    memory_bytes: float
    memory_bandwidth: float
    peak_flops: dict[str, float] = field(hash=False)
    efficiency: float
    launch_s: float
    core_efficiency: float | None = None
    half_speed: dict[str, float] = field(default_factory=dict, hash=False)
    framework_bytes: float = 0.0

    def peak(self, precision: str) -> float:
        """FLOP/s of the products of linear layers in a precision.

        Raises:
            UserError: the device has no speed for it.
        """
        return self._peak_of(precision, precision_of(precision).rate)

    def core_peak(self, precision: str) -> float:
        """FLOP/s of the products inside attention in a precision.

        Raises:
            UserError: the device has no speed for it.
        """
        return self._peak_of(precision, precision_of(precision).core_rate)

    def _peak_of(self, precision: str, rate: str) -> float:
        if rate not in self.peak_flops:
            known = [name for name, types in PRECISIONS.items() if types.rate in self.peak_flops]
            raise UserError(
                f"precision {precision!r} is not defined for {self.name}, should be one of {', '.join(known)}"
            )
        return self.peak_flops[rate]

    def arithmetic_s(self, work: LocalWork, precision: str) -> Any:
        """Seconds of the arithmetic of products (formula: module docstring).

        >>> device = load_cluster("v100-b").device
        >>> device.arithmetic_s(LocalWork(flops=device.efficiency * device.peak("float32")), "float32")
        1.0
        """
        flops = work.flops + work.products * self.half_speed.get(precision_of(precision).rate, 0.0)
        seconds = flops / (self.efficiency * self.peak(precision))
        if isinstance(work.core_flops, float) and not work.core_flops:  # the usual case: no attention
            return seconds
        efficiency = self.efficiency if self.core_efficiency is None else self.core_efficiency
        return seconds + work.core_flops / (efficiency * self.core_peak(precision))


@dataclass(frozen=True)
class Cluster:
    """A cluster of equal nodes of equal devices.

    Attributes:
        name: of the cluster.
        num_nodes, devices_per_node: its size.
        device: the type of its devices.
        links: (inter-node, intra-node).
        document: the JSON document that the cluster was read from.
        cores_per_node: cores that the ranks of a node share; None if devices are not ranks on cores.
        hidden_part: part of the communication of linear layers that runs under their products, where an executor overlaps them.
        calibration: the record of the measurements; None if nothing was measured.

    >>> cluster = load_cluster("dgx-a100").resized(num_nodes=2, devices_per_node=8)
    >>> cluster.num_devices, [(level.name, level.size) for level in cluster.levels]
    (16, [('inter-node', 2), ('intra-node', 8)])
    """

    name: str
    num_nodes: int
    devices_per_node: int
    device: Device
    links: tuple[Link, Link]
    document: dict[str, Any] = field(repr=False, compare=False, hash=False)
    cores_per_node: int | None = None
    hidden_part: float = 0.0
    calibration: Calibration | None = field(default=None, repr=False, compare=False, hash=False)

    @property
    def has_gpus(self) -> bool:
        """Whether the devices are GPUs, not ranks on a CPU: those have cores in the cluster file, or CPU in the device's name."""
        return self.cores_per_node is None and "CPU" not in self.device.name.upper()

    @property
    def excess(self) -> float:
        """Ranks per core in excess of one; see :func:`excess`."""
        return excess(self.devices_per_node, self.cores_per_node)

    @property
    def num_devices(self) -> int:
        """Number of devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The network levels of size 2 or more, outermost first; for a single device one level of size 1.

        ``Axis.level`` is an index into this tuple.
        """
        sizes = (self.num_nodes, self.devices_per_node)
        every = tuple(Level(name, size, link) for name, size, link in zip(LEVEL_NAMES, sizes, self.links))
        return tuple(level for level in every if level.size > 1) or every[1:]

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """The size of each of :attr:`levels`."""
        return tuple(level.size for level in self.levels)

    @property
    def default_precision(self) -> str:
        """The default precision of the device."""
        return next(iter(self.device.peak_flops))

    def time(self, step: Step) -> float:
        """Seconds that one communication step takes."""
        return self.levels[step.axis.level].link.time(step)

    def times(self, step: Step) -> tuple[float, float]:
        """Seconds of one communication step as (latency, transfer); see :meth:`Link.times`."""
        return self.levels[step.axis.level].link.times(step)

    def local_time(self, work: LocalWork, precision: str) -> Any:
        """Seconds of local work (formula: module docstring)."""
        arithmetic_s, memory_s, launches_s = self.local_times(work, precision)
        return launches_s + arithmetic_s + memory_s

    def local_times(self, work: LocalWork, precision: str) -> tuple[Any, Any, Any]:
        """Seconds of local work as (arithmetic, memory traffic, kernel launches)."""
        device = self.device
        return (
            device.arithmetic_s(work, precision),
            work.nbytes / device.memory_bandwidth,
            work.launches * device.launch_s,
        )

    def matmul_time(self, m: float, k: float, n: float, precision: str, itemsize: int, count: float = 1) -> float:
        """Seconds of ``count`` local (m x k) by (k x n) products in one kernel (formula: module docstring)."""
        return self.local_time(matmul(m, k, n, itemsize, count), precision)

    def elementwise_time(self, nbytes: float) -> float:
        """Seconds of an element-wise kernel that reads and writes ``nbytes`` in total, in any precision."""
        return self.local_time(elementwise(nbytes), self.default_precision)

    def exposed_part(self, work: LayerWork) -> float:
        """The part of the communication of a layer's passes that does not run under its products."""
        return 1.0 - self.hidden_part if work.overlaps else 1.0

    @property
    def hash(self) -> str:
        """Hash of size, links and device, without descriptions; a plan records it."""
        return canonical_hash(
            {
                "levels": [self.num_nodes, self.devices_per_node],
                "links": [_hashed(link) for link in self.links],
                "device": [
                    self.device.memory_bytes,
                    self.device.memory_bandwidth,
                    self.device.peak_flops,
                    self.device.efficiency,
                    self.device.launch_s,
                    *_optional_figures(self),
                ],
            }
        )

    def resized(self, num_nodes: int | None = None, devices_per_node: int | None = None) -> Cluster:
        """The cluster with another number of nodes or of devices per node; bandwidths given per node are divided again."""
        document = dict(self.document)
        for name, what, value in (
            ("num_nodes", "nodes", num_nodes),
            ("devices_per_node", "devices per node", devices_per_node),
        ):
            if value is not None:
                if value < 1:
                    raise UserError(f"{what} {value} should be at least 1")
                document[name] = value
        return from_document(document, self.name)

    def with_links(self, latency_s: float | None = None, bandwidth: float | None = None) -> Cluster:
        """The cluster with the latency [s] or the bandwidth [bytes/s per device] of all levels replaced."""
        for name, value, quantity, unit in (
            ("latency", latency_s, "time", "s"),
            ("bandwidth", bandwidth, "rate", "bytes/s"),
        ):
            lowest, highest = RANGES[quantity]
            if value is not None and not lowest <= value <= highest:
                raise UserError(f"{name} {value:g} {unit} should be from {lowest:g} to {highest:g} {unit}")
        if latency_s is None and bandwidth is None:
            return self
        inter, intra = (
            Link(
                link.latency_s if latency_s is None else latency_s,
                link.bandwidth if bandwidth is None else bandwidth,
            )
            for link in self.links
        )
        # The calibration does not describe the new links.
        return replace(self, links=(inter, intra), calibration=None)


def excess(devices_per_node: int, cores_per_node: int | None) -> float:
    """Ranks per core in excess of one; 0 if devices are not ranks on cores (``cores_per_node`` is None)."""
    return 0.0 if cores_per_node is None else max(0.0, devices_per_node / cores_per_node - 1.0)


def _optional_figures(cluster: Cluster) -> list[Any]:
    """The figures that a cluster file may leave out, if it has any: so files without them keep their hash."""
    device = cluster.device
    figures = [device.core_efficiency, device.half_speed, device.framework_bytes, cluster.hidden_part]
    return figures if any(figures) else []


def _hashed(link: Link) -> list[Any]:
    known: list[Any] = [
        link.latency_s,
        link.bandwidth,
        sorted((c.value, *own) for c, own in link.collectives.items()),
    ]
    if link.groups or link.copies:
        known.append(sorted((c.value, size, *own) for (c, size), own in link.groups.items()))
        known.append(sorted((c.value, copy) for c, copy in link.copies.items()))
    return known


@cache
def preset_names() -> tuple[str, ...]:
    """The names of the built-in clusters."""
    files = resources.files("autoddl.costmodel.clusters").iterdir()
    return tuple(sorted(file.name[: -len(".json")] for file in files if file.name.endswith(".json")))


def load_cluster(name: str | os.PathLike[str]) -> Cluster:
    """Load a built-in cluster by name, or a cluster file by path.

    Raises:
        UserError: there is no such built-in cluster or file, or the file is not a valid cluster.
    """
    text = os.fspath(name)
    if text in preset_names():
        source = resources.files("autoddl.costmodel.clusters").joinpath(f"{text}.json")
        with resources.as_file(source) as path:
            return from_document(load_document(path, FORMAT).value, text)
    if not os.path.exists(text):
        question = did_you_mean(text, preset_names())
        hint = f"; {question}" if question else ""
        raise UserError(f"cluster {quote(text)} is neither a file nor one of {', '.join(preset_names())}{hint}")
    return from_document(load_document(text, FORMAT).value, shown_path(text))


def _quantity(fields: Fields, name: str, quantity: str, unit_of: str | None = None) -> float:
    entry = fields.object(name)
    value, unit = entry.number("value", maximum=math.inf), entry.text("unit")
    result = to_si(value, unit, unit_of or quantity, f"{fields.where}: {name}")
    lowest, highest = RANGES[quantity]
    if not lowest <= result <= highest:
        raise UserError(
            f"{fields.where}: {name} is {value:g} {unit}, should be from {lowest:g} to {highest:g} in SI units"
        )
    entry.text("source")
    if "interval" in entry:
        interval_of(entry)
    entry.finish()
    return result


def _pair(fields: Fields, excess_: float, share: float = 1.0) -> tuple[float, float]:
    """Read (latency_s, bandwidth) with the optional crowding terms added; ``share`` devices share the bandwidth."""
    latency, bandwidth = _quantity(fields, "latency", "time"), _quantity(fields, "bandwidth", "rate") / share
    if "crowding" in fields:
        crowding = fields.object("crowding")
        latency += excess_ * _quantity(crowding, "latency", "time")
        bandwidth = 1.0 / (1.0 / bandwidth + excess_ * _quantity(crowding, "slowness", "slowness"))
        crowding.finish()
    return latency, bandwidth


def _link(fields: Fields, devices_per_node: int, excess_: float) -> Link:
    per = fields.text("per")
    if per not in ("device", "node"):
        raise UserError(f"{fields.where}: per is {per!r}, should be 'device' or 'node'")
    share = devices_per_node if per == "node" else 1
    link = Link(*_pair(fields, excess_, share))
    if "collectives" in fields:
        table = fields.object("collectives")
        for name in table.value:
            if name not in {collective.value for collective in Collective}:
                raise UserError(
                    f"{table.where}: unknown collective {quote(name)}; known ones are {[c.value for c in Collective]}"
                )
            _collective(table.object(name), Collective(name), link, excess_, share)
    fields.finish()
    return link


def _collective(entry: Fields, collective: Collective, link: Link, excess_: float, share: float) -> None:
    """Read the separate terms of a collective into the dictionaries of ``link``."""
    link.collectives[collective] = _pair(entry, excess_, share)
    if "copy" in entry:
        link.copies[collective] = _quantity(entry, "copy", "slowness")
    if "groups" in entry:
        groups = entry.object("groups")
        for size in groups.value:
            if not (is_whole(size) and 2 <= int(size) <= MAX_DEVICES and size == str(int(size))):
                raise UserError(f"{groups.where}: {quote(size)} should be the number of devices of a group, 2 or more")
            own = groups.object(size)
            link.groups[collective, int(size)] = _pair(own, excess_, share)
            own.finish()
    entry.finish()


def _device(fields: Fields, excess_: float) -> Device:
    # Ranks that share cores take turns: all local work slows down by the same factor.
    slower = 1.0 + (excess_ * _quantity(fields, "crowding", "factor", "ratio") if "crowding" in fields else 0.0)
    peaks = fields.object("peak")
    peak_flops = {name: _quantity(peaks, name, "compute") for name in peaks.value}
    if not peak_flops or set(peak_flops) - set(RATES):
        raise UserError(
            f"{peaks.where}: names {shortened(str(sorted(peak_flops)))}, should name one or more of {', '.join(RATES)}"
        )
    half_speed: dict[str, float] = {}
    if "half_speed" in fields:
        half_speeds = fields.object("half_speed")
        half_speed = {name: _quantity(half_speeds, name, "flops") for name in half_speeds.value}
        if set(half_speed) - set(peak_flops):
            raise UserError(
                f"{half_speeds.where}: names {shortened(str(sorted(half_speed)))}, should name rates of peak: "
                f"{', '.join(peak_flops)}"
            )
    device = Device(
        name=fields.text("name"),
        memory_bytes=_quantity(fields, "memory", "size"),
        memory_bandwidth=_quantity(fields, "memory_bandwidth", "rate") / slower,
        peak_flops=peak_flops,
        efficiency=_quantity(fields, "efficiency", "ratio") / slower,
        launch_s=_quantity(fields, "launch", "time") * slower,
        core_efficiency=(
            _quantity(fields, "core_efficiency", "ratio") / slower if "core_efficiency" in fields else None
        ),
        half_speed=half_speed,
        framework_bytes=_quantity(fields, "framework_memory", "size") if "framework_memory" in fields else 0.0,
    )
    fields.finish()
    return device


def from_document(value: Any, where: str) -> Cluster:
    """Read a cluster from its parsed JSON document.

    Raises:
        UserError: a field is missing, unknown or out of range.
    """
    fields = check_document(value, FORMAT, 1, where)
    num_nodes, devices_per_node = fields.integer("num_nodes", 1), fields.integer("devices_per_node", 1)
    if num_nodes * devices_per_node > MAX_DEVICES:
        raise UserError(
            f"{where}: {num_nodes} nodes of {devices_per_node} devices should be at most {MAX_DEVICES} devices"
        )
    links = fields.object("links")
    cores = fields.integer("cores_per_node", 1) if "cores_per_node" in fields else None
    crowd = excess(devices_per_node, cores)
    cluster = Cluster(
        name=fields.text("name"),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        device=_device(fields.object("device"), crowd),
        links=(
            _link(links.object("inter-node"), devices_per_node, crowd),
            _link(links.object("intra-node"), devices_per_node, crowd),
        ),
        document=value,
        cores_per_node=cores,
        hidden_part=_quantity(fields, "hidden_communication", "ratio") if "hidden_communication" in fields else 0.0,
        calibration=calibration_from_fields(fields.object("calibration")) if "calibration" in fields else None,
    )
    links.finish()
    fields.text("description")
    fields.finish()
    return cluster
