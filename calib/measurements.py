"""Samples: timed repetitions, and the CSV files that hold them.

Samples are appended to the file as they are taken, so that an interrupted run can continue.  The columns are the attributes of
:class:`Sample`.  Only ``collective``, ``ranks``, ``bytes`` and ``seconds`` are required, so that CSV tables of other programs can
be read.  Files of earlier versions, without the last columns, can be read and continued.  The output of nccl-tests
(:mod:`autoddl.calib.nccl`) can be read as well.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from autoddl.costmodel.calibration import TRANSFER
from autoddl.costmodel.collectives import Collective
from autoddl.costmodel.errors import UserError, quote, shortened
from autoddl.costmodel.limits import (
    MAX_BYTES,
    MAX_DEVICES,
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_TENSOR,
    MIN_SECONDS,
)
from autoddl.costmodel.precision import PRECISIONS
from autoddl.costmodel.reading import csv_rows, is_whole, parse_figure, read_bytes, read_text, shown_path
from autoddl.costmodel.writing import write_atomically

from .nccl import is_nccl_output, nccl_rows

__all__ = [
    "BOTH_LEVELS",
    "COLLECTIVES",
    "DEVICE_WORK",
    "Sample",
    "SampleFile",
    "read_samples",
    "sample_in_line",
    "sample_line",
]

#: The operations that are timed between ranks, and on one rank.
COLLECTIVES = (*(collective.value for collective in Collective if collective is not Collective.SHIFT), TRANSFER)
DEVICE_WORK = ("matmul", "elementwise")
#: Groups with several ranks on each of several hosts are on ``both`` levels: they are compared with predictions, and not fitted.
BOTH_LEVELS = "both"
LEVELS = ("intra-node", "inter-node", BOTH_LEVELS, "device")


@dataclass(frozen=True)
class Sample:
    """One timed repetition, a row of the file.

    Attributes:
        collective: all-reduce, all-gather, reduce-scatter, all-to-all or point-to-point; matmul or elementwise.
        level: intra-node, inter-node or both; device for matmul and elementwise.
        ranks: size of the group that communicates; 1 for matmul and elementwise.
        bytes: n of :mod:`autoddl.costmodel.collectives`; the bytes that local work reads and writes.
        repetition: 0, 1, ...
        seconds: time of the slowest rank.
        host, time: where and when (UTC).
        job_ranks: ranks of the whole job, whose other groups communicate at the same time.
        ranks_per_node: ranks on each node.
        cores: cores that they share; 0 if ranks do not share cores.
        stride: difference between neighbouring ranks of the group.
        shape: m x k x n of a matmul.
        foreign: fraction of the cores' time that other processes used meanwhile.
        versions: of the software.
        precision: precision in whose compute type a matmul or elementwise was done; empty: float32.
        device: name of the device, or CPU for a rank on a CPU.
        network: what the ranks communicated over: an interface, loopback or NCCL.
    """

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
    precision: str = ""
    device: str = ""
    network: str = ""

    @property
    def setting(self) -> tuple[object, ...]:
        """A key that the repetitions of one setting have in common."""
        return (
            self.collective,
            self.level,
            self.job_ranks,
            self.ranks_per_node,
            self.ranks,
            self.stride,
            self.bytes,
            self.shape,
            self.type,
        )

    @property
    def type(self) -> str:
        """The precision of local work; empty for what is exchanged."""
        return (self.precision or "float32") if self.collective in DEVICE_WORK else ""

    @property
    def num_nodes(self) -> int:
        """Number of hosts of the job."""
        return -(-self.job_ranks // self.ranks_per_node)

    @property
    def product(self) -> tuple[int, int, int]:
        """(m, k, n) of a matmul."""
        m, k, n = (int(length) for length in self.shape.split("x"))
        return m, k, n


#: The precisions of samples: those that users choose from, and those that stand in for them on CPU ranks.
_PRECISIONS = {*PRECISIONS, *(precision.on_cpu().name for precision in PRECISIONS.values())}
COLUMNS = tuple(f.name for f in fields(Sample))
#: The columns of files of earlier versions.
_EARLIER_COLUMNS = COLUMNS[: COLUMNS.index("precision")]
_REQUIRED = ("collective", "ranks", "bytes", "seconds")


class SampleFile:
    """A CSV file that samples are appended to.

    An existing file is continued.  Its header must be that of :class:`Sample`; an incomplete last line is removed.

    Attributes:
        path: of the file.
        samples: all samples in the file.
        num_written: number of samples written by this object.

    Raises:
        UserError: the file cannot be read or written, or is another kind of file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.num_written = 0
        try:
            data = read_bytes(path) if self.path.is_file() else b""
            size = data.rfind(b"\n") + 1
            whole = data[:size].decode("utf-8")
            if whole and _header(whole) not in (list(COLUMNS), list(_EARLIER_COLUMNS)):
                raise UserError(
                    f"{path}: its first line should be the header of a file of samples ({', '.join(COLUMNS)}); name another file"
                )
            self.samples = list(_read_csv(whole, shown_path(path))) if whole else []
            if whole and _header(whole) != list(COLUMNS):
                write_atomically(self.path, _HEADER + _rows(self.samples))
            elif size < len(data):
                os.truncate(self.path, size)
            if not whole:
                self._append(_HEADER)
        except (OSError, UnicodeDecodeError) as error:
            raise self._fault(error) from None

    def append(self, samples: Iterable[Sample]) -> None:
        """Write samples and flush them to the disk.  If it fails, earlier samples are kept.

        Raises:
            UserError: the samples cannot be written, for example because the disk is full.
        """
        added = list(samples)
        try:
            self._append(_rows(added))
        except OSError as error:
            raise self._fault(error) from None
        self.samples += added
        self.num_written += len(added)

    def _append(self, text: str) -> None:
        # Unbuffered: a failed buffer would be written again, and fail again, when the file is closed.
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


