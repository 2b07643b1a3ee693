"""Slurm's compact lists of hosts."""

from __future__ import annotations

import re

from autoddl.costmodel.errors import UserError, quote
from autoddl.costmodel.limits import MAX_DIGITS, MAX_HOSTS

__all__ = ["expand_nodelist"]

_PART = re.compile(r"((?:[^,\[\]]|\[[^\[\]]*\])+)(?:,|$)")
_RANGE = re.compile(rf"([0-9]{{1,{MAX_DIGITS}}})(?:-([0-9]{{1,{MAX_DIGITS}}}))?")


def expand_nodelist(text: str) -> list[str]:
    """The hosts of a list, in order; leading zeros are kept.

    >>> expand_nodelist("gpu[01-03,7],login")
    ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login']

    Raises:
        UserError: the list is malformed, or names too many hosts.
    """
    hosts: list[str] = []
    at = 0
    while at < len(text):
        match = _PART.match(text, at)
        if match is None:
            raise UserError(f"list of hosts {quote(text)} cannot be read; it should be like node[01-04,7]")
        hosts += _expand(match[1], text, MAX_HOSTS - len(hosts))
        at = match.end()
    if not hosts:
        raise UserError("the list of hosts is empty")
    return hosts


def _expand(part: str, text: str, most: int) -> list[str]:
    """The hosts of a part of the list. They are counted before they are created, to keep to ``most``."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        if most < 1:
            raise _too_many(text)
        return [part]
    inside, _, after = rest.partition("]")
    tails = _expand(after, text, most) if after else [""]
    names: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise UserError(
                f"list of hosts {quote(text)}: {quote(piece)} should be a number or a range of numbers of at most "
                f"{MAX_DIGITS} digits"
            )
        first, last = match[1], match[2] or match[1]
        numbers = range(int(first), int(last) + 1)
        if int(last) - int(first) >= most or len(names) + len(numbers) * len(tails) > most:
            raise _too_many(text)
        names += [before + str(number).zfill(len(first)) + tail for number in numbers for tail in tails]
    return names


def _too_many(text: str) -> UserError:
    return UserError(f"list of hosts {quote(text)} names more than {MAX_HOSTS:,} hosts")
