"""The doctests of `costmodel`, `search` and `calib`."""

import doctest
import importlib
from pathlib import Path

import pytest

import autoddl.calib
import autoddl.costmodel
import autoddl.search

OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
#: Only modules with doctests are imported: some of the others import OneFlow.
MODULES = [
    ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts))
    for package in (autoddl.costmodel, autoddl.search, autoddl.calib)
    for folder in map(Path, package.__path__)
    for path in sorted(folder.rglob("*.py"))
    if ">>> " in path.read_text()
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert result.attempted and not result.failed
