"""Texts as data: sections of lines, tables and grids, which are laid out at full width or for a terminal.

At full width (a file, a pipe) nothing is left out.  For a terminal, no line is longer than its width.  A table that is too wide is
fitted in three steps, until it is narrow enough:

1. Cells of sentences (``wraps``) and headings are broken over several lines.
2. Columns are left out in descending order of their ``rank``, and from right to left within a rank.  Columns of rank 0 stay.  A
   line below the table names the columns that were left out.
3. Long names are shortened in the middle: ``h.*.at..s.0 x 48``.

Lines of text are broken between words.  The text for a terminal of less than `NARROWEST` columns is `NARROWEST` columns wide.
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

#: Smallest width that texts are laid out for [columns of a terminal].
NARROWEST = 40
#: Smallest width of a column of sentences before other columns are left out [columns of a terminal].
_MIN_SENTENCE = 24
#: Smallest width of a shortened name [columns of a terminal].
_MIN_NAME = 8
#: Spaces at which lines may be broken: not those between a number and its unit.
_BREAKS = re.compile(r" +(?!(?:[mun]?s|[KMGT]iB|B)\b)")


@dataclass(frozen=True)
class Column(Generic[Item]):
    """A column of a table.

    Attributes:
        heading: the heading; may be empty.
        cell: returns the text of an item's cell; not needed if the table is made from rows.
        right: whether the cells are aligned to the right, as numbers are.
        rank: 0 for a column that is always shown; columns of higher rank are left out first.
        name: name of the column in the line that lists the columns left out; the heading if empty.
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
        """The name of the column in a line of text."""
        return self.name or self.heading


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings.  If all headings are empty, there is no line of headings.

    Attributes:
        columns: the columns, from left to right.
        rows: the cells of each row, one for each column.
        indent: text in front of every line.
        gap: number of spaces between columns.
    """

    columns: tuple[Column[Any], ...]
    rows: tuple[tuple[str, ...], ...]
    indent: str = "  "
    gap: int = 2

    @classmethod
    def of(cls, columns: Sequence[Column[Item]], items: Iterable[Item], indent: str = "  ") -> Table:
        """Make a table with one row for each item; the columns' functions ``cell`` make the cells.

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
        """Positions of the columns that may be left out, in the order in which they are."""
        ranked = [i for i, column in enumerate(self.columns) if column.rank]
        return tuple(sorted(ranked, key=lambda i: (self.columns[i].rank, i), reverse=True))

    def replaced(self, replace: Callable[[str], str]) -> Table:
        """Return the table with ``replace`` applied to every cell."""
        return dataclasses.replace(self, rows=tuple(tuple(map(replace, row)) for row in self.rows))

    def lines(self, width: int | None = None, remedy: str = "") -> list[str]:
        """Return the lines of the table, and a line that names the columns left out, if any.

        Args:
            width: largest length of a line; None for no limit.
            remedy: how to see the columns that are left out, for the line that names them.
        """
        fit = _Fit(self, width)
        lines = fit.heading()
        for row in self.rows:
            lines += fit.row(row)
        if fit.left_out:
            remark = f"left out: {', '.join(fit.left_out)}{remedy and f' ({remedy})'}"
            lines += _broken(f"{self.indent}{remark}", width)
        return lines


@dataclass(frozen=True)
class Grid:
    """Rows of equally wide cells, one cell for each unit of time.  Rows longer than a line are cut into parts, one below another.

    Attributes:
        rows: name and cells of each row; all names are equally long.
    """

    rows: tuple[tuple[str, Sequence[str]], ...]

    def lines(self, width: int | None = None) -> list[str]:
        """Return a line for each row, in parts of at most ``width`` columns, with an empty line between parts."""
        name_width, cell_width = 0, 1
        if self.rows:
            name, cells = self.rows[0]
            name_width, cell_width = len(name) + 2, len((cells or [""])[0]) + 1
        num_cells = max((len(cells) for _, cells in self.rows), default=0)
        cells_per_part = max(1, num_cells if width is None else (width + 1 - name_width) // cell_width)
        lines: list[str] = []
        for first in range(0, max(num_cells, 1), cells_per_part):
            lines += [""] if first else []
            lines += [
                f"{name}  {' '.join(cells[first : first + cells_per_part])}".rstrip() for name, cells in self.rows
            ]
        return lines


#: A line of text, a table, or a grid.
Block = Union[str, Table, Grid]
#: Blocks that belong together; a text separates its sections by an empty line.
Section = Sequence[Block]


@dataclass(frozen=True)
class Text:
    """Sections of lines, tables and grids; ``str()`` returns the text at full width."""

    sections: tuple[Section, ...]

    def __str__(self) -> str:
        return self.fitted(None)

    def replaced(self, replace: Callable[[str], str]) -> Text:
        """Return the text with ``replace`` applied to every line and to every cell of its tables, not to its grids."""

        def replaced_block(block: Block) -> Block:
            if isinstance(block, str):
                return replace(block)
            return block.replaced(replace) if isinstance(block, Table) else block

        return Text(tuple([replaced_block(block) for block in section] for section in self.sections))

    def fitted(self, width: int | None, remedy: str = "") -> str:
        """Return the text with no line longer than ``width``.

        Args:
            width: width of the terminal, at least `NARROWEST`; None for no limit.
            remedy: how to see the columns that are left out, for the line that names them.
        """
        width = None if width is None else max(width, NARROWEST)
        return "\n\n".join(
            "\n".join(line for block in section for line in _lines(block, width, remedy))
            for section in self.sections
            if section
        )


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table with a line for each (name, value)."""
    cells = tuple((name.ljust(18), value) for name, value in rows)
    return Table((Column(), Column(wraps=True)), cells, indent="", gap=1)


def _lines(block: Block, width: int | None, remedy: str) -> list[str]:
    if isinstance(block, str):
        return _broken(block, width)
    return block.lines(width, remedy) if isinstance(block, Table) else block.lines(width)


def _broken(line: str, width: int | None) -> list[str]:
    """The line in pieces of at most ``width``; all but the first are indented by two more spaces."""
    if width is None or _length(line) <= width:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    return _wrapped(line.strip(), width - len(indent), "  ", indent)


def _wrapped(text: str, width: int, hang: str = "", indent: str = "") -> list[str]:
    """The words in lines of at most ``width`` plus the indent; all lines but the first begin with ``hang`` too."""
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
        while _length(line) > width:  # a single long word, such as a path
            cut = _cut(line, width)
            lines.append(line[:cut])
            line = hang + line[cut:]
    return [indent + each for each in [*lines, line]]


def _length(text: str) -> int:
    """Columns that the text takes on a terminal: two for a wide East Asian character, none for a combining character."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in ("W", "F") else 1 for c in text
    )


