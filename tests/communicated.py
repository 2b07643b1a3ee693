"""The bytes that a schedule sends, by counting its boundary crossings and its updates."""

from __future__ import annotations

from collections.abc import Sequence

from autoddl.pipelines.communication import boundary_crossings
from autoddl.pipelines.schedule import Schedule


def communication_bytes(
    schedule: Schedule, boundary_bytes: Sequence[float], gradient_bytes: Sequence[float] | None = None
) -> tuple[float, float]:
    """Bytes sent over the whole schedule: (between stages, in gradient all-reduces).

    Args:
        boundary_bytes: bytes of one micro-batch's activation at each boundary; its gradient has the same size.
        gradient_bytes: bytes of each stage's weight gradients. An all-reduce over r replicas sends 2 (r - 1) times as much,
            as a ring does, the least possible if the replicas share the work evenly. None: all-reduces are not counted.
    """
    between = sum(
        (forward + backward) * size for (forward, backward), size in zip(boundary_crossings(schedule), boundary_bytes)
    )
    if gradient_bytes is None:
        return between, 0.0
    reduced = sum(
        2 * (schedule.num_replicas_of(stage) - 1) * size * schedule.num_updates
        for stage, size in enumerate(gradient_bytes)
    )
    return between, reduced
