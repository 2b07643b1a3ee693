"""Starts ranks on this machine, runs jobs on them, watches them, and ends them.

A `RankPool` starts its ranks once and runs any number of jobs on them. A job is a Python function that all ranks call. The function
must be importable, and its arguments and results must be picklable. A job returns one result per rank.

    with RankPool(4) as pool:
        results = pool.run("my_package.jobs:train", 50)

**Starting.** Rank 0 has to listen before the other ranks connect, because a rank that connects too early sleeps for 10 s. All
processes start at the same time, and load the libraries that need no other rank. Then rank 0 loads OneFlow. When rank 0 listens,
the other ranks load OneFlow.

**Watching.** While the launcher waits, it watches all ranks. The job fails if a rank raises, dies, is suspended or blocks. Every
failure ends all ranks. A rank that is blocked in communication gives up after ``stall_timeout_s``, which is OneFlow's own timeout;
communication includes barriers and waiting for pending operations. A suspended rank is noticed after 3 s. Often several ranks fail
at once, because the failure of one rank makes others fail. The most informative failure is reported.

**Ending.** All processes that a rank has started end with the rank (see `keeper`). If the launcher ends, even by SIGKILL, its ranks
end too, because the ranks and their keepers watch its pipe. After a job, the ranks leave together (see `parting`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Union

from autoddl.costmodel.errors import UserError

from ..load import is_available
from .failures import FailureKind, RankError, RankFailure, RankUserError, positions_text
from .localranks import LocalRanks, RankMessage
from .network import namespace_available
from .processes import RankProcess, is_listening, rank_environment, reserve_port, share_of_cores
from .rank import write_job
from .workfolders import WorkFolder

__all__ = ["RankPool", "Target"]

Target = Union[str, Callable[..., Any]]

_TICK_SECONDS = 0.2  # interval between checks of the ranks while no message arrives
_SETTLE_SECONDS = 0.4  # time between a failure and its report, to wait for the failure that has caused it
# The same time after a crash, which is usually a consequence: the sockets of a killed process close before the process has ended.
_CRASH_SETTLE_SECONDS = 2.0
_EXIT_SECONDS = 3.0  # longest time that idle ranks may take to exit


class RankPool:
    """Ranks on this machine that run jobs one after the other. Only one thread of the launcher may use the pool.

    The ranks share the machine's cores equally, and assume that nothing else runs on them.

    Args:
        num_ranks: Number of ranks.
        private_network: Whether the ranks have a network of their own, whose traffic can be counted (see `network`).
        with_oneflow: Whether the ranks load OneFlow and join. Without OneFlow they are plain Python processes.
        stall_timeout_s: Longest time [s] that a rank may wait for another rank in communication; longer waits count as a deadlock.
            It has to exceed the longest computation of a rank for which another rank waits, and the longest single operation.
        start_timeout_s: Longest time [s] until all ranks are ready.
        log_dir: Folder for the output of the ranks, ``rank<k>.log``. Default: a temporary folder, kept only after a failure.
        environment: Additional environment variables of the ranks.
        show_ranks: Ranks whose standard output goes to the standard output of the launcher instead of their log.

    Raises:
        UserError: The number of ranks is not positive, OneFlow or private networks are not available, or the system has no
            space for logs or processes.
        RankError: A rank failed while it started.
    """

    def __init__(
        self,
        num_ranks: int,
        *,
        private_network: bool = False,
        with_oneflow: bool = True,
        stall_timeout_s: float = 15.0,
        start_timeout_s: float = 120.0,
        log_dir: Path | None = None,
        environment: Mapping[str, str] | None = None,
        show_ranks: Sequence[int] = (),
    ) -> None:
        _check_possible(num_ranks, private_network, with_oneflow)
        self.num_ranks = num_ranks
        self.stall_timeout_s = stall_timeout_s
        self._work_folder, self.log_dir = _log_folder(log_dir)
        self._ranks = LocalRanks()
        self._unclaimed: list[RankMessage] = []  # messages that arrived before they were waited for
        self._num_jobs = 0
        self._is_open = True
        try:
            with reserve_port() as holder:
                port = holder.getsockname()[1]
                environments = [
                    rank_environment(rank, num_ranks, port, stall_timeout_s, environment or {})
                    for rank in range(num_ranks)
                ]
                self._start(environments, port, private_network, with_oneflow, start_timeout_s, show_ranks)
        except OSError as error:  # no space for a log, too many processes
            self._end()
            raise UserError(f"ranks cannot be started: {error}") from error
        except BaseException as error:
            self._end(failed=isinstance(error, RankError))
            raise

    @property
    def is_open(self) -> bool:
        """Whether jobs can be run: False after `close` and after any failure."""
        return self._is_open

    @property
    def pids(self) -> list[int]:
        """The process number of each rank, which is also the number of its process group."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def run(
        self,
        target: Target,
        *arguments: Any,
        timeout_s: float | None = None,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Call ``target(*arguments)`` on every rank.

        Args:
            target: An importable function, or its name: ``module:function`` or ``path/to/file.py:function``. Ranks
                import the module, so a script should start ranks under ``if __name__ == "__main__"``.
            arguments: Arguments of the function, the same on every rank.
            timeout_s: Longest time of the job [s]; None: no limit.
            on_report: Called with rank and value whenever a rank calls `rank.report`.

        Returns:
            The result of each rank, rank 0 first.

        Raises:
            UserError: The target cannot be imported, or its arguments cannot be pickled.
            RankError: A rank raised, died or stalled, or the job took too long. All ranks have been ended. The error is a
                `RankUserError`, which is a UserError too, if the rank raised a UserError.
        """
        return self.run_each(target, [arguments] * self.num_ranks, timeout_s=timeout_s, on_report=on_report)

    def run_each(
        self,
        target: Target,
        arguments: Sequence[Sequence[Any]],
        *,
        timeout_s: float | None = None,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """As `run`, with separate arguments for each rank."""
        if not self._is_open:
            raise RuntimeError("the ranks of this pool have been ended")
        if len(arguments) != self.num_ranks:
            raise UserError(f"{len(arguments)} sets of arguments for {self.num_ranks} ranks")
        name = _target_name(target)
        paths = self._write_jobs(name, arguments)
        try:
            for rank, path in zip(self._ranks, paths):
                rank.send("job", str(path))
            deadline = None if timeout_s is None else time.monotonic() + timeout_s
            what = f"{name} did not end within {timeout_s:g} s" if timeout_s is not None else name
            results = self._gather("done", list(self._ranks), deadline, what, on_report)
        except BaseException as error:  # KeyboardInterrupt too
            self._end(failed=isinstance(error, RankError))
            raise
        finally:
            for path in set(paths):
                path.unlink(missing_ok=True)
        return results

    def close(self) -> None:
        """End the ranks, which should be idle."""
        if not self._is_open:
            return
        self._part()
        self._ranks.leave(_EXIT_SECONDS)
        self._end()

    def _part(self) -> None:
        """Make the idle ranks stop using their network. Ranks that do not answer in time are ended nevertheless."""
        self._ranks.part()
        parted: set[int] = set()
        deadline = time.monotonic() + _EXIT_SECONDS
        while len(parted) < self.num_ranks and time.monotonic() < deadline:
            messages, failures = self._ranks.poll(_TICK_SECONDS)
            if failures:
                return
            parted |= {rank for rank, kind, _ in messages if kind == "parted"}

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self.close()
        else:
            self._end(failed=isinstance(error, RankError))

    # ---- Starting ---------------------------------------------------------------------------------------------------

    def _start(
        self,
        environments: list[dict[str, str]],
        port: int,
        private_network: bool,
        with_oneflow: bool,
        start_timeout_s: float,
        show_ranks: Sequence[int],
    ) -> None:
        deadline = time.monotonic() + start_timeout_s
        what = f"the start did not end within {start_timeout_s:g} s"

        def start(rank: int, network: int) -> RankProcess:
            return self._ranks.start(
                rank,
                self.num_ranks,
                self.log_dir / f"rank{rank}.log",
                environments[rank],
                private_network=network,
                with_oneflow=with_oneflow,
                shows_output=rank in show_ranks,
                cores=share_of_cores(rank, self.num_ranks),
            )

        first = start(0, -1 if private_network else 0)
        if private_network:
            self._gather("hello", [first], deadline, what)
        others = [start(rank, (first.pid or 0) if private_network else 0) for rank in range(1, self.num_ranks)]
        self._gather("hello", others if private_network else [first, *others], deadline, what)
        while with_oneflow and self.num_ranks > 1 and not is_listening(first.pid, port):
            self._watch(deadline, what, [first, *others])
        for process in others:
            process.send("load")
        self._gather("ready", [first, *others], deadline, what)

    def _write_jobs(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Path]:
        """Write the job of each rank to a file."""
        self._num_jobs += 1
        written: dict[int, Path] = {}  # equal argument lists share a file
        paths = []
        for rank, values in enumerate(arguments):
            if id(values) not in written:
                path = self.log_dir / f"job{self._num_jobs}-{rank}.pickle"
                write_job(path, name, values)
                written[id(values)] = path
            paths.append(written[id(values)])
        return paths

    # ---- Watching ---------------------------------------------------------------------------------------------------

    def _gather(
        self,
        wanted: str,
        ranks: Sequence[RankProcess],
        deadline: float | None,
        what: str,
        on_report: Callable[[int, Any], None] | None = None,
    ) -> list[Any]:
        """Wait until each of ``ranks`` has sent a message of the kind ``wanted``. Return the values in the order of the ranks."""
        while True:
            got = {rank: value for rank, kind, value in self._unclaimed if kind == wanted}
            awaited = [rank for rank in ranks if rank.rank not in got]
            if not awaited:
                numbers = {rank.rank for rank in ranks}
                self._unclaimed = [m for m in self._unclaimed if not (m[1] == wanted and m[0] in numbers)]
                return [got[rank.rank] for rank in ranks]
            for rank, kind, value in self._watch(deadline, what, awaited):
                if kind != "report":
                    self._unclaimed.append((rank, kind, value))
                elif on_report is not None:
                    on_report(rank, value)

    def _watch(self, deadline: float | None, what: str, awaited: Sequence[RankProcess]) -> list[RankMessage]:
        """Wait for messages, at most one tick, and return them. Raise an error if any rank has failed or the deadline is over."""
        tick = _TICK_SECONDS if deadline is None else min(_TICK_SECONDS, max(0.0, deadline - time.monotonic()))
        messages, failures = self._ranks.poll(tick)
        if failures:
            raise self._error(*self._causes(failures))
        is_late = deadline is not None and time.monotonic() >= deadline
        if is_late and all(kind == "report" for _, kind, _ in messages):  # reports do not extend the deadline
            raise self._error(RankFailure(awaited[0].rank, FailureKind.TIMEOUT, f"is late: {what}"))
        return messages

    def _causes(self, failures: Sequence[RankFailure]) -> list[RankFailure]:
        """Return these failures and the failures that follow soon, the most informative first."""
        begun, known = time.monotonic(), list(failures)
        while True:
            known.sort(key=lambda failure: failure.kind)
            is_consequence = known[0].kind in (FailureKind.CRASHED, FailureKind.CUT_OFF)
            patience_s = _CRASH_SETTLE_SECONDS if is_consequence else _SETTLE_SECONDS
            remaining_s = begun + patience_s - time.monotonic()
            if remaining_s <= 0:
                return known
            time.sleep(min(remaining_s, 0.02))
            known += self._ranks.poll(0.0)[1]

    def _error(self, failure: RankFailure, *others: RankFailure) -> RankError:
        """Return the error for a failure. Call it before the ranks are ended, because they may be asked for their positions.

        Args:
            failure: The most informative failure.
            others: The other failures.
        """
        notes = ""
        if failure.kind in (FailureKind.WAITED, FailureKind.TIMEOUT):
            suspended = self._ranks.suspended()
            if suspended is not None:
                failure = suspended
            else:
                notes = positions_text(self._ranks.positions(), others)
        if failure.kind is FailureKind.WAITED:
            failure = RankFailure(failure.rank, failure.kind, f"{failure.text} (more than {self.stall_timeout_s:g} s)")
        log = self._ranks.of(failure.rank).log
        message = f"rank {failure.rank} of {self.num_ranks} {failure.text}{notes} (its output: {log})"
        crashed = failure.kind is FailureKind.CRASHED
        return (RankUserError if failure.is_user_error else RankError)(message, failure.rank, log, crashed=crashed)

    # ---- Ending -----------------------------------------------------------------------------------------------------

    def _end(self, failed: bool = False) -> None:
        """Kill and reap all ranks. Keep their logs after a failure."""
        if not self._is_open:
            return
        self._is_open = False
        self._ranks.end()
        if self._work_folder is not None:
            self._work_folder.keep() if failed else self._work_folder.remove()


def _check_possible(num_ranks: int, private_network: bool, with_oneflow: bool) -> None:
    if num_ranks < 1:
        raise UserError(f"{num_ranks} ranks cannot be started; at least 1 is needed")
    if with_oneflow and not (available := is_available()):
        raise UserError(f"cannot start OneFlow ranks: {available.reason}")
    if private_network and not (available := namespace_available()):
        raise UserError(f"cannot give the ranks a private network: {available.reason}")


def _log_folder(log_dir: Path | None) -> tuple[WorkFolder | None, Path]:
    """Create the folder for logs. Return (the temporary folder, or None if the user has given a folder; its path)."""
    try:
        if log_dir is None:
            temporary = WorkFolder("ranks")
            return temporary, temporary.path
        log_dir.mkdir(parents=True, exist_ok=True)
        return None, log_dir.resolve()
    except OSError as error:
        place = "a temporary folder" if log_dir is None else f"folder {log_dir}"
        raise UserError(f"{place} for the output of ranks cannot be created ({error.strerror})") from None


def _target_name(target: Target) -> str:
    """Return the name by which a rank imports the target."""
    if isinstance(target, str):
        return target
    module, name = target.__module__, target.__qualname__
    if "<" in name:
        raise UserError(
            f"target {name} of {module} is local to a function or a lambda; ranks can only import functions"
        )
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None) or ""
        if not module.endswith(".py"):
            raise UserError(f"target {name} is defined interactively; ranks can only import functions from files")
    return f"{module}:{name}"
