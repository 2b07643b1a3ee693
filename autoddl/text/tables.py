"""Texts of sections, their lines and their tables: data, laid out once, at full width or for a terminal.

At full width (a file, a pipe) nothing is left out.  For a terminal of a given width no line is longer than that:

1. Columns of sentences (``wraps``) and headings are broken over several lines.
2. Columns are left out, in descending order of their ``rank``, those of equal rank from the right; rank 0 is always shown.
   A line below the table names them.
3. Only where that is not enough, long names are shortened in their middle: ``h.*.at..s.0 x 48``.

Lines of text are broken between words.  Terminals of less than `NARROWEST` columns are taken for that wide.
"""

from __future__ import annotations

import dataclasses
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, Union

__all__ = ["NARROWEST", "Block", "Column", "Grid", "Section", "Table", "Text", "facts"]

Item = TypeVar("Item")

#: Terminals are taken for at least so wide [columns].
NARROWEST = 40
#: A column of sentences is not made narrower than that, nor a shortened name [characters].
_MIN_SENTENCE, _MIN_NAME = 24, 8
#: Where lines may be broken: not between a number and its unit.
_BREAKS = re.compile(r" +(?!(?:[mun]?s|[KMGT]iB|B)\b)")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table.

    Attributes:
        heading: what stands above it; may be empty.
        cell: the text of an item's cell; not needed where the table is given its rows.
        right: whether the cells are set flush right, as numbers are.
        rank: 0 for a column that is always shown; columns of higher rank are left out first.
        name: what the column is called where it is left out (the heading).
        wraps: whether the cells are sentences, which may be broken over several lines.
    """

    heading: str = ""
    cell: Callable[[Item], str] | None = None
    right: bool = False
    rank: int = 0
    name: str = ""
    wraps: bool = False

    @property
    def label(self) -> str:
        """What the column is called in a line of text."""
        return self.name or self.heading


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; without a line of headings where all of them are empty.

    Attributes:
        rows: of as many cells as there are columns.
        indent: in front of every line.
        gap: spaces between columns.
    """

    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[str, ...], ...]
    indent: str = "  "
    gap: int = 2

    @classmethod
    def of(cls, columns: Sequence[Column[Item]], items: Iterable[Item], indent: str = "  ") -> Table:
        """A row for each item, its cells by the columns' functions.

        >>> columns = (Column("layer", str), Column("length", lambda name: f"{len(name)}", right=True))
        >>> print("\\n".join(Table.of(columns, ["fc1", "head"]).lines()))
          layer  length
          fc1         3
          head        4
        """
        rows = tuple(tuple(column.cell(item) if column.cell else "" for column in columns) for item in items)
        return cls(tuple(columns), rows, indent)

    @property
    def leaving(self) -> tuple[int, ...]:
        """The positions of the columns that may be left out, the first to go first."""
        ranked = [i for i, column in enumerate(self.columns) if column.rank]
        return tuple(sorted(ranked, key=lambda i: (self.columns[i].rank, i), reverse=True))

    def replaced(self, replace: Callable[[str], str]) -> Table:
        """The table with its cells put through ``replace``."""
        return dataclasses.replace(self, rows=tuple(tuple(map(replace, row)) for row in self.rows))

    def lines(self, width: int | None = None, remedy: str = "") -> list[str]:
        """The table's lines, and the line that names the columns left out to fit into ``width``."""
        fit = _Fit(self, width)
        lines = fit.heading()
        for row in self.rows:
            lines += fit.row(row)
        if fit.left_out:
            said = f"left out: {', '.join(fit.left_out)}{remedy and f' ({remedy})'}"
            lines += _broken(f"{self.indent}{said}", width)
        return lines


