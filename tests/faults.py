"""The table of docs/faults.md: one row for each test that is marked as the test of a fault.

    @pytest.mark.fault("launch", "a rank is killed", "all ranks are ended; the message names the rank and its log", exit_code=1)
    def test_one_rank_fails(...): ...

``make faults`` runs these tests and writes the table. The seconds are those of the test's call; a test that does more than to
cause the fault and wait for its end tells them itself: ``record_property("seconds", 1.5)``.  `test_faults_page.py` compares the
page with the marks, all but the seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["AREAS", "PAGE", "Fault", "faults_in", "page_with", "rows_of"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "faults.md"
#: The page's sections, in their order.
AREAS = ("launch", "training", "search", "documents", "input", "output")
_BEGIN, _END = "<!-- make faults: begin -->\n", "<!-- make faults: end -->\n"
_HEAD = "| fault | what happens | seconds | exit code | test |\n|---|---|---|---|---|\n"


@dataclass(frozen=True)
class Fault:
    """A row: a fault, what happens then, the exit code (None where no command runs, or several), and the test that shows it."""

    area: str
    fault: str
    outcome: str
    exit_code: int | str | None
    test: str

    def row(self, seconds: float | None) -> str:
        """The row of the table."""
        shown = "" if seconds is None else f"{seconds:.1f}"
        code = "" if self.exit_code is None else self.exit_code
        return f"| {self.fault} | {self.outcome} | {shown} | {code} | `{self.test}` |"


def of_mark(arguments: tuple, keywords: dict, test: str) -> Fault:
    """The fault of a mark; a TypeError where the mark is malformed."""

    def fault(area: str, fault: str, outcome: str, *, exit_code: int | str | None = None) -> Fault:
        assert area in AREAS, f"{test}: area {area!r} of its fault is none of {AREAS}"
        return Fault(area, fault, outcome, exit_code, test)

    return fault(*arguments, **keywords)


def faults_in(folder: Path) -> Iterator[Fault]:
    """The faults of all tests below a folder, read from the sources: nothing is imported."""
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in mark.keywords}
                    test = f"{path.relative_to(folder.parent).as_posix()}::{node.name}"
                    yield of_mark(tuple(map(ast.literal_eval, mark.args)), keywords, test)


def rows_of(page: str) -> set[str]:
    """The rows of the page's tables, without their seconds."""
    table = page.partition(_BEGIN)[2].partition(_END)[0]
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {" | ".join([*row[:2], *row[3:]]) for row in rows if row[0] != "| fault"}


def page_with(page: str, measured: Iterable[tuple[Fault, float | None]]) -> str:
    """The page with its tables written anew."""
    found = sorted(measured, key=lambda each: each[0].test)
    tables = []
    for area in AREAS:
        rows = [fault.row(seconds) for fault, seconds in found if fault.area == area]
        if rows:
            tables.append(f"### {area.capitalize()}\n\n{_HEAD}" + "\n".join(rows) + "\n")
    before, begin, rest = page.partition(_BEGIN)
    return before + begin + "\n" + "\n".join(tables) + "\n" + _END + rest.partition(_END)[2]
