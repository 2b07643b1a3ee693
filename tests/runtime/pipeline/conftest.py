from __future__ import annotations

from pathlib import Path

import pytest

from .thread_ranks import Job


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 2 and 4."""
    directory = tmp_path / "saved"
    job = Job()
    assert [job.save(directory, step) for step in (2, 4)] == ["", ""]
    assert sorted(path.name for path in directory.iterdir()) == ["step-00000002", "step-00000004"]
    assert job.restore(directory) == 4 and job.warnings == []
    return directory
