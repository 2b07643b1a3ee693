"""Functions in the making: statements whose current tensor is followed through."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .source import comment

__all__ = ["StatementChain", "folded", "indented"]

#: Of a line inside a method.
_WIDTH = 110


class StatementChain:
    """Statements of which each works on the result of the one before.

    Args:
        current: the expression that they begin with.
        variable: what results are called on the way.
    """

    def __init__(self, current: str, variable: str = "x"):
        self.current = current
        self.variable = variable
        self._lines: list[tuple[str, str]] = []

    def put(self, expression: str, remark: str = "") -> StatementChain:
        """``x = expression``, in which ``{x}`` is the result so far."""
        self._lines.append((f"{self.variable} = {expression.replace('{x}', self.current)}", remark))
        self.current = self.variable
        return self

    def say(self, statement: str, remark: str = "") -> StatementChain:
        """Another statement, in which ``{x}`` is the result so far."""
        self._lines.append((statement.replace("{x}", self.current), remark))
        return self

    def inner(self, name: str, parameters: str, body: StatementChain) -> StatementChain:
        """A function of ``x`` and parameters, whose result is the body's; with empty lines around."""
        self._lines += [("", ""), (f"def {name}({parameters}):", "")]
        self._lines += [(f"    {line}" if line else "", remark) for line, remark in body._lines]
        self._lines += [(f"    return {body.current}", ""), ("", "")]
        return self

    def ending_in(self, variable: str) -> list[str]:
        """The lines; the result is in ``variable``."""
        lines = list(self._lines)
        if self.current != variable:
            last = lines[-1] if lines else ("", "")
            begin = f"{self.variable} = "
            if last[0].startswith(begin):
                lines[-1] = (f"{variable} = {last[0][len(begin) :]}", last[1])
            else:
                lines.append((f"{variable} = {self.current}", ""))
        return [part for line, remark in lines for part in _laid_out(line, remark)]


def _laid_out(line: str, remark: str) -> list[str]:
    """A statement with its remark behind it, or above where that is too long; long calls with their arguments below."""
    note, margin = comment(remark) if remark else "", line[: len(line) - len(line.lstrip())]
    if len(line) + (2 + len(note) if note else 0) <= _WIDTH:
        return [f"{line}  {note}" if note else line]
    above = [margin + note] if note else []
    return above + folded(line, margin)


def folded(line: str, margin: str = "") -> list[str]:
    """A statement that is one call, with its arguments in lines of their own where it is too long."""
    return _folded_at(line.find("(", line.find(" = ")), line, margin)


def _folded_at(opening: int, line: str, margin: str) -> list[str]:
    """A statement whose call begins at ``opening``; -1 where it has none."""
    if len(line) <= _WIDTH or opening < 0:
        return [line]
    places = list(_outside_of_strings(line, opening))
    depth, commas, closing = 0, [], 0
    for place in places:
        depth += (line[place] in "([{") - (line[place] in ")]}")
        if line[place] == "," and depth == 1:
            commas.append(place)
        if depth == 0:
            closing = place
            break
    if closing != len(line) - 1:
        return [line]  # something follows the call
    starts, ends = [opening, *commas], [*commas, closing]
    arguments = [line[start + 1 : end].strip() for start, end in zip(starts, ends)]
    together = ", ".join(arguments)
    is_short = len(together) + len(margin) + 4 <= _WIDTH
    deeper = f"{margin}    "
    body = [f"{deeper}{together}"] if is_short else [part for one in arguments for part in _argument(one, deeper)]
    return [line[: opening + 1], *body, f"{margin})"]


def _argument(text: str, margin: str) -> list[str]:
    """An argument in lines of its own."""
    call = re.match(r"[\w.]+\(", text)
    lines = _folded_at(len(margin) + call.end() - 1 if call else -1, f"{margin}{text}", margin)
    return [*lines[:-1], f"{lines[-1]},"]


def _outside_of_strings(line: str, start: int) -> Iterator[int]:
    """The places from ``start`` on that are in no string literal."""
    quote, i = "", start
    while i < len(line):
        if quote:
            if line[i] == "\\":
                i += 1  # whatever comes next does not end the string
            elif line[i] == quote:
                quote = ""
        elif line[i] in "\"'":
            quote = line[i]
        else:
            yield i
        i += 1


def indented(lines: list[str], by: int = 8) -> list[str]:
    """Lines further right; empty ones stay so."""
    return [" " * by + line if line else "" for line in lines]
