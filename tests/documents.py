"""The pages of documentation as programs: README.md and docs/*.md, read as blocks of commands, files and Python.

A page is run from top to bottom in an empty folder.  What a block is stands in the first line of its fence:

==================================  ==============================================================================================
fence                               what is done
==================================  ==============================================================================================
```console                          lines that begin with ``$ `` are run, the lines below are compared with what they print
```console exit=2                   ... and the last command ends with this exit code (0)
```console skip="slow"              not run, for one of `REASONS`; command lines are parsed, and their files have to be there
```console needs="ranks"            run where the needs are met (`unmet`): ``oneflow``, ``ranks``, ``counted`` (ranks in a network
                                    of their own), ``module:pandas``, ``command:models``, a function such as ``autoddl.plan``
```python                           run; all Python of a page shares its names
```pycon                            a session with ``>>>``, whose output is compared
```python file=model.py             written to a file (any language)
```python of=model.py               an excerpt of a file that is there
```text, ```mermaid, ...            for reading
==================================  ==============================================================================================

**Shape.**  Output is compared without its figures: numbers, their signs, units of time and of bytes, and the widths of columns are
no part of the shape; words, columns and the number of lines are.  A line ``...`` stands for any lines; at the end of a line it
stands for the rest of the line.
"""

from __future__ import annotations

import ast
import code
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoddl.__main__ import main

__all__ = ["PAGES", "REASONS", "ROOT", "Block", "Run", "blocks_of", "commands_of", "shape", "unmet"]

