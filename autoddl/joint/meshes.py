"""How the workers of a pipeline share a cluster: equal rectangles of devices.

A worker has ``nodes`` whole nodes' worth of ``devices_per_node`` devices each; both divide the cluster's, so that the workers tile
it.  Workers are numbered inside a group of nodes first: neighbours in a pipeline are joined by the links inside the nodes as far
as that goes.  On 2 nodes of 4 devices (rank = 4 node + device):

==================  =======  ===========================================
mesh                workers  ranks of each
==================  =======  ===========================================
2 nodes x 4         1        0-7
1 node x 4          2        0-3; 4-7
1 node x 2          4        0, 1; 2, 3; 4, 5; 6, 7
2 nodes x 2         2        0, 1, 4, 5; 2, 3, 6, 7
2 nodes x 1         4        0, 4; 1, 5; 2, 6; 3, 7
==================  =======  ===========================================
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autoddl.costmodel.cluster import Cluster, Link

__all__ = ["StageMesh", "stage_meshes"]


@dataclass(frozen=True)
class StageMesh:
    """The rectangle of devices that every worker has."""

    nodes: int
    devices_per_node: int

    def __str__(self) -> str:
        return f"{self.nodes} x {self.devices_per_node}"

    @property
    def num_devices(self) -> int:
        return self.nodes * self.devices_per_node

    def num_workers(self, cluster: Cluster) -> int:
        """How many of them tile the cluster."""
        return cluster.num_devices // self.num_devices

    def place(self, cluster: Cluster, worker: int) -> tuple[int, int]:
        """The first node and the first device in it of a worker."""
        row, column = divmod(worker, cluster.devices_per_node // self.devices_per_node)
        return row * self.nodes, column * self.devices_per_node

    def ranks(self, cluster: Cluster, worker: int) -> tuple[int, ...]:
        """The global ranks of a worker, in the order of its mesh."""
        node, device = self.place(cluster, worker)
        return tuple(
            (node + i) * cluster.devices_per_node + device + k
            for i in range(self.nodes)
            for k in range(self.devices_per_node)
        )

    def share_nodes(self, cluster: Cluster, workers: tuple[int, ...]) -> bool:
        """Whether the workers are in the same nodes, so that their equal ranks are joined inside them."""
        return len({self.place(cluster, worker)[0] for worker in workers}) == 1

    def link_between(self, cluster: Cluster, workers: tuple[int, ...]) -> Link:
        """The link that joins equal ranks of these workers."""
        return cluster.links[1 if self.share_nodes(cluster, workers) else 0]

    def devices(self, cluster: Cluster) -> Cluster:
        """One worker's devices as a cluster.

        Its links are those of the whole cluster: the other workers of a node use its network card at the same time.
        """
        return replace(cluster, num_nodes=self.nodes, devices_per_node=self.devices_per_node)


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
