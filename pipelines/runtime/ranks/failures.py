"""Describes failures of ranks in one line, which names the rank and its error."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from autoddl.costmodel.errors import UserError, without_colors

__all__ = [
    "FailureKind",
    "RankError",
    "RankFailure",
    "RankUserError",
    "last_position",
    "positions_text",
    "waited_too_long",
]

_HERE = Path(__file__).parent
#: Files whose frames `last_position` skips, in addition to those of OneFlow and the standard library.
_RUNTIME_FILES = {
    str(path)
    for path in (
        _HERE / "messages.py",
        _HERE / "rank.py",
        _HERE / "wire.py",
        _HERE.with_name("comm") / "collectives.py",
    )
}


class RankError(RuntimeError):
    """A rank failed, and all ranks were ended.

    Attributes:
        rank: The rank that failed.
        log: File with its output; None if the output was not kept.
        crashed: Whether a signal ended it that it caused itself, so in compiled code.
    """

    exit_code = 1  # of a command

    def __init__(self, message: str, rank: int, log: Path | None, *, crashed: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.log = log
        self.crashed = crashed


class RankUserError(RankError, UserError):
    """A rank raised a `UserError`, because the user's input is wrong."""

    exit_code = UserError.exit_code


class FailureKind(enum.IntEnum):
    """The ways in which a rank fails, the most informative first.

    If several ranks fail at once, the most informative failure is usually the cause of the others.
    """

    KILLED = 0  # by a signal from outside
    RAISED = 1
    EXITED = 2
    STOPPED = 3  # suspended, for example by SIGSTOP
    CRASHED = 4  # by a signal that it caused itself
    WAITED = 5  # blocked for longer than the stall timeout in communication that another rank did not join
    CUT_OFF = 6  # crashed because another rank had exited: OneFlow aborts when a connection breaks
    TIMEOUT = 7  # did not finish in time


@dataclass(frozen=True)
class RankFailure:
    """The failure of one rank.

    Attributes:
        rank: The rank that failed.
        kind: The kind of failure.
        text: Description, which continues the sentence "rank 3 of 4 ...".
        is_user_error: Whether the rank raised a `UserError`.
        position: Position in the user's code of a rank that was cut off; "" if unknown, and for other kinds.
    """

    rank: int
    kind: FailureKind
    text: str
    is_user_error: bool = False
    position: str = ""

    @staticmethod
    def of_exception(rank: int, type_name: str, text: str, is_user_error: bool) -> RankFailure:
        """Return the failure of a rank that raised an exception. OneFlow's timeouts of communication have a kind of their own."""
        if waited_too_long(text):
            return RankFailure(rank, FailureKind.WAITED, "waited too long for another rank in communication")
        line = _first_line(text)
        if is_user_error:
            return RankFailure(rank, FailureKind.RAISED, f"refused: {line}", is_user_error)
        return RankFailure(rank, FailureKind.RAISED, f"raised {type_name}: {line}" if line else f"raised {type_name}")

    @staticmethod
    def of_death(rank: int, signal_number: int, exit_code: int, log_tail: str) -> RankFailure:
        """Return the failure of a rank whose process ended.

        Args:
            rank: The rank.
            signal_number: Signal that ended the process; 0 if it exited.
            exit_code: Exit code of the process, if it exited.
            log_tail: The end of its log.
        """
        if waited_too_long(log_tail):
            return RankFailure(rank, FailureKind.WAITED, "waited too long for another rank in communication")
        if signal_number == 0:
            cause = _last_error_line(log_tail)
            said = f": {cause}" if cause else ""
            return RankFailure(rank, FailureKind.EXITED, f"exited with code {exit_code} before it had finished{said}")
        if signal_number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            position = last_position(log_tail)
            place = f" at {position}" if position else ""
            cause = _last_error_line(log_tail)
            said = f": {cause}" if cause else ""
            text = f"crashed with {_signal_name(signal_number)}{place}{said}"
            if _lost_another(log_tail):
                return RankFailure(rank, FailureKind.CUT_OFF, text, position=position)
            return RankFailure(rank, FailureKind.CRASHED, text)
        hint = ", perhaps for lack of memory" if signal_number == signal.SIGKILL else ""
        return RankFailure(rank, FailureKind.KILLED, f"was killed by {_signal_name(signal_number)}{hint}")


def positions_text(living: Mapping[int, str], failures: Iterable[RankFailure]) -> str:
    """Return a text with the positions of ranks, which is appended to a message.

    Args:
        living: Positions of the ranks that run.
        failures: Failures, whose positions are added.
    """
    positions = {failure.rank: failure.position for failure in failures if failure.position} | dict(living)
    return "".join(f"; rank {rank} is at {position}" for rank, position in sorted(positions.items()))


def waited_too_long(text: str) -> bool:
    """Return whether an error text means that a rank waited for another rank for longer than ``ONEFLOW_TIMEOUT_SECONDS``.

    OneFlow's transfers fail while they wait on a condition variable. Its wait for pending operations fails with a list of blocking
    instructions. `wire.synchronize` ends with faulthandler's "Timeout (0:00:15)!".
    """
    words = ("cond_.wait_for(lck, seconds", "blocking instructions", "timeout_error")
    return any(word in text for word in words) or bool(re.search(r"^Timeout \(\d+:\d\d:\d\d", text, re.MULTILINE))


def _lost_another(log_tail: str) -> bool:
    """Return whether OneFlow reports a broken connection to another rank, of its control service (gRPC) or its data network."""
    return bool(re.search(r"rpc_client\.cpp.*\(14 vs\. 0\)|Machine \d+ lost|io_event_poller", log_tail))


def last_position(dump: str) -> str:
    """Return the innermost frame of user code in the main thread, from a dump of faulthandler, as ``file:line in function``.

    Frames of OneFlow, of the standard library and of the code that runs jobs are skipped. The result is "" if there is no other
    frame. The dump lists the newest thread first, so the main thread is the last.
    """
    threads = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)
    frames = re.findall(r'^  File "([^"]*)", line (\d+) in (\S+)$', threads[-1], flags=re.MULTILINE)
    for path, line, function in frames:
        if not (
            path in _RUNTIME_FILES or path.startswith("<") or re.search(r"/site-packages/|/lib/python3\.\d+/", path)
        ):
            return f"{path}:{line} in {function}"
    return ""


def _first_line(text: str) -> str:
    lines = without_colors(text).strip().splitlines()
    return lines[0].strip() if lines else ""


def _last_error_line(log_tail: str) -> str:
    """Return the last line of a log that reports an error. C++ prints its error before faulthandler adds a stack."""
    lines = [line.strip() for line in without_colors(log_tail).splitlines()]
    errors = [line for line in lines if re.search(r"Check failed|Error|error:|what\(\):", line)]
    errors = [line for line in errors if not line.startswith("Fatal Python error")]
    return errors[-1][:300] if errors else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
