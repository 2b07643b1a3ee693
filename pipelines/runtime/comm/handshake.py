"""`Handshake`: before two CPU ranks of different hosts exchange much data, they begin at the same time, so that it passes at once.

OneFlow has one connection between two processes. Each rank of an exchange sends a notice; the other one asks for the data; the data
follow, over the connection that this rank's own request takes. Let L be the latency of the network, n the bytes that each rank
sends, B its bandwidth, and t and t' the times at which the ranks begin:

===============  ==================================================================================================  =============
the ranks begin  what happens                                                                                        the data take
===============  ==================================================================================================  =============
|t - t'| < L     both have each other's notice, and ask, before they are asked; both directions are in use at once   n / B
|t - t'| >= L    the first one is asked before it has the other's notice; its own request waits behind all its data  2 n / B
===============  ==================================================================================================  =============

In a step the ranks come from computations of their own, seldom within L of each other.

So before an exchange the lower rank sends the other one a token. The receiver is done with it L before the sender, which waits for
the acknowledgement: chance would decide which of the two cases it is. But the receiver computes the first element of its data with
the token, which delays it by some tenths of a millisecond. Then they begin less than L apart. The host's threads wait for nothing.

A token takes one message of latency alpha, which cluster files have. It saves about n / (4 B) on average: without it, about every
second exchange takes up to twice as long, but the ranks wait for each other in either case. So it is worth sending from
n = 4 alpha B on.

Rings of three ranks or more ask one neighbour, and answer the other. NCCL, on GPUs, asks nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddl.costmodel.cluster import Cluster

__all__ = ["NO_HANDSHAKE", "Handshake", "handshake_of", "worth_a_token"]

#: A token saves this part of n / B on average.
_SAVED = 0.25


@dataclass(frozen=True)
class Handshake:
    """Before which exchanges there is a handshake.

    Attributes:
        ranks_per_host: Number of ranks of each host; ranks are numbered host by host.
        least_bytes: The least number of bytes that each of the two ranks sends.

    >>> handshake = Handshake(ranks_per_host=2, least_bytes=4096)
    >>> [handshake.is_due(group, 4096) for group in ((0, 2), (1, 2), (0, 1), (0, 1, 2, 3))]
    [True, True, False, False]
    >>> handshake.is_due((0, 2), 4095)
    False
    """

    ranks_per_host: int = 1
    least_bytes: float = math.inf

    def is_due(self, group: tuple[int, ...], num_bytes: float) -> bool:
        """Return whether there is a handshake before each of the ranks sends the others so many bytes."""
        if len(group) != 2 or num_bytes < self.least_bytes:
            return False
        one, other = (rank // self.ranks_per_host for rank in group)
        return one != other


#: For ranks of one host, and for GPUs.
NO_HANDSHAKE = Handshake()


def handshake_of(cluster: Cluster) -> Handshake:
    """Return the handshake of the CPU ranks of a cluster; of one with GPUs none, since its links are not those of CPU ranks.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> cpus = load_cluster("local-cpu").resized(num_nodes=2).with_links(latency_s=5e-3, bandwidth=3e6)
    >>> handshake_of(cpus).least_bytes, handshake_of(load_cluster("dgx-a100")).least_bytes
    (60000, inf)
    """
    if cluster.has_gpus or cluster.num_nodes == 1:
        return NO_HANDSHAKE
    between = cluster.links[0]
    return Handshake(cluster.devices_per_node, round(worth_a_token(between.latency_s, between.bandwidth)))


def worth_a_token(latency_s: float, bandwidth: float) -> float:
    """Return how many bytes each of two ranks has to send at least for a handshake to save more time than it takes.

    Args:
        latency_s: Latency of a message between them [s].
        bandwidth: Their bandwidth [bytes/s].
    """
    return latency_s * bandwidth / _SAVED
