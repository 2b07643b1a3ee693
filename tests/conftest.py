from __future__ import annotations

import os
import signal
from collections.abc import Generator
from dataclasses import astuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import autoddl
from autoddl.costmodel.devices import CPU, DEVICE_VARIABLE
from autoddl.pipelines.runtime.ranks.failures import RankError

from .distributing import Scheduling, mark_ranks, tell_units
from .faults import PAGE, Fault, of_mark, page_with
from .gpumarks import OPTION, add_marks, select_devices, skip_without_gpus, summary_of
from .sharedranks import counted_ranks, lent_ranks, ranks, ranks_of_graphs  # noqa: F401 - fixtures of all tests
from .watchdog import Watchdog

#: A test that takes longer says why in its docstring.
SLOW_SECONDS = 10.0
#: Lines of the output of a rank that a report of its failure shows.
LOG_LINES = 40

_WATCHDOG = pytest.StashKey[Watchdog]()
_WORKERS_DIR = pytest.StashKey[Path]()

# Plans for GPUs run on CPU ranks here, in every process that tests start; tests of GPUs (tests/gpu) choose theirs themselves.
os.environ[DEVICE_VARIABLE] = CPU

# A busy machine is no fault of a test's. What is found at random belongs to whoever develops, not to a run that judges a change.
# Examples are as many as show a fault at once if it is common; rarer ones are found over many runs.
hypothesis.settings.register_profile(
    "busy machine",
    max_examples=50,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
hypothesis.settings.load_profile("busy machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--faults``: run the tests that are marked as a fault's, and write docs/faults.md. ``--write-docs``: write what commands of
    the other pages print. ``--fuzz-cases``: how much to fuzz. ``--gpu-tests-on-cpu``: see `gpumarks`."""
    parser.addoption("--faults", action="store_true", help="run the tests of faults, and write docs/faults.md")
    parser.addoption("--write-docs", action="store_true", help="write the outputs of commands in README.md and docs/")
    parser.addoption(
        "--fuzz-cases", type=int, default=2000, metavar="N", help="mutated inputs of each reader (%(default)s)"
    )
    parser.addoption(OPTION, action="store_true", help="run all cases of the tests of GPUs on CPU ranks instead")


def pytest_configure(config: pytest.Config) -> None:
    _take_signals()
    config.addinivalue_line("markers", "fault(area, fault, outcome, exit_code=None): a row of docs/faults.md")
    config.addinivalue_line("markers", "ranks(unit='ranks'): starts ranks; tests of a unit run one at a time")
    add_marks(config)
    config.addinivalue_line("markers", "slow: takes seconds of computing; `make test-fast` leaves it out")
    worker = getattr(config, "workerinput", None)
    # The real stderr: pytest captures nothing yet.
    file = Path(worker["folder"], worker["workerid"]) if worker else os.dup(2)
    output = open(file, "wb")  # noqa: SIM115 - until the process ends
    config.stash[_WATCHDOG] = Watchdog(output)


def _take_signals() -> None:
    """Let processes of tests be interrupted, also where a script (``make test &``) or nohup had this one ignore it."""
    defaults = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGQUIT: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, default in defaults.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, default)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks of faults are checked, and passed on to the reports; tests of ranks are marked."""
    mark_ranks(items)
    select_devices(config, items)
    for item in items:
        for mark in item.iter_markers("fault"):
            fault = of_mark(mark.args, mark.kwargs, item.nodeid.partition("[")[0])
            item.user_properties.append(("fault", astuple(fault)))
        if not (getattr(item, "obj", None) and item.obj.__doc__):
            item.user_properties.append(("says nothing", True))
    if config.getoption("--faults"):
        config.hook.pytest_deselected(items=[item for item in items if not item.get_closest_marker("fault")])
        items[:] = [item for item in items if item.get_closest_marker("fault")]


def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without_gpus(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Where a rank failed, the report shows the end of the output of all ranks: their folder goes with the machine."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if isinstance(error, RankError) and error.log is not None:
        for log in sorted(error.log.parent.glob("rank*.log")):
            lines = log.read_text(errors="replace").splitlines()
            report.sections.append((f"end of {log.name}", "\n".join(lines[-LOG_LINES:])))
    return report


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Says what tests of GPUs found; names slow tests that do not say why; with ``--faults`` and nothing failed, writes the page.

    The times are for reading, not for a verdict: they depend on what else the machine does.
    """
    if hasattr(config, "workerinput"):  # a worker knows its own tests alone
        return
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    if lines := summary_of(reports):
        terminalreporter.section("GPUs", sep="-")
        for line in lines:
            terminalreporter.write_line(line)
    silent = [r for r in reports if r.duration > SLOW_SECONDS and dict(r.user_properties).get("says nothing")]
    if silent:
        terminalreporter.section(f"took more than {SLOW_SECONDS:g} s, without a docstring that says why", sep="-")
        for report in silent:
            terminalreporter.write_line(f"{report.duration:.1f} s {report.nodeid}")
    if config.getoption("--faults") and exitstatus == 0:
        _write_faults(terminalreporter)


def _write_faults(terminalreporter: Any) -> None:
    """Write docs/faults.md. Of a test with parameters, the longest one's seconds."""
    measured: dict[Fault, float | None] = {}
    for outcome in ("passed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            properties = dict(report.user_properties)
            if "fault" in properties:
                fault = Fault(*properties["fault"])
                seconds = None if outcome == "skipped" else properties.get("seconds", report.duration)
                measured[fault] = max((s for s in (seconds, measured.get(fault)) if s is not None), default=None)
    PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), measured.items()), encoding="utf-8")
    terminalreporter.write_line(f"{len(measured)} faults written to {PAGE}")


def pytest_report_header() -> str:
    """What is under test: the sources or an installed wheel, with OneFlow or without."""
    try:
        oneflow = f"OneFlow {version('oneflow')}"
    except PackageNotFoundError:
        oneflow = "no OneFlow, its tests are skipped"
    return f"autoddl {version('autoddl')} from {Path(autoddl.__path__[0])}; {oneflow}"


# ---- Workers of pytest-xdist -------------------------------------------------------------------------------------------------


def pytest_configure_node(node: Any) -> None:
    """Tell a worker the folder in which it leaves what the process that shares the tests out has to know."""
    if _WORKERS_DIR not in node.config.stash:
        node.config.stash[_WORKERS_DIR] = node.config._tmp_path_factory.mktemp("workers")
    node.workerinput["folder"] = str(node.config.stash[_WORKERS_DIR])


@pytest.hookimpl(tryfirst=True)  # before the worker says that it has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker:
        tell_units(session.items, Path(worker["folder"]), worker["workerid"])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of ranks in two streams (see `distributing`); another ``--dist`` is the user's affair."""
    return Scheduling(config, log, config.stash[_WORKERS_DIR]) if config.getvalue("dist") == "loadgroup" else None


def pytest_handlecrashitem(report: Any) -> None:
    """A worker has gone: what its watchdog left is part of the test's report."""
    stacks = report.node.config.stash[_WORKERS_DIR] / report.node.gateway.id
    report.longrepr = f"{report.longrepr}\n{stacks.read_text(errors='replace')}"


# ---- Tests that hang ---------------------------------------------------------------------------------------------------------


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """In place of pytest-timeout's own timers."""
    item.config.stash[_WATCHDOG].watch(item.nodeid, settings.timeout)
    return True


def pytest_timeout_cancel_timer(item: pytest.Item) -> bool:
    item.config.stash[_WATCHDOG].rest()
    return True


@pytest.fixture(scope="session", autouse=True)
def _away_from_the_sources(tmp_path_factory: pytest.TempPathFactory):
    """Run everything in an empty folder.

    A `python -m autoddl` started by a test would otherwise import the repository's autoddl/ folder in place of the
    installed package, and a test could depend on where it was started.
    """
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("cwd"))
    yield
    os.chdir(before)
