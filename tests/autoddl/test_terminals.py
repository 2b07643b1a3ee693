"""Tables on terminals: no line of any command is longer than the terminal, and nothing is left out elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import io
import os
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from autoddl.__main__ import main
from autoddl.calib.measurements import SampleFile
from autoddl.cli._running import parser_of
from autoddl.measuredruns import PUBLISHED_RUNS
from autoddl.pipelines.runtime.load import is_available
from autoddl.text.tables import Table, Text

from ..calib.synthetic import ring, samples_of
from .sample_plans import cpu_pipeline, gpt_plan, pipeline_plan, written

WIDTHS = (80, 120)
#: Says in which order each table loses its columns.
PAGE = Path(__file__).resolve().parents[2] / "docs" / "tables.md"
GPT = ("gpt:8x128", "--cluster", "dgx-a100", "--nodes", "2", "--batch", "64", "--quiet")
PROFILED = ("pipeline", "--profile", "bert-48", "--cluster", "v100-a", "--batch", "64", "--planner")

#: Commands with tables; FOLDER stands for the folder of `folder`.
COMMANDS = {
    "plan": ("plan", *GPT),
    "plan of many layers": ("plan", "vgg13", *GPT[1:], "--communication-only", "-o", "FOLDER/vgg.json"),
    "plan on a calibrated cluster": ("plan", "mlp:64,128,64", "--cluster", "FOLDER/fitted.json", "--quiet"),
    "plan --pipeline": ("plan", *GPT, "--pipeline", "auto", "--time-limit", "2"),
    "plan of a paper's planner": ("plan", *GPT, "--pipeline", "chimera", "--time-limit", "2"),
    "models": ("models",),
    "clusters": ("clusters",),
    "compare": ("compare", *GPT, "--evaluations", "500"),
    "explain": ("explain", "FOLDER/plan.json"),
    "explain, of a pipeline": ("explain", "FOLDER/pipeline.json"),
    "diff": ("diff", "FOLDER/plan.json", "FOLDER/other.json"),
    "diff, of a pipeline": ("diff", "FOLDER/other.json", "FOLDER/pipeline.json"),
    **{f"pipeline --planner {name}": (*PROFILED, name) for name in ("dapple", "chimera", "wpipe")},
    "price": ("price", *GPT, "--tp", "2", "--best", "--time-limit", "2"),
    "plan --like": ("plan", *GPT, "--like", "megatron"),
    "price --runs": ("price", "--runs", "FOLDER/runs.csv"),
    "schedule": ("schedule", "chimera", "--stages", "4", "--micro-batches", "24", "--all-reduce-time", "1"),
    "schedule, asynchronous": ("schedule", "wpipe", "--stages", "40", "--micro-batches", "80", "--iterations", "3"),
    "schedule list": ("schedule", "list"),
    "fit": ("fit", "FOLDER/samples.csv", "-o", "FOLDER/fitted again.json"),
    "fit --against": ("fit", "FOLDER/samples.csv", "--against", "FOLDER/fitted.json"),
}
#: Those that run OneFlow.
RUNNING = {
    "extract": ("extract", "FOLDER/model.py:make"),
    "verify": ("verify", "FOLDER/small.json", "--ranks", "2", "--quiet"),
    "verify, of a pipeline": ("verify", "FOLDER/cpu.json", "--ranks", "4", "--quiet"),
    "train": ("train", "gpt:2x16", "--text", "FOLDER/text", "--sequence", "8", "--steps", "2", "--timeline", "--quiet"),
    "calibrate": (
        *("calibrate", "--ranks", "2", "--sizes", "4KiB,64KiB", "--samples", "FOLDER/new.csv", "--repetitions", "1"),
        *("--communication-only", "--quiet"),
    ),
    "rank": (
        *(
            "rank",
            "mlp:64,128,32",
            "--ranks",
            "2",
            "--strategies",
            "3",
            "--rounds",
            "1",
            "--repetitions",
            "1",
            "--quiet",
        ),
    ),
}
MODEL = """
import oneflow as flow

