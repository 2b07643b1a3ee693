"""`Rendezvous`: two CPU ranks of different hosts meet before they exchange much data, so that both directions are in use at once.

OneFlow has one connection between two processes. Each rank of an exchange sends a notice; the other asks for the data; the data
follow over the connection that this rank's own request would take. With the latency L of the network, ranks that begin at t and t'
have each other's notice at t + L and t' + L, and each other's request at most 2 L later:

==================  ==============================================================================================
begin               what happens
==================  ==============================================================================================
\\|t - t'\\| < L      each asks before it is asked: the data pass at once, in n / B
\\|t - t'\\| >= L     the first one is asked before it can ask, and its request waits behind all of its data: 2 n / B
==================  ==============================================================================================

Here each rank sends n bytes, at B bytes/s. Ranks of a step come from computations of their own, seldom within L of each other.

So before an exchange, the lower rank sends the other one a token. The sender is done with it when it has the acknowledgement, L
after the receiver is done. They would begin L apart, where chance decides. But the receiver computes the first element of its
data from the token, which delays it by some tenths of a millisecond: they begin less than L apart. No host thread waits.

The token costs a message, whose latency alpha (four trips) is that of transfers in cluster files. What it saves is measured to be
about n / (4 B) on average: without it about half of the exchanges take up to twice as long, and some of that is waiting for the
other rank, which the token has to do too. So it is due from n = 4 alpha B on.

Rings of three ranks or more ask one neighbour and answer the other. NCCL, on GPUs, does not ask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autoddl.costmodel.cluster import Cluster

__all__ = ["NO_RENDEZVOUS", "Rendezvous", "rendezvous_of", "worth_a_token"]

#: A token saves this part of n / B on average.
_SAVED = 0.25


@dataclass(frozen=True)
class Rendezvous:
    """When the two ranks of an exchange meet before.

    Attributes:
        ranks_per_host: Number of ranks of each host.
        least_bytes: The least number of bytes that each rank sends.

    >>> rendezvous = Rendezvous(ranks_per_host=2, least_bytes=4096)
    >>> [rendezvous.is_due(group, 4096) for group in ((0, 2), (1, 2), (0, 1), (0, 1, 2, 3))]
    [True, True, False, False]
    >>> rendezvous.is_due((0, 2), 4095)
    False
    """

    ranks_per_host: int = 1
    least_bytes: float = math.inf

    def is_due(self, group: tuple[int, ...], num_bytes: float) -> bool:
        """Return whether ranks of the job meet before each of them sends the other so many bytes."""
        if len(group) != 2 or num_bytes < self.least_bytes:
            return False
        one, other = (rank // self.ranks_per_host for rank in group)
        return one != other


#: For ranks of one host, and for GPUs.
NO_RENDEZVOUS = Rendezvous()


def rendezvous_of(cluster: Cluster) -> Rendezvous:
    """Return when CPU ranks of a cluster meet; never if it has GPUs, whose links are not those of CPU ranks.

    >>> from autoddl.costmodel.cluster import load_cluster
    >>> cpus = load_cluster("local-cpu").resized(num_nodes=2).with_links(latency_s=5e-3, bandwidth=3e6)
    >>> rendezvous_of(cpus).least_bytes, rendezvous_of(load_cluster("dgx-a100")).least_bytes
    (60000, inf)
    """
    if cluster.has_gpus or cluster.num_nodes == 1:
        return NO_RENDEZVOUS
    between = cluster.links[0]
    return Rendezvous(cluster.devices_per_node, round(worth_a_token(between.latency_s, between.bandwidth)))


def worth_a_token(latency_s: float, bandwidth: float) -> float:
    """Return how many bytes each of two ranks should send at least for a token before.

    Args:
        latency_s: Latency of a message between them [s].
        bandwidth: Their bandwidth [bytes/s].
    """
    return latency_s * bandwidth / _SAVED