@dataclass(frozen=True)
class Grid:
    """Rows of equally wide cells that follow each other in time; where they are longer than a line, one part below the other.

    Attributes:
        rows: names, all equally long, and cells.
    """

    rows: tuple[tuple[str, Sequence[str]], ...]

    def lines(self, width: int | None = None) -> list[str]:
        """A line for each row, or as many parts as it takes, with an empty line between them."""
        head, cell = (len(self.rows[0][0]) + 2, len((self.rows[0][1] or [""])[0]) + 1) if self.rows else (0, 1)
        count = max((len(cells) for _, cells in self.rows), default=0)
        step = max(1, count if width is None else (width + 1 - head) // cell)
        lines: list[str] = []
        for first in range(0, max(count, 1), step):
            lines += [""] if first else []
            lines += [f"{name}  {' '.join(cells[first : first + step])}".rstrip() for name, cells in self.rows]
        return lines


#: A line of text, a table, or a grid.
Block = Union[str, Table, Grid]
#: What stands together; sections are separated by an empty line.
Section = Sequence[Block]


@dataclass(frozen=True)
class Text:
    """Sections of lines and tables; ``str()`` is the text at full width."""

    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return self.fitted(None)

    def replaced(self, replace: Callable[[str], str]) -> Text:
        """The text with its lines, and the cells of its tables, put through ``replace``."""

        def of(block: Block) -> Block:
            if isinstance(block, str):
                return replace(block)
            return block.replaced(replace) if isinstance(block, Table) else block

        return Text(tuple([of(block) for block in section] for section in self.sections))

    def fitted(self, width: int | None, remedy: str = "") -> str:
        """The text with no line longer than ``width``; None for no limit.

        Args:
            remedy: how to see the columns that are left out, for the line that names them.
        """
        width = None if width is None else max(width, NARROWEST)
        return "\n\n".join(
            "\n".join(line for block in section for line in _lines(block, width, remedy))
            for section in self.sections
            if section
        )


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Names and values, a line each."""
    cells = tuple((name.ljust(18), value) for name, value in rows)
    return Table((Column(), Column(wraps=True)), cells, indent="", gap=1)


def _lines(block: Block, width: int | None, remedy: str) -> list[str]:
    if isinstance(block, str):
        return _broken(block, width)
    return block.lines(width, remedy) if isinstance(block, Table) else block.lines(width)


def _broken(line: str, width: int | None) -> list[str]:
    """The line in pieces of at most ``width``, all but the first indented by two more."""
    if width is None or _length(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return _wrapped(line.strip(), width - len(indent), "  ", indent)


def _wrapped(text: str, width: int, hang: str = "", indent: str = "") -> list[str]:
    """The words in lines of at most ``width`` (beside ``indent``), all but the first after ``hang``."""
    lines: list[str] = []
    line = ""
    for word in _BREAKS.split(text.strip()):
        longer = f"{line} {word}" if line else word
        if _length(longer) <= width:
            line = longer
            continue
        if line:
            lines.append(line)
        line = (hang if lines else "") + word
        while _length(line) > width:  # a path, a formula
            cut = _cut(line, width)
            lines.append(line[:cut])
            line = hang + line[cut:]
    return [indent + each for each in [*lines, line]]


def _length(text: str) -> int:
    """The columns that a terminal shows the text in: East Asian wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def _cut(text: str, width: int) -> int:
    """How many characters of the text fit into ``width``, at least one."""
    count = min(len(text), width)
    while count > 1 and _length(text[:count]) > width:
        count -= 1
    return count


def _shortened(text: str, width: int) -> str:
    """The text without its middle where it is longer than ``width``."""
    if _length(text) <= width:
        return text
    tail = (width - 2) // 2
    head = width - 2 - tail
    return text[: _cut(text, head)] + ".." + text[::-1][: _cut(text[::-1], tail)][::-1]


# ---- Widths of columns -------------------------------------------------------------------------------------------------------


class _Fit:
    """A table's columns that are shown, and their widths.

    Attributes:
        shown: their positions.
        widths: of those.
        left_out: names of the others.
    """

    def __init__(self, table: Table, width: int | None):
        self.table = table
        self.shown = list(range(len(table.columns)))
        cells = [max((_length(row[i]) for row in table.rows), default=0) for i in self.shown]
        whole = [max(cell, _length(column.heading)) for cell, column in zip(cells, table.columns)]
        self.widths = whole
        self.left_out: tuple[str, ...] = ()
        if width is None or self._total(self.shown, whole) <= width:
            return
        least = [_least(column, cell) for column, cell in zip(table.columns, cells)]
        leaving = iter(table.leaving)
        while (missing := self._total(self.shown, least) - width) > 0:
            if len(self.shown) > 1 and (column := next(leaving, None)) is not None:
                self.shown.remove(column)
            elif self._shorten(least, missing):
                pass
            elif len(self.shown) > 1:
                self.shown.pop()  # rank 0 too, rather than lines that are too long
            else:
                least[self.shown[0]] -= missing
        self.left_out = tuple(column.label for i, column in enumerate(table.columns) if i not in self.shown)
        spare = -missing
        # What is left goes to sentences first, then to headings, from the left.
        for i in sorted(self.shown, key=lambda i: (not table.columns[i].wraps, i)):
            grown = min(spare, whole[i] - least[i])
            least[i] += grown
            spare -= grown
        self.widths = least

    def _total(self, shown: Sequence[int], widths: Sequence[int]) -> int:
        return len(self.table.indent) + sum(widths[i] for i in shown) + self.table.gap * (len(shown) - 1)

    def _shorten(self, widths: list[int], missing: int) -> bool:
        """Take from the widest column of names, as far as the next one or as needed; False where none can give any more."""
        names = [i for i in self.shown if not self.table.columns[i].right and widths[i] > _MIN_NAME]
        if not names:
            return False
        widest = max(names, key=lambda i: widths[i])
        others = [widths[i] for i in names if i != widest]
        floor = max(_MIN_NAME, min(widths[widest] - 1, max(others, default=0)))
        widths[widest] = max(floor, widths[widest] - missing)
        return True

    def heading(self) -> list[str]:
        """The lines of headings, which stand on the last one; none where there are no headings."""
        columns = self.table.columns
        words = [_wrapped(columns[i].heading, max(1, self.widths[i])) for i in self.shown]
        height = max(map(len, words), default=0)
        lines = [self._line([[""] * (height - len(word)) + word for word in words], k) for k in range(height)]
        return lines if any(columns[i].heading for i in self.shown) else []

    def row(self, cells: Sequence[str]) -> list[str]:
        """The lines of a row."""
        parts = []
        for i in self.shown:
            width = self.widths[i]
            fits = _length(cells[i]) <= width
            parts.append(
                [cells[i]]
                if fits
                else _wrapped(cells[i], width)
                if self.table.columns[i].wraps
                else [_shortened(cells[i], width)]
            )
        return [self._line(parts, k) for k in range(max(map(len, parts), default=0))]

    def _line(self, parts: Sequence[Sequence[str]], number: int) -> str:
        cells = []
        for i, part in zip(self.shown, parts):
            text = part[number] if number < len(part) else ""
            space = " " * (self.widths[i] - _length(text))
            cells.append(space + text if self.table.columns[i].right else text + space)
        return (self.table.indent + (" " * self.table.gap).join(cells)).rstrip()


def _least(column: Column[Any], cells: int) -> int:
    """How narrow a column may be before others are left out: as its longest cell (part of a sentence) and word of the heading."""
    word = max(map(_length, column.heading.split()), default=0)
    return max(word, min(cells, _MIN_SENTENCE) if column.wraps else cells)
