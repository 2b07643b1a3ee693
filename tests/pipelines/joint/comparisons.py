"""Joint searches without the families of schedules that their plans are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

__all__ = ["without_rivals"]


@contextlib.contextmanager
def without_rivals() -> Iterator[None]:
    """Meanwhile joint plans come without rivals, which take a third of their time: for tests that judge the best plan alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("autoddl.pipelines.joint.planner.plan_rivals", lambda *_: ())
        yield