#: How a line begins in which a rank sends a sample to the process that launched it.
_LINE = "autoddl-sample "


def sample_line(sample: Sample) -> str:
    """A line of a rank's output that holds a sample."""
    return _LINE + _rows([sample])


def sample_in_line(line: str) -> Sample | None:
    """The sample of a line of a rank's output, which launchers begin with the rank in brackets; None if it holds none."""
    _, found, row = line.partition(f"] {_LINE}")
    return next(iter(_read_csv(f"{_HEADER}{row}\n", "the output of rank 0"))) if found else None


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """Read the samples of a CSV file (columns: :class:`Sample`), or of the output of nccl-tests.

    Raises:
        UserError: the file cannot be read or has no samples, a column is missing, or a value is out of range.
    """
    text, where = read_text(path), shown_path(path)
    if is_nccl_output(text):
        rows = nccl_rows(text, os.fspath(path), where)
        samples = [Sample(**row) for row in rows]  # type: ignore[arg-type]
    else:
        samples = list(_read_csv(text, where))
    if not samples:
        raise UserError(f"{where}: holds no samples")
    return numbered(samples)


def numbered(samples: Sequence[Sample]) -> list[Sample]:
    """Number the repetitions of each setting again, in order, since a file may come from several runs."""
    counts: dict[object, int] = {}
    result = []
    for sample in samples:
        number = counts.get(sample.setting, 0)
        counts[sample.setting] = number + 1
        result.append(replace(sample, repetition=number))
    return result


_HEADER = ",".join(COLUMNS) + "\n"


