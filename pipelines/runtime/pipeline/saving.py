"""Saving and restoring checkpoints by all ranks of a job together. Needs no OneFlow: the caller provides the communication.

**Restoring.** Rank 0 lists the checkpoints, the newest first, and sends the list to the others, so that all ranks examine the same
one at a time. Every rank verifies a share of the parts and reads what it needs; then all ranks exchange their findings. The first
checkpoint that is intact for every rank is restored; a warning names each one that was skipped, with the reason. If there are
checkpoints and none is intact, training does not silently start from scratch: this is a `UserError`. So is an intact checkpoint of
another model, which is not skipped.

**Saving.** A checkpoint that cannot be written (because the disk is full, say) does not end the training: all ranks learn of it,
its files are removed, earlier ones are kept, the user is warned, and training continues to the next checkpoint, which is tried as
usual. `save` then returns the reason. The caller has to report at the end if the last one failed: ``autoddl train`` prints its
result, then the path and the reason, and exits with 2.

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
    CheckpointFile,
    DamagedError,
    Entry,
    checkpoint_folder,
    checkpoints_in,
    discard_unfinished,
    open_checkpoint,
    write_complete,
    write_error_message,
    write_part,
)

__all__ = ["GatherTexts", "Member", "Restored", "restore", "save", "warn_on_stderr"]

#: Most damaged checkpoints whose damage an error message describes.
_MAX_SHOWN_REASONS = 3

#: An all-gather of texts: returns the texts of all ranks, in rank order; all ranks of the job call it.
GatherTexts = Callable[[str], "list[str]"]


def warn_on_stderr(text: str) -> None:
    """Print a warning of one line on stderr."""
    sys.stderr.write(f"autoddl: warning: {' '.join(text.split())}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Member:
    """A rank of the job, with its communication.

    Attributes:
        rank: Number of this rank.
        num_ranks: Number of ranks in the job.
        gather_texts: All-gather of texts over the ranks.
        warn: Shows a warning of one line to the user; called on rank 0 only.
    """

    rank: int
    num_ranks: int
    gather_texts: GatherTexts
    warn: Callable[[str], None]

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, in rank order; all ranks call."""
        return [json.loads(text) for text in self.gather_texts(json.dumps(value))]


@dataclass(frozen=True)
class Restored:
    """A checkpoint that all ranks have read.

    Attributes:
        checkpoint: The checkpoint.
        entries: The parameters that this rank requested.
        damaged: Newer checkpoints that were skipped because they are damaged.
    """

    checkpoint: Checkpoint
    entries: dict[str, Entry]
    damaged: tuple[Path, ...]


@dataclass(frozen=True)
class _Finding:
    """One rank's finding about a checkpoint.

    Attributes:
        hash: Hash of the manifest; "" if the checkpoint is damaged.
        damage: Description of the damage; "" if there is none.
        mismatch: Description of the difference from the model; "" if there is none.
    """

    hash: str = ""
    damage: str = ""
    mismatch: str = ""


def restore(directory: Path, member: Member, shapes: Mapping[str, tuple[int, ...]]) -> Restored | None:
    """Read the newest intact checkpoint; all ranks call.

    Args:
        directory: Directory of the job's checkpoints.
        member: This rank.
        shapes: Names and shapes of the parameters that this rank needs.

    Returns:
        The checkpoint with these parameters; None if there is no checkpoint.

    Raises:
        UserError: None of the checkpoints is intact, or the newest intact one is of another model. It is raised on all ranks.
    """
    # Rank 0 lists the checkpoints for all ranks.
    listed = _list_checkpoints(directory) if member.rank == 0 else {}
    listed = member.gather(listed)[0]
    if "error" in listed:
        raise UserError(listed["error"])
    damaged: dict[Path, str] = {}
    for name in listed["names"]:
        checkpoint, entries, finding = _examine(directory / name, member, shapes)
        findings = [_Finding(*fields) for fields in member.gather([finding.hash, finding.damage, finding.mismatch])]
        reason = _damage(findings)
        if reason:
            damaged[directory / name] = reason
            continue
        for each in findings:
            if each.mismatch:
                raise UserError(each.mismatch)
        assert checkpoint is not None
        if member.rank == 0:
            for folder, reason in damaged.items():
                member.warn(f"checkpoint {folder} is damaged and skipped: {reason}")
        return Restored(checkpoint, entries, tuple(damaged))
    if damaged:  # no warnings before an error: the launcher need not receive all reports of failing ranks
        reasons = "; ".join(f"{folder.name}: {reason}" for folder, reason in list(damaged.items())[:_MAX_SHOWN_REASONS])
        raise UserError(
            f"checkpoints {directory}: none of {len(damaged)} is intact ({reasons}); give another directory to start from scratch"
        )
    return None


