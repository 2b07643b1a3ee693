"""How tests are shared among the workers of pytest-xdist: those that start ranks as two streams, all others as they come.

Tests of ranks form units of work, of which a worker takes the whole, in order. So what they share, pools or hosts, is started once,
and pools do not get into each other's way: while OneFlow waits it spins, which costs as much as work. There are two such units,
because a launch mostly waits for processes to start and to end:

- ``ranks``: tests of what ranks compute (the mark ``ranks``, and the fixtures of `sharedranks`);
- ``launches``: tests of how jobs start and end (the mark ``ranks("launches")``).

Other tests that use a fixture of their module form a unit of that module, so that no two workers compute what they share.

The process that shares the tests out knows their names alone. So every worker leaves the units' tests in a file.
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
        if _FIXTURES & set(getattr(item, "fixturenames", ())) and not item.get_closest_marker("ranks"):
            item.add_marker("ranks")


def tell_units(items: list[pytest.Item], folder: Path, worker: str) -> None:
    """In a worker: leave the unit of each test that belongs to one."""
    units = {item.nodeid: unit for item in items if (unit := _unit_of(item))}
    own = folder / f"{worker}.{_FILE}"
    own.write_text(json.dumps(units), encoding="utf-8")
    os.replace(own, folder / _FILE)  # all workers write the same


def _unit_of(item: pytest.Item) -> str | None:
    if mark := item.get_closest_marker("ranks"):
        return next(iter(mark.args), "ranks")
    known = getattr(item, "_fixtureinfo", None)
    definitions = known.name2fixturedefs.values() if known else ()
    shares = any(definition.scope == "module" for same in definitions for definition in same)
    return item.nodeid.partition("::")[0] if shares else None


class Scheduling(LoadScopeScheduling):
    """The units, largest first: those of ranks, and those of modules; every other test is a unit of its own.

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
