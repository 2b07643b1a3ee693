"""Reading the output of nccl-tests (all_reduce_perf and others) from log files.

    # Collective test starting: all_reduce_perf                              newer versions only
    #  Rank  0 Group  0 Pid   1887 on   worker-1 device  0 [0x8d] NVIDIA H100 80GB HBM3
    ...
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
         1048576        262144     float     sum      -1    57.25   18.32   32.05      0    55.86   18.77   32.85      0

A row has two times in microseconds, out of place and in place.  The first is used, since our collectives work out of place.
``size`` is n of :mod:`autoddl.costmodel.collectives` in every test: the tensor of an all-reduce, the gathered output, the scattered
input, the input of an all-to-all, one message of sendrecv.  The columns differ between versions and tests (``redop`` or ``root``
may be missing), so the header line gives their positions.  Other lines between the rows (NCCL INFO) are ignored, and so are
prefixes of mpirun.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import Union

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_BYTES, MAX_DEVICES, MAX_SECONDS, MIN_SECONDS
from autoddl.costmodel.reading import is_whole, parse_figure

__all__ = ["is_nccl_output", "nccl_rows"]

#: The programs of nccl-tests whose collectives occur in plans.
PROGRAMS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "point-to-point",
}
_PROGRAM = re.compile(r"\b([a-z_]+)_perf(?:_mpi)?\b")
_RANK = re.compile(r"#\s+Rank\s+([0-9]{1,7})\s+(?:Group\s+[0-9]+\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+")
_HEADER = re.compile(r"#\s+size\s+count\s+type\b.*\btime\b.*\balgbw\b.*")
_DATA = re.compile(r"[0-9]+\s+[0-9]+\s+[a-z]")
#: Prefixes of lines by launchers: "[1,0]<stdout>:", "(worker, rank=1) ", "0: ".
_PREFIX = re.compile(r"^(?:\[[0-9]+,[0-9]+\]<std(?:out|err)>:|\([^)]*\)\s|[0-9]+:\s)+")
_LONGEST_LINE = 1000

Row = dict[str, Union[str, int, float]]


def is_nccl_output(text: str) -> bool:
    """Whether a text contains a table of nccl-tests."""
    return any(_HEADER.match(_stripped(line)) for line in text.splitlines())


def nccl_rows(text: str, path: str, where: str) -> Iterator[Row]:
    """The out-of-place times as fields of samples; a file may hold several tests.

    Args:
        text: the content of the file.
        path: the path of the file, whose name may contain that of the test.
        where: the name of the file in messages.

    Raises:
        UserError: the test or the ranks are not named before the table, a row is cut off, or its time is not positive.
    """
    program = _of_name(path)
    hosts: dict[int, str] = {}
    columns: list[str] = []
    for number, raw in enumerate(text.splitlines(), 1):
        line = _stripped(raw)
        at = f"{where}: line {number}"
        if found := [name for name in _PROGRAM.findall(line) if name in PROGRAMS]:
            program = found[-1]
        if "Using devices" in line:
            # mpirun may print the heading for every process.
            hosts = {} if columns else hosts
            columns = []
        elif match := _RANK.match(line):
            hosts[int(match[1])] = match[2]
            if len(hosts) > MAX_DEVICES:
                raise UserError(f"{at}: more than {MAX_DEVICES} ranks are listed")
        elif _HEADER.match(line):
            columns = line.lstrip("# ").split()
        elif columns and _DATA.match(line):
            row = _row(line.split(), columns, at)
            if row is not None:
                size, seconds = row
                yield _fields(program, hosts, size, seconds, at)


def _stripped(line: str) -> str:
    """The beginning of a line (nccl-tests prints no long lines), without prefixes of launchers."""
    return _PREFIX.sub("", line[:_LONGEST_LINE]).strip()


def _of_name(path: str) -> str | None:
    found = [name for name in PROGRAMS if name in PurePath(path).name.replace("-", "_")]
    return found[0] if found else None


def _row(values: list[str], columns: list[str], at: str) -> tuple[int, float] | None:
    """(bytes, seconds) of a row; None if it has 0 bytes (small sizes are rounded down)."""
    if len(values) != len(columns):
        raise UserError(f"{at}: has {len(values)} values, should have {len(columns)}; was the file cut off?")
    size = int(values[0]) if is_whole(values[0]) else MAX_BYTES + 1
    if size > MAX_BYTES:
        raise UserError(f"{at}: size is {quote(values[0])}, should be at most {MAX_BYTES} bytes")
    text = values[columns.index("time")]
    seconds = parse_figure(text) * 1e-6
    if not MIN_SECONDS <= seconds <= MAX_SECONDS:
        raise UserError(f"{at}: time is {quote(text)}, should be more than 0 microseconds")
    return (size, seconds) if size else None


def _fields(program: str | None, hosts: dict[int, str], size: int, seconds: float, at: str) -> Row:
    if program is None:
        names = ", ".join(f"{name}_perf" for name in PROGRAMS)
        raise UserError(f"{at}: the name of the test is missing; put it ({names}) into the name of the file")
    if len(hosts) < 2:
        raise UserError(
            f"{at}: {len(hosts)} ranks are listed before the table, should be 2 or more ('# Rank 0 ... on HOST')"
        )
    nodes = len(set(hosts.values()))
    return {
        "collective": PROGRAMS[program],
        "level": "intra-node" if nodes == 1 else "inter-node",
        "ranks": len(hosts),
        "bytes": size,
        "repetition": 0,
        "seconds": seconds,
        "host": hosts[min(hosts)],
        "job_ranks": len(hosts),
        "ranks_per_node": len(hosts) // nodes,
        "versions": "nccl-tests",
    }
