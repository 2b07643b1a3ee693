"""Slurm's short form of lists of hosts: ``gpu[01-03,7],login`` is gpu01, gpu02, gpu03, gpu7, login."""

from __future__ import annotations

import re

from autoddl.costmodel.errors import UserError

__all__ = ["expand_nodelist"]

_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a list, in order; leading zeros stay.

    Raises:
        UserError: it is not such a list.
    """
    hosts: list[str] = []
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise UserError(f"list of hosts {text!r} cannot be read; it should be like node[01-04,7]")
        hosts += _expand(match[1], text)
        at = match.end()
    if not hosts:
        raise UserError("the list of hosts is empty")
    return hosts


def _expand(part: str, text: str) -> list[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, after = rest.partition("]")
    names = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise UserError(f"list of hosts {text!r}: {piece!r} should be a number or a range of numbers")
        first, last = match[1], match[2] or match[1]
        numbers = (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))
        names += (
            [before + number + tail for number in numbers for tail in _expand(after, text)]
            if after
            else [before + number for number in numbers]
        )
    return names
