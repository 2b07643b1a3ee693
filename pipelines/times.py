"""Durations of the tasks and transfers of a schedule: the simulator's input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Union

from autoddl.costmodel.errors import UserError

__all__ = ["Times", "TimesError", "replicate"]

PerStage = Union[float, Sequence[float]]


class TimesError(UserError):
    """Times that do not match the schedule, or are negative or not finite."""


@dataclass(frozen=True)
class Times:
    """Durations in seconds (or any one unit) per whole micro-batch, as the stage's worker executes it.

    A pair takes twice, a half takes half as long. Per-stage fields have S entries, per-boundary fields S - 1: boundary b
    lies between stages b and b + 1. :meth:`of` fills them from numbers.

    Attributes:
        forward: per stage, a forward.
        backward: per stage, the whole backward: input part and weight part.
        backward_input: per stage, the part of ``backward`` that yields the gradient of the input; the rest is the weight part.
        recompute: per stage, a recomputation.
        all_reduce: per stage, the all-reduce of its weight gradients over all its replicas, once per update.
        update: per stage, the optimizer step of one replica.
        transfer_forward: per boundary, the transfer of one micro-batch's activation to another worker.
        transfer_backward: per boundary, the transfer of its gradient.
        transfer_latency: added to every transfer, whatever its size.
        overlap_transfers: True: transfers overlap compute, one after another on each directed link between two workers.
            False: a send blocks its worker, so that a task costs its worker compute time + transfer time.
        all_reduce_overlaps_compute: True: all-reduces overlap compute. False: they progress only in the free regions, in
            which a worker computes nothing.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    backward_input: tuple[float, ...]
    recompute: tuple[float, ...]
    all_reduce: tuple[float, ...]
    update: tuple[float, ...]
    transfer_forward: tuple[float, ...]
    transfer_backward: tuple[float, ...]
    transfer_latency: float = 0.0
    overlap_transfers: bool = True
    all_reduce_overlaps_compute: bool = True

    def __post_init__(self) -> None:
        num_stages = len(self.forward)
        for name in ("forward", "backward", "backward_input", "recompute", "all_reduce", "update"):
            _check(name, getattr(self, name), num_stages, "stages")
        for name in ("transfer_forward", "transfer_backward"):
            _check(name, getattr(self, name), max(0, num_stages - 1), "boundaries between stages")
        _check("transfer_latency", (self.transfer_latency,), 1, "values")
        for stage, (whole, part) in enumerate(zip(self.backward, self.backward_input)):
            if part > whole:
                raise TimesError(
                    f"backward_input of stage {stage} is {part}, more than the whole backward ({whole}); "
                    "give at most the whole"
                )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @classmethod
    def of(
        cls,
        num_stages: int,
        *,
        forward: PerStage = 1.0,
        backward: PerStage = 2.0,
        backward_input: PerStage | None = None,
        recompute: PerStage | None = None,
        all_reduce: PerStage = 0.0,
        update: PerStage = 0.0,
        transfer: PerStage = 0.0,
        transfer_backward: PerStage | None = None,
        transfer_latency: float = 0.0,
        overlap_transfers: bool = True,
        all_reduce_overlaps_compute: bool = True,
    ) -> Times:
        """Times from numbers: each argument is one number for all stages (boundaries) or a sequence, one per stage (boundary).

        ``backward_input`` defaults to half of the backward, ``recompute`` to the forward, ``transfer_backward`` to
        ``transfer``.

        >>> Times.of(2, forward=1, backward=(2, 4)).backward_input
        (1.0, 2.0)
        """

        def stages(name: str, value: PerStage) -> tuple[float, ...]:
            return _spread(name, value, num_stages, "stages")

        def boundaries(name: str, value: PerStage) -> tuple[float, ...]:
            return _spread(name, value, max(0, num_stages - 1), "boundaries between stages")

        forwards, backwards = stages("forward", forward), stages("backward", backward)
        transfers = boundaries("transfer", transfer)
        return cls(
            forward=forwards,
            backward=backwards,
            backward_input=tuple(b / 2 for b in backwards)
            if backward_input is None
            else stages("backward_input", backward_input),
            recompute=forwards if recompute is None else stages("recompute", recompute),
            all_reduce=stages("all_reduce", all_reduce),
            update=stages("update", update),
            transfer_forward=transfers,
            transfer_backward=transfers
            if transfer_backward is None
            else boundaries("transfer_backward", transfer_backward),
            transfer_latency=float(transfer_latency),
            overlap_transfers=overlap_transfers,
            all_reduce_overlaps_compute=all_reduce_overlaps_compute,
        )


def replicate(times: Times, widths: Sequence[int], *, split: PerStage = 0.0, concat: PerStage = 0.0) -> Times:
    """The times if stage s runs on ``widths[s]`` devices that split each micro-batch (DAPPLE's replicated stages).

    Compute is divided by the width. A boundary's bytes travel over as many links as its narrower side has devices.
    If the widths differ, activations are re-sliced: one-to-many adds ``split`` to the transfer and many-to-one ``concat``
    (per boundary, for one micro-batch), and the gradients on their way back add the other of the two; many-to-many of
    unequal widths adds both. ``all_reduce`` and ``update`` are not changed.

    Args:
        times: of the stages on one device each.
        widths: number of devices per stage.
        split: time of slicing one micro-batch, per boundary.
        concat: time of concatenating one micro-batch, per boundary.

    Raises:
        TimesError: there is not one positive width per stage.
    """
    num_stages = times.num_stages
    if len(widths) != num_stages or any(width < 1 for width in widths):
        raise TimesError(f"widths are {tuple(widths)}; give {num_stages} numbers of at least 1, one per stage")
    splits = _spread("split", split, max(0, num_stages - 1), "boundaries between stages")
    concats = _spread("concat", concat, max(0, num_stages - 1), "boundaries between stages")

    def over_boundary(boundary: int, sender: int, receiver: int, transfer: float) -> float:
        extra = 0.0
        if sender != receiver:
            extra += splits[boundary] if receiver > 1 else 0.0
            extra += concats[boundary] if sender > 1 else 0.0
        return transfer / min(sender, receiver) + extra

    pairs = list(enumerate(zip(widths, widths[1:])))
    return replace(
        times,
        forward=tuple(t / w for t, w in zip(times.forward, widths)),
        backward=tuple(t / w for t, w in zip(times.backward, widths)),
        backward_input=tuple(t / w for t, w in zip(times.backward_input, widths)),
        recompute=tuple(t / w for t, w in zip(times.recompute, widths)),
        transfer_forward=tuple(over_boundary(b, left, right, times.transfer_forward[b]) for b, (left, right) in pairs),
        transfer_backward=tuple(
            over_boundary(b, right, left, times.transfer_backward[b]) for b, (left, right) in pairs
        ),
    )


def _spread(name: str, value: PerStage, count: int, things: str) -> tuple[float, ...]:
    if isinstance(value, (int, float)):
        return (float(value),) * count
    values = tuple(float(v) for v in value)
    _check(name, values, count, things)
    return values


def _check(name: str, values: Sequence[float], count: int, things: str) -> None:
    if len(values) != count:
        raise TimesError(f"{name} has {len(values)} entries; give {count}, the number of {things}")
    for index, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise TimesError(f"{name}[{index}] is {value}; times are finite and not negative")
