"""Runs the doctests of one name of the face: ``python doctests.py NAME``; exit code 1 where one fails."""

from __future__ import annotations

import doctest
import sys

import autoddl

__all__ = ["examples_of", "failures_of"]

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def examples_of(name: str) -> list[doctest.DocTest]:
    """The doctests of a function, or of a class and its methods."""
    found = doctest.DocTestFinder(exclude_empty=True).find(getattr(autoddl, name), name)
    return [test for test in found if test.examples]


def failures_of(name: str) -> str:
    """What goes wrong in the doctests of a name; empty where they pass."""
    said: list[str] = []
    for test in examples_of(name):
        doctest.DocTestRunner(optionflags=OPTIONS).run(test, out=said.append)
    return "".join(said)


if __name__ == "__main__":
    failed = failures_of(sys.argv[1])
    print(failed)
    sys.exit(bool(failed))