def _list_checkpoints(directory: Path) -> dict[str, Any]:
    """Return the names of all checkpoints, the newest first, or the error message, as a JSON document."""
    try:
        return {"names": [folder.name for _, folder in checkpoints_in(directory)]}
    except UserError as error:
        return {"error": str(error)}


def _examine(
    folder: Path, member: Member, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[Checkpoint | None, dict[str, Entry], _Finding]:
    """Verify this rank's share of a checkpoint's files, and read the parameters in ``shapes``."""
    try:
        checkpoint = open_checkpoint(folder)
        checkpoint.verify(checkpoint.parts[member.rank :: member.num_ranks])
        return checkpoint, checkpoint.read(shapes), _Finding(checkpoint.hash)
    except DamagedError as error:
        return None, {}, _Finding(damage=str(error)[:200])
    except UserError as error:
        return None, {}, _Finding(checkpoint.hash, mismatch=str(error))


def _damage(findings: list[_Finding]) -> str:
    """Return a description of the damage that the ranks found in a checkpoint; "" if there is none."""
    for rank, finding in enumerate(findings):
        if finding.damage:
            is_everywhere = all(each.damage == finding.damage for each in findings)
            return finding.damage if is_everywhere else f"{finding.damage} (on rank {rank})"
    return "" if len({each.hash for each in findings}) == 1 else "its manifest is not the same for all ranks"


def save(
    directory: Path,
    member: Member,
    num_updates: int,
    num_micro_batches: int,
    schedule: str,
    entries: Mapping[str, Entry],
    damaged: set[Path],
    loss_scale: Mapping[str, float] | None = None,
) -> str:
    """Write a checkpoint; all ranks call.

    Args:
        directory: Directory of the job's checkpoints.
        member: This rank.
        num_updates: Weight updates so far.
        num_micro_batches: Micro-batches so far.
        schedule: Name of the schedule.
        entries: Parameters that this rank writes.
        damaged: Checkpoints known to be damaged, which are not counted when old ones are removed. The new checkpoint is removed
            from the set.
        loss_scale: State of the scale of the loss; None if losses are not scaled.

    Returns:
        Reason why the checkpoint could not be written; "" if it is complete.
    """
    part, failure = None, ""
    try:
        part = write_part(directory, num_updates, member.rank, entries)
    except OSError as error:
        failure = write_error_message(error, directory)
    gathered = member.gather([failure, part and [part.name, part.num_bytes, part.sha256]])
    failures = [f"{text} (on rank {rank})" for rank, (text, _) in enumerate(gathered) if text]
    if member.rank == 0:
        failure = failures[0] if failures else ""
        if not failure:
            try:
                parts = [CheckpointFile(*fields) for _, fields in gathered if fields]
                write_complete(directory, num_updates, num_micro_batches, schedule, parts, damaged, loss_scale)
            except OSError as error:
                failure = write_error_message(error, directory)
        if failure:
            discard_unfinished(directory)
            member.warn(
                f"checkpoint of step {num_updates} cannot be written: {failure}; training goes on, and older ones are kept"
            )
    failure = member.gather(failure)[0]
    if not failure:
        damaged.discard(checkpoint_folder(directory, num_updates))
    return failure
