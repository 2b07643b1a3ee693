"""Samples: what was timed, and the CSV files that hold them.

A file is appended to as samples are taken, so an interrupted run keeps what it has and continues.  Columns:

==================  ==============================================================================================
column              meaning
==================  ==============================================================================================
collective          all-reduce, all-gather, reduce-scatter, all-to-all, point-to-point; matmul, elementwise
level               intra-node or inter-node; device for matmul and elementwise
ranks               of the group that communicates; 1 for matmul and elementwise
bytes               n as :mod:`autoddl.costmodel.collectives` defines it; what an element-wise operation reads and writes
repetition          0, 1, ...
seconds             of the slowest rank
host, time          where and when (UTC)
job_ranks           ranks of the whole job: its other groups communicate at the same time
ranks_per_node      ranks that share a node
cores               that they share; 0 where ranks do not share cores
stride              ranks between neighbours in the group
shape               m x k x n of a product
foreign             fraction of the cores' time that other processes used meanwhile
versions            of the software
==================  ==============================================================================================

Only the first, ``ranks``, ``bytes`` and ``seconds`` have to be there: plain CSV that people already have is read alike, and so is
the output of nccl-tests (:mod:`autoddl.calib.nccl`).
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.errors import UserError

from .nccl import is_nccl_output, nccl_rows

__all__ = ["COLLECTIVES", "DEVICE_WORK", "Sample", "SampleFile", "read_samples"]

#: Everything that is timed between ranks, and on one of them.
COLLECTIVES = (*(collective.value for collective in Collective), TRANSFER)
DEVICE_WORK = ("matmul", "elementwise")
LEVELS = ("intra-node", "inter-node", "device")


@dataclass(frozen=True)
class Sample:
    """One row (columns: module docstring)."""

    collective: str
    level: str
    ranks: int
    bytes: int
    repetition: int
    seconds: float
    host: str = ""
    time: str = ""
    job_ranks: int = 1
    ranks_per_node: int = 1
    cores: int = 0
    stride: int = 1
    shape: str = ""
    foreign: float = 0.0
    versions: str = ""

    @property
    def setting(self) -> tuple[object, ...]:
        """All that repetitions of one measurement have in common."""
        return (
            self.collective,
            self.level,
            self.job_ranks,
            self.ranks_per_node,
            self.ranks,
            self.stride,
            self.bytes,
            self.shape,
        )

    @property
    def product(self) -> tuple[int, int, int]:
        """(m, k, n) of a matmul."""
        m, k, n = (int(length) for length in self.shape.split("x"))
        return m, k, n


COLUMNS = tuple(f.name for f in fields(Sample))
_REQUIRED = ("collective", "ranks", "bytes", "seconds")


class SampleFile:
    """A CSV file that samples are appended to.

    An existing file is continued: its header has to be ours, and a last line that an interruption cut off is removed.

    Raises:
        UserError: the file cannot be read or written, or is another kind of file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.num_written = 0
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.is_file() else ""
            whole = text[: text.rfind("\n") + 1]
            if whole and _header(whole) != list(COLUMNS):
                raise UserError(
                    f"{path}: its first line is not that of our samples ({','.join(COLUMNS)}); name another file"
                )
            self.samples = list(_read_csv(whole, str(path))) if whole else []
            if whole != text:
                with open(self.path, "r+", encoding="utf-8") as file:
                    file.truncate(len(whole.encode()))
            if not whole:
                self._append(",".join(COLUMNS) + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise self._fault(error) from None

    def append(self, samples: Iterable[Sample]) -> None:
        """Write samples so that they are on the disk when this returns; what was written before stays where it fails.

        Raises:
            UserError: they cannot be written, because the disk is full, say.
        """
        added = list(samples)
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerows([f"{v:.9g}" if isinstance(v, float) else v for v in astuple(sample)] for sample in added)
        try:
            self._append(buffer.getvalue())
        except OSError as error:
            raise self._fault(error) from None
        self.samples += added
        self.num_written += len(added)

    def _append(self, text: str) -> None:
        # Unbuffered: a buffer would come back when the file is closed, and fail there once more.
        with open(self.path, "ab", buffering=0) as file:
            data = text.encode()
            while data:
                data = data[file.write(data) or 0 :]
            if self.path.is_file():
                os.fsync(file.fileno())

    def _fault(self, error: Exception) -> UserError:
        reason = getattr(error, "strerror", None) or error
        kept = f"; the {len(self.samples)} samples in it are kept" if getattr(self, "samples", None) else ""
        return UserError(f"{self.path}: cannot be written ({reason}){kept}")


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """The samples of a CSV file, ours or a plain one, or of the output of nccl-tests.

    Raises:
        UserError: the file cannot be read, a column is missing, a value is out of range (with its line), or it holds no samples.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if is_nccl_output(text):
        rows = nccl_rows(text, str(path))
        samples = [Sample(**row) for row in rows]  # type: ignore[arg-type]
    else:
        samples = list(_read_csv(text, str(path)))
    if not samples:
        raise UserError(f"{path}: holds no samples")
    return numbered(samples)


def numbered(samples: Sequence[Sample]) -> list[Sample]:
    """Repetitions counted anew for each setting, in order: files may come from several runs."""
    counts: dict[object, int] = {}
    result = []
    for sample in samples:
        number = counts.get(sample.setting, 0)
        counts[sample.setting] = number + 1
        result.append(replace(sample, repetition=number))
    return result


def _header(text: str) -> list[str]:
    return [name.strip() for name in next(csv.reader(io.StringIO(text.split("\n", 1)[0])), [])]


def _read_csv(text: str, where: str) -> Iterable[Sample]:
    lines = csv.reader(io.StringIO(text))
    try:
        header = [name.strip() for name in next(lines, [])]
        missing = [name for name in _REQUIRED if name not in header]
        if missing:
            raise UserError(
                f"{where}: column {missing[0]!r} is missing; its first line names {', '.join(header) or 'nothing'}"
            )
        if len(set(header)) != len(header):
            raise UserError(f"{where}: its first line names a column twice: {', '.join(header)}")
        for row in lines:
            if not row:
                continue
            at = f"{where}: line {lines.line_num}"
            if len(row) != len(header):
                raise UserError(f"{at}: has {len(row)} values, should have {len(header)}; was the file cut off?")
            yield _sample(dict(zip(header, (value.strip() for value in row))), at)
    except csv.Error as error:
        raise UserError(f"{where}: line {lines.line_num}: not CSV ({error})") from None


def _sample(row: Mapping[str, str], at: str) -> Sample:
    collective = row["collective"].lower().replace("_", "-").replace(" ", "-")
    if collective not in (*COLLECTIVES, *DEVICE_WORK):
        known = ", ".join((*COLLECTIVES, *DEVICE_WORK))
        raise UserError(f"{at}: collective is {row['collective']!r}, should be one of {known}")
    is_device = collective in DEVICE_WORK
    level = row.get("level") or ("device" if is_device else "intra-node")
    if level not in LEVELS or (level == "device") != is_device:
        right = "device" if is_device else "intra-node or inter-node"
        raise UserError(f"{at}: level of {collective} is {level!r}, should be {right}")
    ranks = _integer(row, "ranks", at, 1 if is_device else 2)
    sample = Sample(
        collective=collective,
        level=level,
        ranks=ranks,
        bytes=_integer(row, "bytes", at, 1),
        repetition=_integer(row, "repetition", at, 0, 0),
        seconds=_seconds(row, at),
        host=row.get("host", ""),
        time=row.get("time", ""),
        job_ranks=_integer(row, "job_ranks", at, 1, ranks),
        ranks_per_node=_integer(row, "ranks_per_node", at, 1, 1 if level == "inter-node" else ranks),
        cores=_integer(row, "cores", at, 0, 0),
        stride=_integer(row, "stride", at, 1, 1),
        shape=row.get("shape", ""),
        foreign=_fraction(row, at),
        versions=row.get("versions", ""),
    )
    if collective == "matmul":
        lengths = sample.shape.split("x")
        if len(lengths) != 3 or not all(part.isascii() and part.isdigit() and int(part) for part in lengths):
            raise UserError(f"{at}: shape of a matmul is {sample.shape!r}, should be MxKxN")
    return sample


def _integer(row: Mapping[str, str], name: str, at: str, minimum: int, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= minimum or not value < 2**63 or value != int(value):
        raise UserError(f"{at}: {name} is {text!r}, should be a whole number of at least {minimum}")
    return int(value)


def _seconds(row: Mapping[str, str], at: str) -> float:
    try:
        value = float(row["seconds"])
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UserError(f"{at}: seconds is {row['seconds']!r}, should be a time of more than 0 seconds")
    return value


def _fraction(row: Mapping[str, str], at: str) -> float:
    text = row.get("foreign", "")
    try:
        value = float(text) if text else 0.0
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise UserError(f"{at}: foreign is {text!r}, should be a fraction from 0 to 1")
    return value
