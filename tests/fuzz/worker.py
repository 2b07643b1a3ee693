"""Runs cases of a reader in this process, each within limits; started by test_fuzz.py, and by hand to see one case again:

    python tests/fuzz/worker.py READER --cases 2000 --seed 0
    python tests/fuzz/worker.py READER --only 1234 --seed 0

Fails on anything but success (exit code 0, output without NaN or infinity) or one line with exit code 2, on more than 10 s
of processor time, and on more than 2 GB of memory.  The processor time is this process's own: no verdict depends on what else
the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

# This process works on one processor: the pools of numpy's libraries would count as time and memory of the cases.
os.environ.update({f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMEXPR")})

from mutations import MARKER
from readers import READERS, Case

from autoddl.__main__ import main as command_line
from autoddl.cli import _running
from autoddl.costmodel.errors import UserError, one_line

#: Parsers hold nothing of what they parsed; making one takes longer than most cases.
_parser_of = functools.cache(_running.parser_of)
_running.parser_of = lambda argv: _parser_of(tuple(argv[:1]))

MAX_SECONDS = 10.0
MAX_BYTES = 2 * 10**9
MAX_SHOWN = 200
LONGEST_LINE = 1300
#: In memory where that can be: on a disk, making a file takes longer than most cases.
FILES = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
#: Variables of launchers, which must not come from where the test runs.
_FOREIGN = re.compile(r"SLURM_|OMPI_|PMI|(LOCAL_)?RANK$|(LOCAL_)?WORLD_SIZE$|MASTER_")


class TooLong(BaseException):
    """A case took more than its processor time; no `except Exception` stops it."""


def run(case: Case) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    for name, data in case.files.items():
        Path(name).write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _environment(case):
        try:
            code = _command(case)
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
    return code, out.getvalue(), err.getvalue()


def _command(case: Case) -> int:
    if case.call is None:
        return command_line(case.argv)
    try:
        print(case.call())
    except UserError as error:
        print(f"autoddl: {one_line(str(error))}", file=sys.stderr)
        return 2
    return 0


@contextlib.contextmanager
def _environment(case: Case) -> Iterator[None]:
    before = dict(os.environ)
    # As the system would pass it on: no NUL, and bytes that are no text escaped.
    os.environ.update({name: value.encode("utf-8", "replace").decode() for name, value in case.environ.items()})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def fault_of(case: Case, code: int, out: str, err: str) -> str | None:
    """What is wrong with the outcome; None where it is right."""
    if code == 0:
        if err:
            return f"success, but stderr says {err[:500]!r}"
        # A dry run of a launch shows hosts' names as they are, also one that is called inf.
        return None if case.argv[:1] == ("launch",) else _fault_of_output(out)
    if code != 2:
        return f"exit code {code}: {err[-2000:]}"
    lines = err.removesuffix("\n").split("\n")
    line = lines[-1]
    if line.startswith("autoddl: out of memory"):
        return f"it took more than {MAX_BYTES / 1e9:g} GB: {line}"
    if len(lines) > 1 and not case.last_line_only:
        return f"stderr has {len(lines)} lines"
    if not line.startswith("autoddl: ") or len(line) <= len("autoddl: "):
        return f"stderr does not begin with 'autoddl: ': {line[:200]!r}"
    if not line.isprintable():
        return f"the line holds control characters: {line!r}"
    if line.count(MARKER) > MAX_SHOWN or len(line) > LONGEST_LINE:
        return f"the line has {len(line)} characters, {line.count(MARKER)} of them surely input: {line}"
    return None


def _fault_of_output(out: str) -> str | None:
    if out.lstrip().startswith(("{", "[")):
        try:
            json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            return f"the output is not JSON: {error}"
    elif re.search(r"(?<![\w.-])[-+]?(?:nan|inf)(?![\w.-])", out):
        return f"the output holds NaN or infinity: {out[:2000]}"
    return None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} in the output")


def check(reader: str, seed: int, number: int) -> tuple[str | None, int, float]:
    """Make and run one case: what is wrong with it (None: nothing), its exit code, and its processor seconds."""
    case = READERS[reader](random.Random(f"{reader} {seed} {number}"))
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        code, out, err = run(case)
        signal.setitimer(signal.ITIMER_PROF, 0)
        fault = fault_of(case, code, out, err)
    except TooLong:
        code, fault = -1, f"it took more than {MAX_SECONDS:g} s:\n{traceback.format_exc(limit=-12)}"
    except BaseException:
        signal.setitimer(signal.ITIMER_PROF, 0)
        code, fault = -1, traceback.format_exc()
    if fault is not None:
        again = f"python tests/fuzz/worker.py {reader} --seed {seed} --only {number}"
        files = {name: data[:3000] for name, data in case.files.items()}
        given = f"argv {case.argv!r:.3000}\n environ {case.environ!r:.3000}\n files {files!r}"
        fault = f"{reader} case {number} (seed {seed}): {fault}\n {given}\n {again}"
    return fault, code, time.process_time() - begin


def _limit_memory() -> None:
    """2 GB beyond what the modules take: allocations behind it fail, and what then ends for lack of memory is a fault."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _out_of_time(*_: Any) -> NoReturn:
    raise TooLong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reader", choices=tuple(READERS))
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this case alone")
    parser.add_argument("--most-faults", type=int, default=5, help="after so many faults, stop")
    parser.add_argument(
        "--most-silent-s", type=float, default=600.0, help="seconds without an end of a case until all ends"
    )
    arguments = parser.parse_args()
    for name in [name for name in os.environ if _FOREIGN.match(name)]:
        del os.environ[name]
    numbers = range(arguments.first, arguments.first + arguments.cases) if arguments.only is None else [arguments.only]
    signal.signal(signal.SIGPROF, _out_of_time)
    faults, codes, slowest, armed = [], {0: 0, 2: 0}, (0.0, -1), -1.0
    with tempfile.TemporaryDirectory(dir=FILES) as folder:
        os.chdir(folder)
        READERS[arguments.reader](random.Random(0))  # the seeds are made now
        _limit_memory()
        for number in numbers:
            # A case that waits, which takes no processor time, ends everything, with the place where it waits.
            if time.monotonic() > armed + 1.0:  # it starts a thread, which takes as long as some cases
                armed = time.monotonic()
                faulthandler.dump_traceback_later(arguments.most_silent_s, exit=True)
            fault, code, seconds = check(arguments.reader, arguments.seed, number)
            codes[code] = codes.get(code, 0) + 1
            slowest = max(slowest, (seconds, number))
            if fault is not None:
                faults.append(fault)
                print(fault, flush=True)
                if len(faults) == arguments.most_faults:
                    break
        faulthandler.cancel_dump_traceback_later()
        os.chdir("/")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = {"faults": len(faults), "codes": codes, "slowest_s": slowest[0], "slowest": slowest[1], "peak_bytes": peak,
             "cpu_s": time.process_time()}  # fmt: skip
    print(json.dumps(facts))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
