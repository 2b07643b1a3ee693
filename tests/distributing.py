"""How tests are shared among the workers of pytest-xdist: those that start ranks run one at a time, all others in parallel.

Tests of ranks form one unit of work, of which a worker takes the whole, in order. So the pools that they share are started once,
and ranks do not wait for ranks of another test: while OneFlow waits it spins, which costs as much as work.

The process that shares the tests out knows their names alone. So every worker leaves the names of the unit's tests in a file.
(pytest-xdist's own way to name a unit, ``--dist loadgroup``, adds it to the tests' names; with pytest 9.2 it has no effect.)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["Scheduling", "mark_ranks", "tell_unit"]

_FIXTURES = {"ranks", "counted_ranks"}
_FILE = "unit.json"
_UNIT = "ranks"


def mark_ranks(items: list[pytest.Item]) -> None:
    """Mark the tests that use the fixtures of ranks."""
    for item in items:
        if _FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("ranks")


def tell_unit(items: list[pytest.Item], folder: Path, worker: str) -> None:
    """In a worker: leave the names of the tests that are run one at a time."""
    own = folder / f"{worker}.{_FILE}"
    own.write_text(json.dumps([item.nodeid for item in items if item.get_closest_marker("ranks")]), encoding="utf-8")
    os.replace(own, folder / _FILE)  # all workers write the same


class Scheduling(LoadScopeScheduling):
    """The unit of tests of ranks, which is begun first; every other test is a unit of its own.

    A test that ends its worker is not run again: pytest-xdist 3.8 gives the unit to the next worker with that test at its head, and
    a test that hangs would do so as often as workers may be replaced.

    Args:
        config, log: as pytest-xdist gives them.
        folder: where the workers leave the names.
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path):
        super().__init__(config, log)
        self._folder = folder
        self._of_ranks: frozenset[str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        """The unit of a test."""
        if self._of_ranks is None:
            self._of_ranks = frozenset(json.loads((self._folder / _FILE).read_text(encoding="utf-8")))
        return _UNIT if nodeid in self._of_ranks else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Take a worker's tests back; returns the one that it was running."""
        for unit in self.assigned_work[node].values():
            for nodeid, is_done in unit.items():
                if not is_done:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return nodeid
        return super().remove_node(node)
