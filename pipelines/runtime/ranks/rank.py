"""The program of a rank: joins the other ranks, runs jobs, and ends when its launcher ends.

The launcher starts ``main`` with a JSON object of `RankOptions`, and exchanges these messages with it over two pipes:

    launcher                                   rank
    ("load", None)                             network ready: ("hello", None)
    ("job", path of the pickled job)           OneFlow loaded, all ranks joined: ("ready", None)
                                               ("report", value), then ("done", result) or ("raised", ...)
    ("part", None)                             no longer on OneFlow's network (see `parting`): ("parted", None)
    ("exit", None)

Before "hello" the rank sends its process number, ("pid", number), because the launcher's child is the `keeper` and not the rank.

After an exception the rank keeps running until the launcher ends it. If it exited, its connections would break, and the other ranks
would crash with errors that hide the first one. A rank exits by ``os._exit``, because OneFlow's own shutdown waits for all ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import importlib.util
import json
import os
import pickle
import runpy
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from autoddl.costmodel.errors import UserError

from ..load import load_oneflow, preload_libraries
from .devices import prepare_device, take_gpu
from .messages import read_message, write_message
from .network import create_namespace, join_namespace
from .parting import leave_network, wait_for_departures
from .turns import take_short_turns

__all__ = ["RankOptions", "main", "report", "resolve_target", "run_script", "run_script_together", "write_job"]

_DEPARTURE_SECONDS = 10.0  # longest time that ranks of another launcher may take to exit


@dataclass(frozen=True)
class RankOptions:
    """The options that a rank is started with.

    Attributes:
        rank: Rank of the process.
        num_ranks: Number of ranks of the job.
        read_fd: Pipe from the launcher.
        write_fd: Pipe to the launcher.
        private_network: 0: the launcher's network; -1: create a namespace; otherwise the process whose namespace to join.
        with_oneflow: Whether to load OneFlow.
        cores: Cores that the rank may use; empty: all.
        launcher_timeout_s: Longest time [s] that the launcher may be suspended; 0: no limit.
    """

    rank: int
    num_ranks: int
    read_fd: int
    write_fd: int
    private_network: int
    with_oneflow: bool
    cores: Sequence[int] = ()
    launcher_timeout_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class _Launcher:
    """The rank's side of the pipes."""

    def __init__(self, options: RankOptions) -> None:
        self._options = options
        self._lock = threading.Lock()  # reports may come from any thread

    def send(self, kind: str, value: Any = None) -> None:
        with self._lock:
            write_message(self._options.write_fd, (kind, value))

    def receive(self) -> tuple[str, Any]:
        return read_message(self._options.read_fd)

    def watch(self) -> None:
        """Kill this rank and all processes of its group as soon as the launcher has ended."""
        poll = select.poll()
        poll.register(self._options.read_fd, 0)  # only POLLHUP and POLLERR, which are always reported

        def wait() -> None:
            poll.poll()
            os.killpg(os.getpgrp(), signal.SIGKILL)

        threading.Thread(target=wait, daemon=True).start()


# Module state, because a process is at most one rank: the connection belongs to the process, like its environment variables.
_launcher: _Launcher | None = None


def report(value: Any) -> None:
    """Send a value to the launcher while the job runs, for example progress. Does nothing in a process without a launcher."""
    if _launcher is not None:
        _launcher.send("report", value)


def main(options_json: str) -> None:
    """Run a rank. Does not return."""
    global _launcher
    options = RankOptions(**json.loads(options_json))
    _launcher = _Launcher(options)
    status = 1
    try:
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)  # by which the launcher asks for the rank's position
        if _report_exceptions(_launcher, lambda: _start(options)):
            _launcher.send("ready")
            _serve(_launcher)
        status = 0
    except EOFError:
        pass  # the launcher has ended
    except BaseException:
        traceback.print_exc()
    finally:
        _flush()
        os._exit(status)


