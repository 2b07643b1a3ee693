"""How tests are shared among the workers of pytest-xdist: those that start ranks run one at a time, all others in parallel.

Tests of ranks form two units of work, of which a worker takes the whole, in order:

- those on the pools of ranks that the fixtures ``ranks`` and ``counted_ranks`` give, which are so started once;
- those with the mark ``ranks`` that start processes of their own. They spend most of their time on waiting for processes to start
  and to end, which leaves the cores to the others.

The process that shares the tests out knows their names alone. So every worker leaves the names of the units in a file.
(pytest-xdist's own way to name a unit, ``--dist loadgroup``, adds it to the tests' names; with pytest 9.2 it has no effect.)
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

__all__ = ["Scheduling", "mark_ranks", "tell_units"]

_FIXTURES = {"ranks", "counted_ranks"}
_FILE = "units.json"


def mark_ranks(items: list[pytest.Item]) -> None:
    """Mark the tests that use the fixtures of ranks."""
    for item in items:
        if _uses_pools(item):
            item.add_marker("ranks")


def _uses_pools(item: pytest.Item) -> bool:
    return bool(_FIXTURES & set(getattr(item, "fixturenames", ())))


def tell_units(items: list[pytest.Item], folder: Path, worker: str) -> None:
    """In a worker: leave the unit of each test that is run one at a time."""
    units = {
        item.nodeid: "pools" if _uses_pools(item) else "processes" for item in items if item.get_closest_marker("ranks")
    }
    own = folder / f"{worker}.{_FILE}"
    own.write_text(json.dumps(units), encoding="utf-8")
    os.replace(own, folder / _FILE)  # all workers write the same


class Scheduling(LoadScopeScheduling):
    """The two units of tests of ranks, which are begun first; every other test is a unit of its own.

    A test that ends its worker is not run again: pytest-xdist 3.8 gives the unit to the next worker with that test at its head, and
    a test that hangs would do so as often as workers may be replaced.

    Args:
        config, log: as pytest-xdist gives them.
        folder: where the workers leave the names.
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path):
        super().__init__(config, log)
        self._folder = folder
        self._units: dict[str, str] | None = None

    def _split_scope(self, nodeid: str) -> str:
        """The unit of a test."""
        if self._units is None:
            self._units = json.loads((self._folder / _FILE).read_text(encoding="utf-8"))
        return self._units.get(nodeid, nodeid)

    def remove_node(self, node: Any) -> str | None:
        """Take a worker's tests back; returns the one that it was running."""
        for unit in self.assigned_work[node].values():
            for nodeid, is_done in unit.items():
                if not is_done:
                    unit[nodeid] = True
                    super().remove_node(node)
                    return nodeid
        return super().remove_node(node)
