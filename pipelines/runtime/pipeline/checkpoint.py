"""Checkpoints: what training needs to go on, by the names of parameters, so that it can go on with another schedule.

    DIRECTORY/step-00000120/rank-0.npz, rank-2.npz, ...    each parameter with its optimizer's state, by the first rank that has it
    DIRECTORY/step-00000120/checkpoint.json                written last: without it the folder is no checkpoint

Every file is written under another name first and renamed then, so that a job that is killed at any moment leaves the checkpoint
before this one whole. Old ones are removed once the new one is complete.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autoddl.costmodel.documents import load_document
from autoddl.costmodel.errors import UserError
from autoddl.costmodel.writing import write_document

__all__ = ["Checkpoint", "Entry", "find_checkpoint", "write_complete", "write_part"]

_FORMAT, _VERSION = "autoddl-checkpoint", 1
_MANIFEST = "checkpoint.json"
_KEPT = 2

Entry = dict[str, np.ndarray]
"""Of a parameter: its value, under ``value``, and what the optimizer keeps for it (and for all: scalars), by names of its own."""


def _folder(directory: Path, num_updates: int) -> Path:
    return directory / f"step-{num_updates:08d}"


def write_part(directory: Path, num_updates: int, rank: int, entries: Mapping[str, Entry]) -> None:
    """Write one rank's part; nothing where it has no entries."""
    if not entries:
        return
    folder = _folder(directory, num_updates)
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"rank-{rank}.npz", folder / f".rank-{rank}.part"
    with open(part, "wb") as file:
        np.savez(file, **{f"{name}/{key}": value for name, entry in entries.items() for key, value in entry.items()})
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def write_complete(
    directory: Path, num_updates: int, num_micro_batches: int, schedule: str, writers: Iterable[int]
) -> None:
    """Declare a checkpoint complete, the parts of all ``writers`` being there, and remove old ones; one rank calls."""
    folder = _folder(directory, num_updates)
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "num_updates": num_updates,
        "num_micro_batches": num_micro_batches,
        "schedule": schedule,
        "files": [f"rank-{rank}.npz" for rank in sorted(writers)],
    }
    write_document(folder / _MANIFEST, document)
    complete = sorted(path.parent for path in directory.glob(f"step-*/{_MANIFEST}"))
    for old in complete[:-_KEPT]:
        (old / _MANIFEST).unlink()  # first: what is half removed is no checkpoint
        shutil.rmtree(old, ignore_errors=True)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    num_updates: int
    num_micro_batches: int
    files: tuple[str, ...]

    def read(self, names: set[str]) -> dict[str, Entry]:
        """The entries of some parameters.

        Raises:
            UserError: there is none of that name.
        """
        entries: dict[str, Entry] = {}
        for file in self.files:
            with np.load(self.folder / file) as part:
                for key in part.files:
                    name, _, what = key.rpartition("/")
                    if name in names:
                        entries.setdefault(name, {})[what] = part[key]
        missing = sorted(names - set(entries))
        if missing:
            raise UserError(f"checkpoint {self.folder} has no parameter {missing[0]}; it is of another model")
        return entries


def find_checkpoint(directory: Path) -> Checkpoint | None:
    """The newest complete checkpoint in a directory; None where there is none."""
    manifests = sorted(directory.glob(f"step-*/{_MANIFEST}"))
    if not manifests:
        return None
    fields = load_document(manifests[-1], _FORMAT, _VERSION)
    return Checkpoint(
        manifests[-1].parent,
        fields.integer("num_updates"),
        fields.integer("num_micro_batches"),
        fields.texts("files"),
    )