def _start(options: RankOptions) -> None:
    assert _launcher is not None
    if options.cores:
        os.sched_setaffinity(0, options.cores)  # inherited by all threads started later
    take_short_turns()  # likewise inherited
    if options.private_network < 0:
        create_namespace()
    elif options.private_network > 0:
        join_namespace(options.private_network)
    _launcher.watch()  # from here on there are threads: namespaces have to be joined before
    _launcher.send("hello")
    choice = prepare_device(os.environ) if options.with_oneflow else None
    if options.with_oneflow:
        import numpy  # noqa: F401  # NumPy and the libraries load slowly and need no other rank: now, while rank 0 starts

        preload_libraries()
    if options.rank > 0:
        _launcher.receive()  # "load": a rank that connects to rank 0 too early sleeps for 10 s before it tries again
    if options.with_oneflow:
        flow = load_oneflow()
        if choice is not None:
            gpu = choice.gpu
            line = take_gpu(flow, *(() if gpu is None else (gpu.index, gpu.free_bytes)))
            sys.stdout.write(f"{line}\n")


def _serve(launcher: _Launcher) -> None:
    while True:
        kind, value = launcher.receive()
        if kind == "exit":
            return
        if kind == "part":
            leave_network()
            launcher.send("parted")
            continue
        _report_exceptions(launcher, functools.partial(_run_job, launcher, value))


def _run_job(launcher: _Launcher, path: str) -> None:
    target, arguments = pickle.loads(Path(path).read_bytes())  # written by `write_job`
    launcher.send("done", resolve_target(target)(*arguments))


def _report_exceptions(launcher: _Launcher, action: Callable[[], None]) -> bool:
    """Run ``action``. Write an exception to the log and send it to the launcher. Return whether there was no exception."""
    try:
        action()
        return True
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which must be reported too
        traceback.print_exception(type(error), error, _job_traceback(error.__traceback__))
        _flush()
        launcher.send("raised", (type(error).__name__, str(error), isinstance(error, UserError)))
        return False


def _job_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback in the job's code, without the frames of this module before it."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        part = part.tb_next
    return part or trace


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def write_job(path: Path, target: str, arguments: Sequence[Any]) -> None:
    """Write the job of a rank to a file. A pipe would block if the rank does not read.

    Args:
        path: The file.
        target: Name of the function that the rank calls; see `resolve_target`.
        arguments: Arguments of the function.

    Raises:
        UserError: The arguments cannot be pickled, or the file cannot be written.
    """
    try:
        path.write_bytes(pickle.dumps((target, tuple(arguments)), protocol=pickle.HIGHEST_PROTOCOL))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UserError(f"the arguments of {target} cannot be sent to ranks: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


# ---- Targets ------------------------------------------------------------------------------------------------------------


def resolve_target(name: str) -> Callable[..., Any]:
    """Return the function with the name ``module:function`` or ``path/to/file.py:function``.

    Raises:
        UserError: The name has another form, or there is no such function.
    """
    place, separator, function_name = name.rpartition(":")
    if not separator or not place or not function_name:
        raise UserError(f"target {name!r} is not module:function or file.py:function")
    module = _module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    function: Any = module
    for part in function_name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        raise UserError(f"target {name!r}: {place} has no function {function_name}")
    return function


def _module_of_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"target file {path} does not exist")
    name = f"autoddl_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    if name in sys.modules and sys.modules[name].__spec__.origin == str(path):  # type: ignore[union-attr]
        return sys.modules[name]
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script as ``python path *arguments`` would. ``sys.exit(0)`` counts as success.

    Raises:
        RuntimeError: The script exits with another code.
    """
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise RuntimeError(f"{path} exited with {leaving.code}") from None


def run_script_together(path: str, arguments: Sequence[str]) -> None:
    """Run a script on ranks that another launcher has started: as `run_script`, then leave OneFlow's network with all ranks.

    Rank 0 serves the barriers, so it exits last.
    """
    run_script(path, arguments)
    if sys.modules.get("oneflow") is not None:
        barrier = load_oneflow().comm.barrier
        barrier()  # all ranks are done
        leave_network()
        barrier()  # no rank is on the network any more
        if os.environ["RANK"] == "0":
            wait_for_departures(_DEPARTURE_SECONDS)
