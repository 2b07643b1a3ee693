"""The calibration record of a cluster file: measured ranges, errors of the fit, and uncertainty of the parameters.

The parameters themselves are in the cluster's links and device.  The record holds the ranges that they were measured in, the
errors on held-out message sizes, and bootstrap *replicates* of the parameters: values from the same fit to resampled
measurements.  The k-th values of all parameters belong to the same resample.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from .documents import Fields
from .errors import UserError, quote
from .limits import MAX_BYTES, MAX_DEVICES, MAX_FIGURE, RANGES

__all__ = ["Calibration", "Coverage", "FormTried", "Quality", "Replicates", "calibration_from_fields", "interval_of"]

_TIME, _SLOWNESS, _FACTOR = (RANGES[quantity][1] for quantity in ("time", "slowness", "factor"))
_LINK_TERMS = {
    "latency": _TIME,
    "slowness": _SLOWNESS,
    "copy": _SLOWNESS,
    "crowded latency": _TIME,
    "crowded slowness": _SLOWNESS,
    "exchanged latency": _TIME,
    "exchanged slowness": _SLOWNESS,
}
#: The parameters that can have replicates: for each level its terms, with the largest value of each (of work: 1 s per FLOP).
TERMS: Mapping[str, Mapping[str, float]] = {
    "inter-node": _LINK_TERMS,
    "intra-node": _LINK_TERMS,
    "device": {"launch": _TIME, "work": 1.0, "memory": _SLOWNESS, "crowding": _FACTOR},
}
#: Messages from one device to another; on a link they have parameters like a collective.
TRANSFER = "point-to-point"
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", TRANSFER)


@dataclass(frozen=True)
class Coverage:
    """The range in which a collective was measured on a level.

    Attributes:
        level, collective: the network level and the collective.
        groups: the group sizes that were measured.
        smallest_bytes, largest_bytes: the range of message sizes.
    """

    level: str
    collective: str
    groups: tuple[int, ...]
    smallest_bytes: int
    largest_bytes: int


@dataclass(frozen=True)
class Quality:
    """Error of a fit on held-out message sizes.

    Attributes:
        level, collective: the network level and the collective that were measured.
        ranks_per_node: number of ranks that shared a node.
        smallest_bytes, largest_bytes: the range of message sizes.
        held_out_error: median of |predicted - measured| / measured.
        num_points: number of points that the median is over; each point is a median of repetitions.
    """

    level: str
    collective: str
    ranks_per_node: int
    smallest_bytes: int
    largest_bytes: int
    held_out_error: float
    num_points: int


@dataclass(frozen=True)
class FormTried:
    """A form of the model that the fit tried for a level.

    Attributes:
        level: the network level.
        form: the terms of the model, as text.
        num_parameters: number of parameters.
        held_out_error: median relative error on held-out message sizes.
        is_taken: whether the fit chose this form.
    """

    level: str
    form: str
    num_parameters: int
    held_out_error: float
    is_taken: bool


@dataclass(frozen=True)
class Replicates:
    """Bootstrap values of one parameter.

    Attributes:
        level: the network level, or ``device``.
        collective: the collective; empty if the parameter is shared by all.
        group: the group size; 0 if the parameter is shared by all group sizes.
        term: name of the parameter (:data:`TERMS`).
        values: one value per resample, in SI units.
    """

    level: str
    collective: str
    group: int
    term: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Calibration:
    """The ``calibration`` field of a cluster file.

    Attributes:
        date, machine, versions: when, where and with which software the measurements were made.
        num_samples: number of measurements.
        covered: the measured ranges.
        quality: errors on held-out message sizes.
        forms: the forms of the model that were compared.
        replicates: bootstrap values of the parameters.
    """

    date: str
    machine: str
    versions: str
    num_samples: int
    covered: tuple[Coverage, ...]
    quality: tuple[Quality, ...]
    forms: tuple[FormTried, ...]
    replicates: tuple[Replicates, ...]

    def coverage(self, level: str, collective: str) -> Coverage | None:
        """The range in which a collective was measured on a level; None if it was not measured there."""
        return next((c for c in self.covered if (c.level, c.collective) == (level, collective)), None)


def interval_of(entry: Fields) -> tuple[float, float]:
    """The ``interval`` of a quantity, (lower end, upper end) in the unit of the quantity.

    Raises:
        UserError: it is not two numbers in ascending order.
    """
    values = _numbers(entry, "interval")
    if len(values) != 2 or values[0] > values[1]:
        raise UserError(
            f"{entry.where}: interval is {quote(list(values[:9]))}, should be two numbers in ascending order"
        )
    return values[0], values[1]


def calibration_from_fields(fields: Fields) -> Calibration:
    """Read the calibration from its parsed JSON object.

    Raises:
        UserError: a field is missing, unknown or out of range.
    """
    calibration = Calibration(
        date=fields.text("date"),
        machine=fields.text("machine"),
        versions=fields.text("versions"),
        num_samples=fields.integer("num_samples", 1),
        covered=tuple(_coverage(entry) for entry in fields.objects("covered")),
        quality=tuple(_quality(entry) for entry in fields.objects("quality")),
        forms=tuple(_form(entry) for entry in fields.objects("forms")),
        replicates=tuple(_replicates(entry) for entry in fields.objects("replicates")),
    )
    counts = {len(replicates.values) for replicates in calibration.replicates}
    if len(counts) > 1:
        raise UserError(
            f"{fields.where}: replicates have {quote(sorted(counts))} values, all should have the same number"
        )
    fields.finish()
    return calibration


def _choice(entry: Fields, name: str, choices: Iterable[str]) -> str:
    value = entry.text(name)
    if value not in choices:
        raise UserError(
            f"{entry.where}: {name} is {quote(value)}, should be one of {', '.join(c or 'nothing' for c in choices)}"
        )
    return value


def _numbers(entry: Fields, name: str, maximum: float = MAX_FIGURE) -> tuple[float, ...]:
    # Check each number like a field of its own.
    values = entry.sequence(name)
    inner = Fields({str(i): value for i, value in enumerate(values)}, f"{entry.where}: {name}")
    return tuple(inner.number(str(i), maximum=maximum) for i in range(len(values)))


def _sizes(entry: Fields) -> tuple[int, int]:
    smallest, largest = (entry.bounded(f"{end}_bytes", 0, MAX_BYTES) for end in ("smallest", "largest"))
    if smallest > largest:
        raise UserError(f"{entry.where}: smallest_bytes {smallest} should be at most largest_bytes {largest}")
    return smallest, largest


def _coverage(entry: Fields) -> Coverage:
    level, collective = _choice(entry, "level", tuple(TERMS)[:2]), _choice(entry, "collective", _COLLECTIVES)
    found = Coverage(level, collective, entry.integers("groups", 2), *_sizes(entry))
    entry.finish()
    return found


def _quality(entry: Fields) -> Quality:
    level, collective = _choice(entry, "level", tuple(TERMS)[:2]), _choice(entry, "collective", _COLLECTIVES)
    found = Quality(
        level,
        collective,
        entry.integer("ranks_per_node", 1),
        *_sizes(entry),
        entry.number("held_out_error"),
        entry.integer("num_points", 1),
    )
    entry.finish()
    return found


def _form(entry: Fields) -> FormTried:
    found = FormTried(
        _choice(entry, "level", tuple(TERMS)[:2]),
        entry.text("form"),
        entry.integer("num_parameters", 1),
        entry.number("held_out_error"),
        entry.boolean("is_taken"),
    )
    entry.finish()
    return found


def _replicates(entry: Fields) -> Replicates:
    level = _choice(entry, "level", tuple(TERMS))
    collective = _choice(entry, "collective", ("", *_COLLECTIVES))
    term = _choice(entry, "term", TERMS[level])
    group = entry.bounded("group", 0, MAX_DEVICES)
    values = _numbers(entry, "values", TERMS[level][term])
    if not values:
        raise UserError(f"{entry.where}: values is empty, should hold at least one number")
    entry.finish()
    return Replicates(level, collective, group, term, values)