def make():
    model = flow.nn.Sequential(flow.nn.Linear(8, 16), flow.nn.ReLU(), flow.nn.Linear(16, 8))
    return model, (flow.ones(4, 8),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Plans, measurements, a cluster file fitted to them, a model and a text."""
    folder = tmp_path_factory.mktemp("terminals")
    written(folder / "plan.json", gpt_plan())
    written(folder / "other.json", gpt_plan(nodes=4, batch=32))
    written(folder / "pipeline.json", pipeline_plan())
    cpu_pipeline(folder / "cpu.json")
    lines = PUBLISHED_RUNS.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "runs.csv").write_text("".join(lines[:3]), encoding="utf-8")
    SampleFile(folder / "samples.csv").append(samples_of(ring(50e-6, 1e-9), jobs=(2, 4), noise=0.01, repetitions=2))
    (folder / "model.py").write_text(MODEL)
    (folder / "text").write_text("to be or not to be, that is the question. " * 50)
    small = ("plan", "mlp:64,128,64", "--cluster", "local-cpu", "--nodes", "1", "--devices-per-node", "2", "--quiet")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["fit", str(folder / "samples.csv"), "-o", str(folder / "fitted.json")]) == 0
        assert main([*small, "-o", str(folder / "small.json")]) == 0
    return folder


class Terminal:
    """A pseudo-terminal; ``text`` is what was written to it, once it is closed."""

    def __init__(self, width: int):
        self._ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self._read = bytearray()
        self._reader = threading.Thread(target=self._listen)
        self._reader.start()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # the other end was closed
            while data := os.read(self._ours, 4096):
                self._read += data

    def close(self) -> None:
        os.close(self.theirs)
        self._reader.join()
        os.close(self._ours)

    @property
    def text(self) -> str:
        return self._read.decode().replace("\r\n", "\n")


@dataclass(frozen=True)
class Printed:
    """What a command prints: the texts before they are fitted, and with how many columns.

    Attributes:
        screen: what it wrote to a terminal of the least of `WIDTHS`.
        texts: with the remedy that each names.
    """

    screen: str
    texts: tuple[tuple[Text, str], ...]

    def fitted(self, width: int) -> str:
        return "\n".join(text.fitted(width, remedy) for text, remedy in self.texts)

    @property
    def orders(self) -> set[str]:
        """The columns that its tables may lose, in order."""
        blocks = (block for text, _ in self.texts for section in text.sections for block in section)
        tables = (block for block in blocks if isinstance(block, Table))
        return {", ".join(table.columns[i].label for i in table.leaving) for table in tables}


@pytest.fixture(scope="module")
def printed(folder: Path) -> Callable[[str], Printed]:
    """``printed(name)``: what that command prints; it is run once for all tests."""

    @functools.cache
    def run(name: str) -> Printed:
        return printing(COMMANDS[name], folder)

    return run


def printing(words: tuple[str, ...], folder: Path) -> Printed:
    """Run a command on a terminal of the least width."""
    texts: list[tuple[Text, str]] = []
    fitted = Text.fitted

    def look(text: Text, width: int | None, remedy: str = "") -> str:
        texts.append((text, remedy))
        return fitted(text, width, remedy)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Text, "fitted", look)
        screen = on_terminal(words, folder, WIDTHS[0])
    return Printed(screen, tuple(texts))


def on_terminal(words: tuple[str, ...], folder: Path, width: int) -> str:
    """What a command writes to a terminal of that width."""
    terminal = Terminal(width)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(terminal):
        patch.delenv("COLUMNS", raising=False)
        with open(terminal.theirs, "w", closefd=False) as out:
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "__stdout__", out)
            assert main(placed(words, folder)) == 0
    return terminal.text


def placed(words: tuple[str, ...], folder: Path) -> list[str]:
    return [word.replace("FOLDER", str(folder)) for word in words]


def longest(text: str) -> int:
    return max(map(len, text.splitlines()))


def documented(words: Sequence[str]) -> set[str]:
    """The orders that the page states for a command."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {row[2].removesuffix(" |") for row in rows if f"`{words[0]}" in row[0]}


def test_every_command_with_tables_is_here():
    parser = parser_of([])
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    wide = {name for name, command in commands.choices.items() if "--wide" in command.format_help()}
    assert wide == {words[0] for words in [*COMMANDS.values(), *RUNNING.values()]}


def check_widths(found: Printed, words: Sequence[str]) -> None:
    """A terminal has what the texts are at its width; at no width a line is longer, and columns leave in the page's order."""
    assert 20 < longest(found.screen) <= WIDTHS[0]
    assert all(text.fitted(WIDTHS[0], remedy) in found.screen for text, remedy in found.texts)
    for width in WIDTHS[1:]:
        assert 20 < longest(found.fitted(width)) <= width
    assert found.orders - {""} <= documented(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_lines_fit_the_terminal(name, printed):
    """And columns are left out in the order that the page states."""
    check_widths(printed(name), COMMANDS[name])


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason=is_available().reason)
@pytest.mark.parametrize("name", RUNNING)
def test_lines_of_what_runs_fit_the_terminal(name, folder, lent_ranks):
    """The verification of a pipeline takes more than 10 s: every step of it runs on ranks and on one device."""
    check_widths(printing(RUNNING[name], folder), RUNNING[name])


@pytest.mark.parametrize(
    "name", ["plan", "explain", "diff, of a pipeline", "pipeline --planner chimera", "schedule", "schedule list", "fit"]
)
def test_wide_prints_what_a_pipe_gets(name, folder, capsys):
    words = COMMANDS[name]
    assert main(placed(words, folder)) == 0
    piped = capsys.readouterr().out
    wide = on_terminal((*words, "--wide"), folder, 40)
    searched = r"(exact search, )[^,]*"  # took a time
    assert re.sub(searched, r"\1", wide) == re.sub(searched, r"\1", piped)
    assert "(--wide" not in piped and longest(piped) > 78


def test_the_page_states_no_order_that_is_none(printed):
    """Where no other test has run the commands before, this one does, for seconds."""
    orders = {order for name in COMMANDS for order in printed(name).orders}
    assert {order for words in COMMANDS.values() for order in documented(words)} <= orders


def test_what_was_left_out_is_said(printed):
    text = printed("plan").screen
    assert "  left out: input, weight, states, output (--wide shows all)\n" in text
    (heading,) = (line for line in text.splitlines() if "communication" in line and "layer" in line)
    assert not {"input", "weight", "states", "output"} & set(heading.split())


def test_strategies_are_explained_where_they_first_appear(printed):
    for name in ("plan", "plan --pipeline", "explain, of a pipeline", "diff"):
        text = printed(name).fitted(500)
        assert text.count("(p0,p1,p2): samples are split over p0 devices") == 1, name
        assert text.index("(2,") < text.index("(p0,p1,p2): samples")
    assert "inter-node: between nodes, intra-node: inside a node" in printed("plan").fitted(500)


def test_the_process_looks_at_its_own_terminal():
    """The whole command, whose standard output is not Python's own; COLUMNS has the last word."""
    for columns, width in ((None, 60), ("50", 50)):
        terminal = Terminal(60)
        environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
        environment.update({} if columns is None else {"COLUMNS": columns})
        command = [sys.executable, "-m", "autoddl", "schedule", "list"]
        with contextlib.closing(terminal):
            done = subprocess.run(command, stdout=terminal.theirs, env=environment, timeout=120, check=False)
        assert done.returncode == 0 and width - 10 < longest(terminal.text) <= width