def _rows(samples: Iterable[Sample]) -> str:
    """The lines of samples in a file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerows([f"{v:.9g}" if isinstance(v, float) else v for v in astuple(sample)] for sample in samples)
    return buffer.getvalue()


def _header(text: str) -> list[str]:
    return [name.strip() for name in next(csv.reader(io.StringIO(text.split("\n", 1)[0])), [])]


def _read_csv(text: str, where: str) -> Iterable[Sample]:
    rows = csv_rows(text, where)
    header = [name.strip() for name in next(rows, (1, []))[1]]
    named = shortened(", ".join(header)) or "nothing"
    missing = [name for name in _REQUIRED if name not in header]
    if missing:
        raise UserError(f"{where}: column {missing[0]!r} is missing; its first line names {named}")
    if len(set(header)) != len(header):
        raise UserError(f"{where}: its first line names a column twice: {named}")
    found = 0
    for number, row in rows:
        if not row:
            continue
        at = f"{where}: line {number}"
        if len(row) != len(header):
            raise UserError(f"{at}: has {len(row)} values, should have {len(header)}; was the file cut off?")
        found += 1
        if found > MAX_SAMPLES:
            raise UserError(f"{at}: a file should have at most {MAX_SAMPLES:,} samples")
        yield _sample(dict(zip(header, (value.strip() for value in row))), at)


def _sample(row: Mapping[str, str], at: str) -> Sample:
    collective = row["collective"].lower().replace("_", "-").replace(" ", "-")
    if collective not in (*COLLECTIVES, *DEVICE_WORK):
        known = ", ".join((*COLLECTIVES, *DEVICE_WORK))
        raise UserError(f"{at}: collective is {quote(row['collective'])}, should be one of {known}")
    is_device = collective in DEVICE_WORK
    level = row.get("level") or ("device" if is_device else "intra-node")
    if level not in LEVELS or (level == "device") != is_device:
        right = "device" if is_device else "intra-node, inter-node or both"
        raise UserError(f"{at}: level of {collective} is {quote(level)}, should be {right}")
    ranks = _integer(row, "ranks", at, 1 if is_device else 2, MAX_DEVICES)
    sample = Sample(
        collective=collective,
        level=level,
        ranks=ranks,
        bytes=_integer(row, "bytes", at, 1, MAX_BYTES),
        repetition=_integer(row, "repetition", at, 0, MAX_BYTES, 0),
        seconds=_seconds(row["seconds"], at),
        host=row.get("host", ""),
        time=row.get("time", ""),
        job_ranks=_integer(row, "job_ranks", at, 1, MAX_DEVICES, ranks),
        ranks_per_node=_integer(row, "ranks_per_node", at, 1, MAX_DEVICES, 1 if level == "inter-node" else ranks),
        cores=_integer(row, "cores", at, 0, MAX_DEVICES, 0),
        stride=_integer(row, "stride", at, 1, MAX_DEVICES, 1),
        shape=row.get("shape", ""),
        foreign=_fraction(row, at),
        versions=row.get("versions", ""),
        precision=row.get("precision", ""),
        device=row.get("device", ""),
        network=row.get("network", ""),
    )
    if sample.precision and sample.precision not in _PRECISIONS:
        raise UserError(f"{at}: precision is {quote(sample.precision)}, should be one of {', '.join(PRECISIONS)}")
    if collective == "matmul":
        lengths = sample.shape.split("x")
        m, k, n = map(int, lengths) if len(lengths) == 3 and all(map(is_whole, lengths)) else (0, 0, 0)
        if not 0 < max(m * k, k * n, m * n) <= MAX_TENSOR or not min(m, k, n):
            raise UserError(f"{at}: shape of a matmul is {quote(sample.shape)}, should be MxKxN")
    return sample


def _integer(row: Mapping[str, str], name: str, at: str, minimum: int, maximum: int, default: int | None = None) -> int:
    text = row.get(name, "")
    if not text and default is not None:
        return default
    # Tables of other programs have integers such as 1e6 and 16384.0.
    value = int(text) if is_whole(text) else parse_figure(text)
    if not minimum <= value <= maximum or value != int(value):
        raise UserError(
            f"{at}: {name} is {quote(text)}, should be a whole number of at least {minimum}, at most {maximum}"
        )
    return int(value)


def _seconds(text: str, at: str) -> float:
    value = parse_figure(text)
    if not MIN_SECONDS <= value <= MAX_SECONDS:
        raise UserError(
            f"{at}: seconds is {quote(text)}, should be a time of more than 0 and at most {MAX_SECONDS:g} seconds"
        )
    return value


def _fraction(row: Mapping[str, str], at: str) -> float:
    text = row.get("foreign", "")
    value = parse_figure(text) if text else 0.0
    if not 0 <= value <= 1:
        raise UserError(f"{at}: foreign is {quote(text)}, should be a fraction from 0 to 1")
    return value
