"""Divisions of a cluster among the workers of a pipeline: rectangles of devices that tile the cluster.

The nodes are divided into *bands* of consecutive nodes, and the devices of a band's nodes into *strips* of consecutive devices.  A
worker has one strip of one band: a rectangle of nodes x devices per node.  Workers are numbered strip by strip, band by band, so
that neighbours in a pipeline are joined by the links inside nodes wherever possible.

**Equal rectangles** (:class:`StageMesh`) tile the cluster if both sides divide the sides of the cluster.  On 2 nodes of 4 devices
(rank = 4 node + device):

==================  =======  ===========================================
mesh                workers  ranks of each
==================  =======  ===========================================
2 nodes x 4         1        0-7
1 node x 4          2        0-3; 4-7
1 node x 2          4        0, 1; 2, 3; 4, 5; 6, 7
2 nodes x 2         2        0, 1, 4, 5; 2, 3, 6, 7
2 nodes x 1         4        0, 4; 1, 5; 2, 6; 3, 7
==================  =======  ===========================================

**Unequal rectangles** (:class:`Division`) divide the same cluster in 66 further ways, such as

==================  =======  ===========================================
rectangles          workers  ranks of each
==================  =======  ===========================================
2 x 1, 2 x 3        2        0, 4; 1, 2, 3, 5, 6, 7
1 x 4, 1 x 1, 1 x 3 3        0-3; 4; 5, 6, 7
==================  =======  ===========================================

**Number of divisions.**  A band of G devices per node has 2^(G - 1) divisions into strips.  So the number of divisions of N nodes
is d(N) = 2^(G - 1) (d(0) + ... + d(N - 1)), with d(0) = 1.

If a cluster has more than :data:`MAX_DIVISIONS` divisions, the space is restricted to divisions with one worker per band, or with a
single band, whose *inner* workers (all but the first and the last one) are equal.  Let n be the number of nodes, or of devices per
node, that is divided:

- up to n = :data:`MAX_SIDE_WITH_FREE_ENDS`, the first and the last worker may have any size;
- for greater n, the size of inner workers divides n, and the first and the last worker have half, the same or twice that size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Union

from autoddl.costmodel.cluster import Cluster, Link

__all__ = ["Division", "Meshes", "StageMesh", "all_meshes", "has_all_divisions", "stage_meshes", "uneven_divisions"]

#: Largest number of divisions of a cluster up to which all of them are in the space.
MAX_DIVISIONS = 128
#: Largest number of nodes (devices per node) up to which the first and the last worker may have any size.
MAX_SIDE_WITH_FREE_ENDS = 8


class _Rectangles:
    """The common base of all divisions of a cluster."""

    def mesh_of(self, worker: int) -> StageMesh:
        """The rectangle of a worker."""
        raise NotImplementedError

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        """The first node of a worker, and its first device in each node."""
        raise NotImplementedError

    def ranks(self, cluster: Cluster, worker: int) -> tuple[int, ...]:
        """The global ranks of a worker, node by node."""
        (node, device), mesh = self.place(cluster, worker), self.mesh_of(worker)
        return tuple(
            (node + i) * cluster.devices_per_node + device + k
            for i in range(mesh.nodes)
            for k in range(mesh.devices_per_node)
        )

    def share_nodes(self, cluster: Cluster, workers: tuple[int, ...]) -> bool:
        """Whether the workers begin at the same node, so that links inside nodes join their corresponding ranks."""
        return len({self.place(cluster, worker)[0] for worker in workers}) == 1

    def link_between(self, cluster: Cluster, workers: tuple[int, ...]) -> Link:
        """The link that joins corresponding ranks of the workers."""
        return cluster.links[1 if self.share_nodes(cluster, workers) else 0]


@dataclass(frozen=True)
class StageMesh(_Rectangles):
    """A rectangle of devices: that of one worker, or, as a division of a cluster, that of every worker.

    Attributes:
        nodes: Number of nodes.
        devices_per_node: Number of devices in each of these nodes.
    """

    nodes: int
    devices_per_node: int

    @classmethod
    def whole(cls, cluster: Cluster) -> StageMesh:
        """The rectangle of all devices of a cluster."""
        return cls(cluster.num_nodes, cluster.devices_per_node)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node}"

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def num_workers(self, cluster: Cluster) -> int:
        """Number of workers if every worker has this rectangle."""
        return cluster.num_devices // self.num_devices

    def tiles(self, cluster: Cluster) -> bool:
        """Whether equal rectangles of this size tile the cluster."""
        return cluster.num_nodes % self.nodes == 0 and cluster.devices_per_node % self.devices_per_node == 0

    def mesh_of(self, worker: int) -> StageMesh:
        return self

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        row, column = divmod(worker, cluster.devices_per_node // self.devices_per_node)
        return row * self.nodes, column * self.devices_per_node

    def devices(self, cluster: Cluster) -> Cluster:
        """One worker's devices as a cluster.

        The links keep the speed per device of the whole cluster, because the other workers of a node use its network card at the
        same time.
        """
        return replace(cluster, num_nodes=self.nodes, devices_per_node=self.devices_per_node)


@dataclass(frozen=True)
class Division(_Rectangles):
    """A division of a cluster into rectangles of different sizes.

    Attributes:
        meshes: Rectangle of every worker, strip by strip, band by band.
    """

    meshes: tuple[StageMesh, ...]

    def __str__(self) -> str:
        runs = [(mesh, len(list(alike))) for mesh, alike in groupby(self.meshes)]
        return ", ".join(str(mesh) if count == 1 else f"{mesh} ({count} times)" for mesh, count in runs)

    def num_workers(self, cluster: Cluster) -> int:
        return len(self.meshes)

    def tiles(self, cluster: Cluster) -> bool:
        """Whether the rectangles are strips of bands that contain every device of the cluster once."""
        node = device = band = 0
        for mesh in self.meshes:
            band = mesh.nodes if device == 0 else band
            device += mesh.devices_per_node
            if mesh.nodes != band or device > cluster.devices_per_node:
                return False
            if device == cluster.devices_per_node:
                node, device = node + band, 0
        return node == cluster.num_nodes and device == 0

    def mesh_of(self, worker: int) -> StageMesh:
        return self.meshes[worker]

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        return _places(self.meshes, cluster.devices_per_node)[worker]


#: A division of a cluster among workers, into equal or unequal rectangles.
Meshes = Union[StageMesh, Division]


@lru_cache(maxsize=1024)
def _places(meshes: tuple[StageMesh, ...], devices_per_node: int) -> tuple[tuple[int, int], ...]:
    """:meth:`Division.place` of all workers."""
    places, node, device = [], 0, 0
    for mesh in meshes:
        places.append((node, device))
        device += mesh.devices_per_node
        if device >= devices_per_node:
            node, device = node + mesh.nodes, 0
    return tuple(places)


def stage_meshes(cluster: Cluster) -> Iterator[StageMesh]:
    """Iterate over the rectangles whose equal copies tile the cluster, the largest first.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> [str(mesh) for mesh in stage_meshes(load_cluster("gcp-a100").resized(1, 4))]
    ['1 x 4', '1 x 2', '1 x 1']
    """
    meshes = [
        StageMesh(nodes, devices)
        for nodes in range(1, cluster.num_nodes + 1)
        if cluster.num_nodes % nodes == 0
        for devices in range(1, cluster.devices_per_node + 1)
        if cluster.devices_per_node % devices == 0
    ]
    yield from sorted(meshes, key=lambda mesh: (-mesh.num_devices, mesh.nodes))


def all_meshes(cluster: Cluster) -> Iterator[Meshes]:
    """Iterate over the divisions of the cluster that are in the space, those into equal rectangles first."""
    yield from stage_meshes(cluster)
    yield from uneven_divisions(cluster)


def has_all_divisions(cluster: Cluster) -> bool:
    """Whether all divisions of the cluster are in the space."""
    return _num_divisions(cluster) <= MAX_DIVISIONS


def _num_divisions(cluster: Cluster) -> int:
    """The number of all divisions of a cluster, by the recurrence in the module's docstring."""
    num_strip_divisions, counts = 1 << (cluster.devices_per_node - 1), [1]
    for _ in range(cluster.num_nodes):
        counts.append(num_strip_divisions * sum(counts))
    return counts[-1]


