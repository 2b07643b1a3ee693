"""Saving and restoring checkpoints by all ranks of a job together. Needs no OneFlow: how ranks exchange words is given.

**Restoring.** Rank 0 lists the checkpoints, the newest first, and tells the others; so all look at the same one at a time. Every
rank verifies a share of the parts and reads what it needs, then all tell each other what they found. The first checkpoint that is
whole for every rank is taken; a warning names each one that was passed over, with the reason. Where there are checkpoints and none
is whole, training does not begin anew in silence: that is a `UserError`. A checkpoint that is whole and of another model is one
too, and not passed over.

**Saving.** A checkpoint that cannot be written (the disk is full, say) does not end the training: all ranks learn of it, its files
are removed, those before it stay, the user is warned, and training goes on to the next checkpoint, which is tried as usual. `save`
returns False then. Whoever trains has to say so at the end if the last one failed: ``autoddl train`` prints its result, then the
path and the reason, and exits with 2.

In both, ranks wait for the slowest one, which the stall timeout of the job has to allow for.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoddl.costmodel.errors import UserError

from .checkpoint import (
    Checkpoint,
    DamagedError,
    Entry,
    Part,
    checkpoint_folder,
    checkpoints_in,
    discard_unfinished,
    open_checkpoint,
    unwritable,
    write_complete,
    write_part,
)

__all__ = ["Exchange", "Member", "Restored", "restore", "save", "warn_on_stderr"]

_SHOWN_REASONS = 3

Exchange = Callable[[str], "list[str]"]
"""Give a text, and get those of all ranks; all ranks of the job call."""


def warn_on_stderr(text: str) -> None:
    """Say a warning of one line."""
    sys.stderr.write(f"autoddl: warning: {' '.join(text.split())}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Member:
    """A rank of the job, with its ways to the other ranks and to the user.

    Attributes:
        rank, num_ranks: this one, and how many there are.
        exchange: see `Exchange`.
        warn: takes a warning of one line; called on rank 0 alone.
    """

    rank: int
    num_ranks: int
    exchange: Exchange
    warn: Callable[[str], None]

    def tell(self, value: Any) -> list[Any]:
        """What all ranks tell, in the order of ranks; all call."""
        return [json.loads(text) for text in self.exchange(json.dumps(value))]


@dataclass(frozen=True)
class Restored:
    """A checkpoint that all ranks have read."""

    checkpoint: Checkpoint
    entries: dict[str, Entry]
    """Those that this rank asked for."""
    damaged: tuple[Path, ...]
    """The newer ones that were passed over."""


@dataclass(frozen=True)
class _Seen:
    """What one rank made of a checkpoint: nothing is wrong, or it is damaged, or of another model."""

    hash: str = ""
    damage: str = ""
    misfit: str = ""


def restore(directory: Path, member: Member, shapes: Mapping[str, tuple[int, ...]]) -> Restored | None:
    """Read the newest whole checkpoint, on this rank the parameters of these shapes; None where there is none. All ranks call.

    Raises:
        UserError: on all ranks: none is whole, or the newest whole one is of another model.
    """
    listed = _listed(directory) if member.rank == 0 else {}
    listed = member.tell(listed)[0]
    if "error" in listed:
        raise UserError(listed["error"])
    damaged: dict[Path, str] = {}
    for name in listed["names"]:
        checkpoint, entries, seen = _look(directory / name, member, shapes)
        all_seen = [_Seen(*fields) for fields in member.tell([seen.hash, seen.damage, seen.misfit])]
        reason = _damage(all_seen)
        if reason:
            damaged[directory / name] = reason
            continue
        for of_rank in all_seen:
            if of_rank.misfit:
                raise UserError(of_rank.misfit)
        assert checkpoint is not None
        for folder, reason in damaged.items() if member.rank == 0 else ():
            member.warn(f"checkpoint {folder} is damaged and passed over: {reason}")
        return Restored(checkpoint, entries, tuple(damaged))
    if damaged:  # no warnings before: where ranks fail, the launcher need not get all that they reported
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in list(damaged.items())[:_SHOWN_REASONS])
        raise UserError(
            f"checkpoints {directory}: none of {len(damaged)} is whole ({reasons}); give another directory to begin anew"
        )
    return None


def _listed(directory: Path) -> dict[str, Any]:
    try:
        return {"names": [folder.name for _, folder in checkpoints_in(directory)]}
    except UserError as error:
        return {"error": str(error)}


def _look(
    folder: Path, member: Member, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Checkpoint | None, dict[str, Entry], _Seen]:
    """Verify this rank's share of a checkpoint's parts, and read what it needs."""
    try:
        checkpoint = open_checkpoint(folder)
        checkpoint.verify(checkpoint.parts[member.rank :: member.num_ranks])
        return checkpoint, checkpoint.read(shapes), _Seen(checkpoint.hash)
    except DamagedError as error:
        return None, {}, _Seen(damage=str(error)[:200])
    except UserError as error:
        return None, {}, _Seen(checkpoint.hash, misfit=str(error))


def _damage(seen: list[_Seen]) -> str:
    """What is wrong with a checkpoint by what all ranks saw of it; "" where nothing is."""
    for rank, of_rank in enumerate(seen):
        if of_rank.damage:
            is_everywhere = all(each.damage == of_rank.damage for each in seen)
            return of_rank.damage if is_everywhere else f"{of_rank.damage} (on rank {rank})"
    return "" if len({each.hash for each in seen}) == 1 else "its manifest is not the same for all ranks"


def save(
    directory: Path,
    member: Member,
    num_updates: int,
    num_micro_batches: int,
    schedule: str,
    entries: Mapping[str, Entry],
    damaged: set[Path],
) -> str:
    """Write a checkpoint, of which this rank has some entries; all ranks call.

    Args:
        damaged: those known not to be whole, which do not count when old ones are removed. The new one is taken out.

    Returns:
        why it could not be written; "" where it is complete.
    """
    part, failure = None, ""
    try:
        part = write_part(directory, num_updates, member.rank, entries)
    except OSError as error:
        failure = unwritable(error, directory)
    told = member.tell([failure, part and [part.name, part.num_bytes, part.sha256]])
    failures = [f"{text} (on rank {rank})" for rank, (text, _) in enumerate(told) if text]
    if member.rank == 0:
        failure = failures[0] if failures else ""
        if not failure:
            try:
                parts = [Part(*fields) for _, fields in told if fields]
                write_complete(directory, num_updates, num_micro_batches, schedule, parts, damaged)
            except OSError as error:
                failure = unwritable(error, directory)
        if failure:
            discard_unfinished(directory)
            member.warn(
                f"checkpoint of step {num_updates} cannot be written: {failure}; training goes on, and older ones are kept"
            )
    failure = member.tell(failure)[0]
    if not failure:
        damaged.discard(checkpoint_folder(directory, num_updates))
    return failure