ROOT = Path(__file__).resolve().parents[1]
PAGES = tuple(str(path.relative_to(ROOT)) for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
#: Why a command is not run: it takes more than some seconds, needs what a test machine does not have, or changes the machine.
REASONS = ("slow", "gpus", "hosts", "slurm", "root", "installs", "a browser")

_ELIDED, _CUT = "...", " ..."
_SHELL = set("|&;<>()$`*?")
_TIMEOUT_S = 240.0


# ---- Reading -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fence of a page.

    Attributes:
        line: of its first line of text, counted from 0.
        language, attributes: of its first line.
        text: its lines.
    """

    line: int
    language: str
    attributes: dict[str, str]
    text: tuple[str, ...]

    @property
    def is_run(self) -> bool:
        """Whether it does anything, where its needs are met."""
        runs = self.language in ("console", "python", "pycon") or bool({"file", "of"} & set(self.attributes))
        return runs and "skip" not in self.attributes


@dataclass(frozen=True)
class Command:
    """A command of a console with the output that the page has: ``lines`` from ``line`` of the page on."""

    words: str
    line: int
    lines: tuple[str, ...]


def blocks_of(text: str) -> list[Block]:
    """The fences of a page; one of four backticks may have others in it."""
    blocks: list[Block] = []
    begin: tuple[int, str, dict[str, str]] | None = None
    ticks = ""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        fence = re.match(r"`{3,}", line)
        if begin is not None and line.rstrip() == ticks:
            blocks.append(Block(*begin, tuple(lines[begin[0] : number])))
            begin = None
        elif begin is None and fence:
            ticks = fence[0]
            language, *words = shlex.split(line[len(ticks) :]) or [""]
            begin = number + 1, language, {name: value for name, _, value in (word.partition("=") for word in words)}
    assert begin is None, f"the fence of line {begin[0]} has no end" if begin else ""
    return blocks


def commands_of(block: Block) -> list[Command]:
    """The commands of a console; a line that ends with a backslash goes on in the next one."""
    starts = [i for i, line in enumerate(block.text) if line.startswith("$ ")]
    commands = []
    for start, end in zip(starts, [*starts[1:], len(block.text)]):
        last = start
        while block.text[last].endswith("\\"):
            last += 1
        words = "\n".join(block.text[start : last + 1])[2:]
        commands.append(Command(words, block.line + last + 1, block.text[last + 1 : end]))
    assert starts[:1] == [0], f"line {block.line + 1}: a console begins with a command"
    return commands


# ---- Shapes ------------------------------------------------------------------------------------------------------------------


def shape(line: str) -> str:
    """A line without its figures."""
    line = re.sub(r"\d[\d,]*(\.\d+)?(e[-+]?\d+)?", "0", line.rstrip())
    line = re.sub(r"(?<![\w)])[-+](?=0)", "", line)
    line = re.sub(r"\b0 (ns|us|ms|s)\b", "0 s", line)
    line = re.sub(r"\b0 (B|KiB|MiB|GiB|TiB)\b", "0 B", line)
    # Which tensor has the largest error is a figure, too.
    line = re.sub(r"(?<=tensors; |s price: )[\w.]+", "NAME", line)
    # A gap is closed where there was time for it.
    return re.sub(r"  (?:0%|proven)(?=  )", "  GAP", re.sub(r"  +", "  ", line))


def aligned(expected: Sequence[str], printed: Sequence[str]) -> list[str] | None:
    """The expected lines with the figures that were printed; None where the shapes differ."""
    gaps = [-1, *(i for i, line in enumerate(expected) if line.strip() == _ELIDED), len(expected)]
    parts = [list(expected[begin + 1 : end]) for begin, end in zip(gaps, gaps[1:])]
    found: list[str] = []
    at = 0
    for number, part in enumerate(parts):
        # The first part begins where the output begins, the last one ends where it ends; the others stand anywhere between.
        first = 0 if number == 0 else at if number < len(parts) - 1 else max(at, len(printed) - len(part))
        last = 0 if number == 0 else len(printed) - len(part)
        places = range(first, last + 1)
        place = next((p for p in places if _are_alike(part, printed[p : p + len(part)])), None)
        if place is None:
            return None
        at = place + len(part)
        found += [expected[gaps[number]]] if number else []
        found += [line if line.endswith(_CUT) else new for line, new in zip(part, printed[place:at])]
    return found if at == len(printed) or len(parts) > 1 else None


def _are_alike(expected: Sequence[str], printed: Sequence[str]) -> bool:
    if len(expected) != len(printed):
        return False
    for line, other in zip(expected, printed):
        wanted, got = shape(line), shape(other)
        if wanted.endswith(_CUT):
            wanted = wanted[: -len(_CUT)]
            got = got[: len(wanted)]
        if wanted != got:
            return False
    return True


def _trimmed(text: str) -> list[str]:
    """The lines without empty ones at both ends: a page has some air."""
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[0]:
        lines.pop(0)
    while lines and not lines[-1]:
        lines.pop()
    return lines


# ---- Running -----------------------------------------------------------------------------------------------------------------


def unmet(need: str) -> str | None:
    """Why something that a block needs is not there."""
    from autoddl.pipelines.runtime.load import is_available
    from autoddl.pipelines.runtime.ranks.network import namespace_available

    if need in ("oneflow", "ranks", "counted"):
        available = is_available()
        if available and need == "counted":
            available = namespace_available()
        return None if available else available.reason
    if need.startswith("command:"):
        command = need.partition(":")[2]
        return None if find_spec(f"autoddl.cli.{command}") else f"there is no command {command}"
    if need.startswith("module:"):
        module = need.partition(":")[2]
        return None if find_spec(module) else f"there is no module {module}"
    module, _, name = need.rpartition(".")
    return None if callable(getattr(__import__(module), name, None)) else f"there is no function {need}"


@dataclass
class Run:
    """A page that is run in the current folder.

    Attributes:
        page: its path from the root.
        is_written: its outputs are replaced by what was printed; `lines` is the page then.
        left_out: for each reason the lines of blocks that were not run.
        count: of the blocks that were run.
    """

    page: str
    is_written: bool = False
    left_out: dict[str, list[int]] = field(default_factory=dict)
    count: int = 0
    _names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    _changes: list[tuple[int, int, list[str]]] = field(default_factory=list)

    def blocks(self, blocks: Sequence[Block]) -> None:
        """Run all blocks, one after the other."""
        for block in blocks:
            if not block.is_run:
                continue
            reasons = [reason for need in block.attributes.get("needs", "").split() if (reason := unmet(need))]
            if reasons:
                self.left_out.setdefault(reasons[0], []).append(block.line)
                continue
            self.count += 1
            self._block(block)

    def text(self, before: str) -> str:
        """The page with the outputs of this run."""
        lines = before.split("\n")
        for begin, end, output in reversed(self._changes):
            lines[begin:end] = output
        return "\n".join(lines)

    def _block(self, block: Block) -> None:
        if "file" in block.attributes:
            Path(block.attributes["file"]).write_text("\n".join(block.text) + "\n", encoding="utf-8")
        elif "of" in block.attributes:
            printed = Path(block.attributes["of"]).read_text(encoding="utf-8").split("\n")
            self._compare(block.line, block.text, ["", *printed, ""], excerpt=True)
        elif block.language == "python":
            with self._there():
                exec(compile("\n".join(block.text), f"{self.page}:{block.line}", "exec"), self._names)
        elif block.language == "pycon":
            self._session(block)
        else:
            commands = commands_of(block)
            for command in commands:
                code, output = run_command(command.words)
                wanted = int(block.attributes.get("exit", 0)) if command is commands[-1] else 0
                assert code == wanted, f"{self.page}:{command.line}: exit code {code}\n$ {command.words}\n{output}"
                self._compare(command.line, command.lines, _trimmed(output))

    def _session(self, block: Block) -> None:
        source = "\n".join(block.text) + "\n"
        for example in doctest.DocTestParser().get_examples(source):
            with self._there() as output:
                _run_single(example.source, f"{self.page}:{block.line + example.lineno}", self._names)
            first = block.line + example.lineno + example.source.count("\n")
            expected = tuple(example.want.rstrip("\n").split("\n")) if example.want else ()
            self._compare(first, expected, _trimmed(output.getvalue()))

    @contextlib.contextmanager
    def _there(self) -> Iterator[io.StringIO]:
        """Modules of the page's folder can be imported; what is printed is kept."""
        output = io.StringIO()
        sys.path.insert(0, os.getcwd())
        try:
            with contextlib.redirect_stdout(output):
                yield output
        finally:
            sys.path.remove(os.getcwd())

    def _compare(self, line: int, lines: Sequence[str], printed: list[str], excerpt: bool = False) -> None:
        begin, end = line, line + len(lines)
        while begin < end and not lines[begin - line].strip():
            begin += 1
        while end > begin and not lines[end - 1 - line].strip():
            end -= 1
        expected = list(lines[begin - line : end - line])
        wanted = [_ELIDED, *expected, _ELIDED] if excerpt else expected
        found = aligned(wanted, printed)
        if found is not None and excerpt:
            found = found[1:-1]
        if found is None and (excerpt or not self.is_written):
            raise AssertionError(_difference(f"{self.page}:{line + 1}", expected, printed))
        if self.is_written:
            self._changes.append((begin, end, printed if found is None else found))


def run_command(words: str) -> tuple[int, str]:
    """Run a command line of a page; the exit code and all that it printed, with paths as seen from the page's folder.

    Commands of ours run in this process, as far as a shell is not needed; ``make demo`` runs what the Makefile has.
    """
    code, output = _run_command(words)
    for path, shown in ((f"{os.getcwd()}/", ""), (os.getcwd(), "."), (f"{Path(sys.executable).parent}/", "")):
        output = output.replace(path, shown)
    return code, output


def _run_command(words: str) -> tuple[int, str]:
    if words.startswith("make "):
        words = _recipe(words.split()[1])
    words = words.replace("\\\n", " ")
    parts = shlex.split(words, comments=True)
    if parts[0] == "autoddl" and not _SHELL & set(words) and (parts[1] != "launch" or "--dry-run" in parts):
        output = io.StringIO()
        if parts[1] == "train":  # on ranks that other tests use, too, and that have another current folder
            parts = [os.path.abspath(part) if ".py:" in part else part for part in parts]
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            return main(parts[1:]), output.getvalue()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(
        ["bash", "-c", words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, "PATH": path},
    )
    return done.returncode, done.stdout


def _recipe(target: str) -> str:
    """What ``make TARGET`` runs at last."""
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").split("\n")
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"{target}:"))
    recipe = [line.strip() for line in lines[begin + 1 : lines.index("", begin)]]
    return recipe[-1].lstrip("@").replace(".venv/bin/", "")


def _run_single(source: str, name: str, names: dict[str, Any]) -> None:
    """Run a statement as Python's prompt does."""
    tree = ast.parse(source)
    compiled = code.compile_command(source, name, "single") if len(tree.body) == 1 else compile(source, name, "exec")
    shown = sys.displayhook
    sys.displayhook = lambda value: None if value is None else print(repr(value))
    try:
        exec(compiled or compile(source + "\n", name, "single"), names)
    finally:
        sys.displayhook = shown


def _difference(where: str, expected: Sequence[str], printed: Sequence[str]) -> str:
    wanted, got = [shape(line) for line in expected], [shape(line) for line in printed]
    lines = []
    if _ELIDED not in [line.strip() for line in expected]:
        import difflib

        lines = ["", "Shapes:", *difflib.unified_diff(wanted, got, "the page", "printed", lineterm="", n=1)]
    return "\n".join([f"{where}: the output has another shape. Printed:", *printed[:400], *lines])