def uneven_divisions(cluster: Cluster) -> Iterator[Division]:
    """Iterate over the divisions of the space into unequal rectangles, those of few workers first.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> [str(division) for division in uneven_divisions(load_cluster("gcp-a100").resized(1, 3))]
    ['1 x 1, 1 x 2', '1 x 2, 1 x 1']
    """
    if has_all_divisions(cluster):
        offered = _all_divisions(cluster.num_nodes, cluster.devices_per_node)
    else:
        offered = _divisions_with_equal_inner_workers(cluster)
    unequal = {meshes for meshes in offered if len(set(meshes)) > 1}
    for meshes in sorted(unequal, key=lambda meshes: (len(meshes), [(m.nodes, m.devices_per_node) for m in meshes])):
        yield Division(meshes)


def _all_divisions(num_nodes: int, devices_per_node: int) -> Iterator[tuple[StageMesh, ...]]:
    """All divisions: a first band of every height, in all divisions into strips, with all divisions of the other nodes."""
    if num_nodes == 0:
        yield ()
        return
    for height in range(1, num_nodes + 1):
        divisions_of_rest = list(_all_divisions(num_nodes - height, devices_per_node))
        for strips in _compositions(devices_per_node):
            band = tuple(StageMesh(height, devices) for devices in strips)
            for others in divisions_of_rest:
                yield (*band, *others)


def _compositions(whole: int) -> Iterator[tuple[int, ...]]:
    """All compositions of a number: the ordered sums of positive numbers that are equal to it."""
    if whole == 0:
        yield ()
    for first in range(1, whole + 1):
        for others in _compositions(whole - first):
            yield (first, *others)


def _divisions_with_equal_inner_workers(cluster: Cluster) -> Iterator[tuple[StageMesh, ...]]:
    """The restricted divisions of large clusters: one worker per band, or a single band (see the module's docstring)."""
    for heights in _sizes_with_equal_inner(cluster.num_nodes):
        yield tuple(StageMesh(nodes, cluster.devices_per_node) for nodes in heights)
    for strips in _sizes_with_equal_inner(cluster.devices_per_node):
        yield tuple(StageMesh(cluster.num_nodes, devices) for devices in strips)


def _sizes_with_equal_inner(whole: int) -> Iterator[tuple[int, ...]]:
    """The sizes of workers whose inner ones are equal and whose sum is ``whole`` (see the module's docstring)."""
    for first in range(1, whole) if whole <= MAX_SIDE_WITH_FREE_ENDS else ():
        yield (first, whole - first)
    for inner in range(1, whole - 1):
        ends = range(1, whole) if whole <= MAX_SIDE_WITH_FREE_ENDS else sorted({inner // 2, inner, 2 * inner} - {0})
        if whole > MAX_SIDE_WITH_FREE_ENDS and whole % inner:
            continue
        for first in ends:
            for last in ends:
                count, rest = divmod(whole - first - last, inner)
                if count >= 1 and not rest:
                    yield (first, *(inner,) * count, last)
