"""The doctests of `pipelines`, `extraction`, `launching`, `verification` and `zoo`."""

import doctest
import importlib
from pathlib import Path

import pytest

import autoddl.extraction
import autoddl.launching
import autoddl.pipelines
import autoddl.verification
import autoddl.zoo

#: Its doctest imports OneFlow, which no process of the tests should hold.
NEEDS_ONEFLOW = "autoddl.pipelines.runtime.load"
MODULES = [
    name
    for package in (autoddl.pipelines, autoddl.extraction, autoddl.launching, autoddl.verification, autoddl.zoo)
    for folder in map(Path, package.__path__)
    for path in sorted(folder.rglob("*.py"))
    for name in [
        ".".join((package.__name__, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
    ]
    if ">>> " in path.read_text() and name != NEEDS_ONEFLOW
]


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
