"""How the workers of a pipeline share a cluster: rectangles of devices that tile it.

The nodes are divided in *bands* of consecutive nodes, and the devices of a band's nodes in *strips* of consecutive devices; a
worker has one strip of one band: a rectangle of nodes x devices per node, with its own links inside and between nodes.  Workers
are numbered strip by strip, band by band, so that neighbours in a pipeline are joined by the links inside the nodes as far as that
goes.

**Equal rectangles** (:class:`StageMesh`) tile the cluster where both sides divide the cluster's.  On 2 nodes of 4 devices (rank =
4 node + device):

==================  =======  ===========================================
mesh                workers  ranks of each
==================  =======  ===========================================
2 nodes x 4         1        0-7
1 node x 4          2        0-3; 4-7
1 node x 2          4        0, 1; 2, 3; 4, 5; 6, 7
2 nodes x 2         2        0, 1, 4, 5; 2, 3, 6, 7
2 nodes x 1         4        0, 4; 1, 5; 2, 6; 3, 7
==================  =======  ===========================================

**Unequal ones** (:class:`Division`) on the same cluster are 66 more, such as

==================  =======  ===========================================
rectangles          workers  ranks of each
==================  =======  ===========================================
2 x 1, 2 x 3        2        0, 4; 1, 2, 3, 5, 6, 7
1 x 4, 1 x 1, 1 x 3 3        0-3; 4; 5, 6, 7
==================  =======  ===========================================

A cluster of N nodes of G devices has as many divisions as N has compositions, each part counted 2^(G - 1) times.  Where these are
more than :data:`MAX_DIVISIONS`, those are offered that have whole nodes alone or a single band, and equal inner workers: the
first and the last one of any size where there are up to :data:`FEW` nodes (devices per node); where there are more, inner ones
divide them, and the first and the last one have half of, as much as, or twice what an inner one has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import Union

from autoddl.costmodel.cluster import Cluster, Link

__all__ = ["Division", "Meshes", "StageMesh", "all_meshes", "has_all_divisions", "stage_meshes", "uneven_divisions"]

#: Up to so many divisions of a cluster are all looked at.
MAX_DIVISIONS = 128
#: Up to so many nodes (devices per node) the first and the last worker may have any size.
FEW = 8


class _Rectangles:
    """What workers have in common, however the cluster is divided."""

    def mesh_of(self, worker: int) -> StageMesh:
        """The rectangle of one worker."""
        raise NotImplementedError

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        """The first node and the first device in it of a worker."""
        raise NotImplementedError

    def ranks(self, cluster: Cluster, worker: int) -> tuple[int, ...]:
        """The global ranks of a worker, in the order of its mesh."""
        (node, device), mesh = self.place(cluster, worker), self.mesh_of(worker)
        return tuple(
            (node + i) * cluster.devices_per_node + device + k
            for i in range(mesh.nodes)
            for k in range(mesh.devices_per_node)
        )

    def share_nodes(self, cluster: Cluster, workers: tuple[int, ...]) -> bool:
        """Whether the workers are in the same nodes, so that their equal ranks are joined inside them."""
        return len({self.place(cluster, worker)[0] for worker in workers}) == 1

    def link_between(self, cluster: Cluster, workers: tuple[int, ...]) -> Link:
        """The link that joins equal ranks of these workers."""
        return cluster.links[1 if self.share_nodes(cluster, workers) else 0]


@dataclass(frozen=True)
class StageMesh(_Rectangles):
    """The rectangle of devices that a worker has, or every worker."""

    nodes: int
    devices_per_node: int

    @classmethod
    def whole(cls, cluster: Cluster) -> StageMesh:
        """All devices of a cluster."""
        return cls(cluster.num_nodes, cluster.devices_per_node)

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node}"

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def num_workers(self, cluster: Cluster) -> int:
        """How many of them tile the cluster."""
        return cluster.num_devices // self.num_devices

    def tiles(self, cluster: Cluster) -> bool:
        """Whether equal ones do."""
        return cluster.num_nodes % self.nodes == 0 and cluster.devices_per_node % self.devices_per_node == 0

    def mesh_of(self, worker: int) -> StageMesh:
        return self

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        row, column = divmod(worker, cluster.devices_per_node // self.devices_per_node)
        return row * self.nodes, column * self.devices_per_node

    def devices(self, cluster: Cluster) -> Cluster:
        """One worker's devices as a cluster.

        Its links are those of the whole cluster: the other workers of a node use its network card at the same time.
        """
        return replace(cluster, num_nodes=self.nodes, devices_per_node=self.devices_per_node)


@dataclass(frozen=True)
class Division(_Rectangles):
    """Rectangles of different sizes that tile a cluster, one for each worker (order: module's docstring)."""

    meshes: tuple[StageMesh, ...]

    def __str__(self) -> str:
        runs = [(mesh, len(list(alike))) for mesh, alike in groupby(self.meshes)]
        return ", ".join(str(mesh) if count == 1 else f"{mesh} ({count} times)" for mesh, count in runs)

    def num_workers(self, cluster: Cluster) -> int:
        return len(self.meshes)

    def tiles(self, cluster: Cluster) -> bool:
        """Whether they are strips of bands that have all devices of the cluster once."""
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


#: How all workers lie.
Meshes = Union[StageMesh, Division]


@lru_cache(maxsize=1024)
def _places(meshes: tuple[StageMesh, ...], devices_per_node: int) -> tuple[tuple[int, int], ...]:
    places, node, device = [], 0, 0
    for mesh in meshes:
        places.append((node, device))
        device += mesh.devices_per_node
        if device >= devices_per_node:
            node, device = node + mesh.nodes, 0
    return tuple(places)


def stage_meshes(cluster: Cluster) -> Iterator[StageMesh]:
    """All rectangles that tile the cluster, the largest first."""
    meshes = [
        StageMesh(nodes, devices)
        for nodes in range(1, cluster.num_nodes + 1)
        if cluster.num_nodes % nodes == 0
        for devices in range(1, cluster.devices_per_node + 1)
        if cluster.devices_per_node % devices == 0
    ]
    yield from sorted(meshes, key=lambda mesh: (-mesh.num_devices, mesh.nodes))


def all_meshes(cluster: Cluster) -> Iterator[Meshes]:
    """All ways to share out the cluster, those in equal rectangles first."""
    yield from stage_meshes(cluster)
    yield from uneven_divisions(cluster)


def has_all_divisions(cluster: Cluster) -> bool:
    """Whether :func:`uneven_divisions` leaves none out."""
    return _num_divisions(cluster) <= MAX_DIVISIONS


def _num_divisions(cluster: Cluster) -> int:
    """With equal ones: a first band of any height, in strips cut anywhere, and then the rest."""
    strips, found = 1 << (cluster.devices_per_node - 1), [1]
    for _ in range(cluster.num_nodes):
        found.append(strips * sum(found))
    return found[-1]


def uneven_divisions(cluster: Cluster) -> Iterator[Division]:
    """The divisions of the space (module's docstring) that are not of equal rectangles, those of few workers first."""
    offered = _every(cluster.num_nodes, cluster.devices_per_node) if has_all_divisions(cluster) else _alike(cluster)
    different = {meshes for meshes in offered if len(set(meshes)) > 1}
    for meshes in sorted(different, key=lambda meshes: (len(meshes), [(m.nodes, m.devices_per_node) for m in meshes])):
        yield Division(meshes)


def _every(num_nodes: int, devices_per_node: int) -> Iterator[tuple[StageMesh, ...]]:
    if num_nodes == 0:
        yield ()
        return
    for nodes in range(1, num_nodes + 1):
        rest = list(_every(num_nodes - nodes, devices_per_node))
        for strips in _compositions(devices_per_node):
            band = tuple(StageMesh(nodes, devices) for devices in strips)
            for others in rest:
                yield (*band, *others)


def _compositions(whole: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum, in any order."""
    if whole == 0:
        yield ()
    for first in range(1, whole + 1):
        for others in _compositions(whole - first):
            yield (first, *others)


def _alike(cluster: Cluster) -> Iterator[tuple[StageMesh, ...]]:
    """Of large clusters: bands of whole nodes, or strips of all nodes, of which the inner ones are equal."""
    for nodes in _equal_inside(cluster.num_nodes):
        yield tuple(StageMesh(one, cluster.devices_per_node) for one in nodes)
    for devices in _equal_inside(cluster.devices_per_node):
        yield tuple(StageMesh(cluster.num_nodes, one) for one in devices)


def _equal_inside(whole: int) -> Iterator[tuple[int, ...]]:
    """Numbers that add up, of which the inner ones are equal (first and last: module's docstring)."""
    for first in range(1, whole) if whole <= FEW else ():
        yield (first, whole - first)
    for inner in range(1, whole - 1):
        ends = range(1, whole) if whole <= FEW else sorted({inner // 2, inner, 2 * inner} - {0})
        if whole > FEW and whole % inner:
            continue
        for first in ends:
            for last in ends:
                count, rest = divmod(whole - first - last, inner)
                if count >= 1 and not rest:
                    yield (first, *(inner,) * count, last)
