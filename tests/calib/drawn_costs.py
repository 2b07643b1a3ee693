"""The predicted seconds of a usage under every draw of a calibration."""

from __future__ import annotations

import numpy as np

from autoddl.calib.trust import Usage, _num_draws, _parts
from autoddl.costmodel.cluster import Cluster

__all__ = ["costs_of"]


def costs_of(usage: Usage, cluster: Cluster, communication_only: bool) -> np.ndarray:
    """Seconds per step under every draw."""
    return sum(_parts(usage, cluster, communication_only).values(), np.zeros(_num_draws(cluster)))
