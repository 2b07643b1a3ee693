"""Builds the statements of a method, and breaks long statements into several lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .source import comment

__all__ = ["StatementChain", "folded", "indented"]

#: Most characters of a line, before it is indented as a line of a method.
_MAX_LINE_CHARACTERS = 110


class StatementChain:
    """A sequence of statements in which each uses the result of the previous one.

    Args:
        current: expression of the value that the first statement uses.
        variable: name of the variable that results are assigned to.

    Attributes:
        current: expression of the present result.

    >>> chain = StatementChain("inputs").assign("matmul({x}, weight)").assign("{x} + bias", remark="in place")
    >>> chain.lines_ending_in("y")
    ['x = matmul(inputs, weight)', 'y = x + bias  # in place']
    """

    def __init__(self, current: str, variable: str = "x"):
        self.current = current
        self.variable = variable
        self._lines: list[tuple[str, str]] = []

    def assign(self, expression: str, remark: str = "") -> StatementChain:
        """Append ``x = expression``; ``{x}`` in the expression stands for the present result."""
        self._lines.append((f"{self.variable} = {expression.replace('{x}', self.current)}", remark))
        self.current = self.variable
        return self

    def add(self, statement: str, remark: str = "") -> StatementChain:
        """Append a statement that does not change the result; ``{x}`` in it stands for the present result."""
        self._lines.append((statement.replace("{x}", self.current), remark))
        return self

    def define(self, name: str, parameters: str, body: StatementChain) -> StatementChain:
        """Append the definition of a function that returns the result of ``body``, with empty lines around it."""
        self._lines += [("", ""), (f"def {name}({parameters}):", "")]
        self._lines += [(f"    {line}" if line else "", remark) for line, remark in body._lines]
        self._lines += [(f"    return {body.current}", ""), ("", "")]
        return self

    def lines_ending_in(self, variable: str) -> list[str]:
        """Return the lines of the statements; the final result is assigned to ``variable``."""
        lines = list(self._lines)
        if self.current != variable:
            last, remark = lines[-1] if lines else ("", "")
            prefix = f"{self.variable} = "
            if last.startswith(prefix):
                lines[-1] = (f"{variable} = {last[len(prefix) :]}", remark)
            else:
                lines.append((f"{variable} = {self.current}", ""))
        return [part for line, remark in lines for part in _with_remark(line, remark)]


def _with_remark(line: str, remark: str) -> list[str]:
    """Return the lines of a statement and its remark: the remark follows the statement, or stands above if the line is too long."""
    note, margin = comment(remark) if remark else "", line[: len(line) - len(line.lstrip())]
    if len(line) + (2 + len(note) if note else 0) <= _MAX_LINE_CHARACTERS:
        return [f"{line}  {note}" if note else line]
    above = [margin + note] if note else []
    return above + folded(line, margin)


def folded(line: str, margin: str = "") -> list[str]:
    """Return the lines of a statement; if it is too long and ends in a call, the arguments stand on lines of their own.

    Args:
        line: the statement.
        margin: its indentation.
    """
    return _folded_at(line.find("(", line.find(" = ")), line, margin)


def _folded_at(opening: int, line: str, margin: str) -> list[str]:
    """Return the lines of a statement whose call has its opening parenthesis at the index ``opening``; -1 if there is no call."""
    if len(line) <= _MAX_LINE_CHARACTERS or opening < 0:
        return [line]
    # Find the closing parenthesis, and the commas between the arguments.
    depth, commas, closing = 0, [], 0
    for index in _indices_outside_strings(line, opening):
        depth += (line[index] in "([{") - (line[index] in ")]}")
        if line[index] == "," and depth == 1:
            commas.append(index)
        if depth == 0:
            closing = index
            break
    if closing != len(line) - 1:
        return [line]  # something follows the call
    starts, ends = [opening, *commas], [*commas, closing]
    arguments = [line[start + 1 : end].strip() for start, end in zip(starts, ends)]
    inner_margin = f"{margin}    "
    body = [f"{inner_margin}{', '.join(arguments)}"]
    if len(body[0]) > _MAX_LINE_CHARACTERS:
        body = [part for argument in arguments for part in _argument_lines(argument, inner_margin)]
    return [line[: opening + 1], *body, f"{margin})"]


def _argument_lines(text: str, margin: str) -> list[str]:
    call = re.match(r"[\w.]+\(", text)
    lines = _folded_at(len(margin) + call.end() - 1 if call else -1, f"{margin}{text}", margin)
    return [*lines[:-1], f"{lines[-1]},"]


def _indices_outside_strings(line: str, start: int) -> Iterator[int]:
    """Yield the indices of a line, from ``start`` on, that are not inside of string literals."""
    quote, i = "", start
    while i < len(line):
        if quote:
            if line[i] == "\\":
                i += 1  # an escaped character does not end the string
            elif line[i] == quote:
                quote = ""
        elif line[i] in "\"'":
            quote = line[i]
        else:
            yield i
        i += 1


def indented(lines: list[str], by: int = 8) -> list[str]:
    """Indent lines by a number of spaces; empty lines stay empty."""
    return [" " * by + line if line else "" for line in lines]