def _cut(text: str, width: int) -> int:
    """The number of characters of the text that fit in ``width``, at least 1."""
    count = min(len(text), width)
    while count > 1 and _length(text[:count]) > width:
        count -= 1
    return count


def _shortened(text: str, width: int) -> str:
    """The text, its middle replaced by ``..`` if it is longer than ``width``."""
    if _length(text) <= width:
        return text
    tail = (width - 2) // 2
    head = width - 2 - tail
    return text[: _cut(text, head)] + ".." + text[::-1][: _cut(text[::-1], tail)][::-1]


# ---- Widths of columns -------------------------------------------------------------------------------------------------------


class _Fit:
    """The columns of a table that fit in a width (see the module's docstring), and the lines made of them.

    Attributes:
        shown: positions of the columns that are shown.
        widths: width of every column of the table, by position.
        left_out: names of the columns that are not shown.
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
        # Break sentences and headings, then leave columns out, then shorten names.
        narrow = [_narrowest(column, cell) for column, cell in zip(table.columns, cells)]
        leaving = iter(table.leaving)
        while (excess := self._total(self.shown, narrow) - width) > 0:
            if len(self.shown) > 1 and (column := next(leaving, None)) is not None:
                self.shown.remove(column)
            elif self._shorten(narrow, excess):
                pass
            elif len(self.shown) > 1:
                self.shown.pop()  # a column of rank 0: the last resort
            else:
                narrow[self.shown[0]] -= excess
        self.left_out = tuple(column.label for i, column in enumerate(table.columns) if i not in self.shown)
        # Widen columns by the space that remains: sentences first, then the others, from left to right.
        spare = -excess
        for i in sorted(self.shown, key=lambda i: (not table.columns[i].wraps, i)):
            growth = min(spare, whole[i] - narrow[i])
            narrow[i] += growth
            spare -= growth
        self.widths = narrow

    def _total(self, shown: Sequence[int], widths: Sequence[int]) -> int:
        """Length of a line with these columns."""
        return len(self.table.indent) + sum(widths[i] for i in shown) + self.table.gap * (len(shown) - 1)

    def _shorten(self, widths: list[int], excess: int) -> bool:
        """Narrow the widest column of names, down to the second widest or by ``excess``; False if all have their smallest width."""
        names = [i for i in self.shown if not self.table.columns[i].right and widths[i] > _MIN_NAME]
        if not names:
            return False
        widest = max(names, key=lambda i: widths[i])
        others = [widths[i] for i in names if i != widest]
        floor = max(_MIN_NAME, min(widths[widest] - 1, max(others, default=0)))
        widths[widest] = max(floor, widths[widest] - excess)
        return True

    def heading(self) -> list[str]:
        """The lines of the headings, aligned at the bottom; no lines if all headings are empty."""
        columns = self.table.columns
        if not any(columns[i].heading for i in self.shown):
            return []
        headings = [_wrapped(columns[i].heading, max(1, self.widths[i])) for i in self.shown]
        height = max(map(len, headings))
        cells = [[""] * (height - len(heading)) + heading for heading in headings]
        return [self._line(cells, number) for number in range(height)]

    def row(self, cells: Sequence[str]) -> list[str]:
        """The lines of a row."""
        broken = []
        for i in self.shown:
            cell, width = cells[i], self.widths[i]
            if _length(cell) <= width:
                broken.append([cell])
            elif self.table.columns[i].wraps:
                broken.append(_wrapped(cell, width))
            else:
                broken.append([_shortened(cell, width)])
        return [self._line(broken, number) for number in range(max(map(len, broken), default=0))]

    def _line(self, cells: Sequence[Sequence[str]], number: int) -> str:
        """Line ``number`` of a row, whose cells are broken over several lines."""
        padded = []
        for i, cell in zip(self.shown, cells):
            text = cell[number] if number < len(cell) else ""
            space = " " * (self.widths[i] - _length(text))
            padded.append(space + text if self.table.columns[i].right else text + space)
        return (self.table.indent + (" " * self.table.gap).join(padded)).rstrip()


def _narrowest(column: Column[Any], cell_width: int) -> int:
    """The smallest width of a column before others are left out: that of its widest cell and of the longest word of its heading.

    A cell of sentences needs only a part of its width.
    """
    word = max(map(_length, column.heading.split()), default=0)
    return max(word, min(cell_width, _MIN_SENTENCE) if column.wraps else cell_width)
