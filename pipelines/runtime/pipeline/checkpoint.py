"""The files of checkpoints: parameters and optimizer states by the names of the parameters.

Because the names are those of the whole model, a training can be resumed with another schedule or plan. Files:

    DIRECTORY/step-00000120/rank-0.npz, rank-2.npz, ...    parts: parameters with their optimizer states
    DIRECTORY/step-00000120/checkpoint.json                manifest: size and SHA-256 of every part, hash of itself
    DIRECTORY/.step-00000130.part/...                      a checkpoint that is being written
    DIRECTORY/.step-00000110.old/...                       a checkpoint that is being removed

If several ranks have a parameter, the first of them writes it.

**Writing.** A checkpoint is written under a temporary name, and renamed when all of it is on the disk. Parts, manifest and folders
are synchronized (``fsync``), so that neither a kill at any moment nor a power cut leaves half a checkpoint under a final name.
Checksums are computed from the bytes that are written; the files are not read back.

**Reading.** A checkpoint is intact if its manifest has the right hash, and every part is a file of the manifest's size and SHA-256.
Anything else is damage (`DamagedError`), including a folder without a manifest, since no unfinished checkpoint has a final name.
Parts contain plain numbers. Pickled objects, compressed members and shapes other than the model's are rejected before memory is
allocated for them.

**Retention.** When a checkpoint is complete, the newest intact checkpoint before it is kept too, and older ones are removed.
Damaged checkpoints do not count. For this purpose a checkpoint is intact if its manifest is intact and its parts have the right
sizes; checksums would require reading everything. Checkpoints that `restore` found to be damaged count as damaged.

**Versions of the format.** Version 2 has sizes and checksums. Version 1 has neither. It can still be read; damage to it is detected
by the CRC-32 that the zip format has for each array.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autoddl.costmodel.documents import Fields, canonical_hash
from autoddl.costmodel.errors import UserError

from ..loss_scaling import LossScaler

__all__ = [
    "Checkpoint",
    "CheckpointFile",
    "DamagedError",
    "Entry",
    "checkpoint_folder",
    "checkpoints_in",
    "discard_unfinished",
    "open_checkpoint",
    "prepare_directory",
    "write_complete",
    "write_error_message",
    "write_part",
]

_FORMAT = "autoddl-checkpoint"
#: Version of the format that is written.
_VERSION = 2
#: Older version of the format, without sizes and checksums.
_UNCHECKED_VERSION = 1
_MANIFEST = "checkpoint.json"
#: Bytes of the largest manifest that is read.
_MAX_MANIFEST_BYTES = 64 * 2**20
#: Number of intact checkpoints that are kept.
_NUM_KEPT = 2
#: Bytes that are read at a time to compute a checksum.
_CHUNK_BYTES = 2**20
#: Characters of the longest name of an array in the optimizer state of a parameter.
_MAX_KEY_LENGTH = 100

#: The state of a parameter: its value under the key ``value``, and its optimizer state under the optimizer's keys. State that the
#: optimizer has once for all parameters is stored with each of them, as scalars with keys ``all.*``.
Entry = dict[str, np.ndarray]


class DamagedError(Exception):
    """Raised for a checkpoint that is not intact. The message names the file and the fault."""


@dataclass(frozen=True)
class CheckpointFile:
    """A part of a checkpoint: the file of one rank.

    Attributes:
        name: Name of the file.
        num_bytes: Size of the file; None in version 1 of the format.
        sha256: Checksum of the file in hexadecimal; None in version 1 of the format.
    """

    name: str
    num_bytes: int | None
    sha256: str | None


def checkpoint_folder(directory: Path, num_updates: int) -> Path:
    """Return the folder of a complete checkpoint.

    >>> checkpoint_folder(Path("saved"), 120).name
    'step-00000120'
    """
    return directory / f"step-{num_updates:08d}"


def _unfinished_folder(directory: Path, num_updates: int) -> Path:
    return directory / f".step-{num_updates:08d}.part"


def checkpoints_in(directory: Path) -> list[tuple[int, Path]]:
    """Return (number of updates, folder) of all checkpoints in a directory, intact or not, the newest first.

    Raises:
        UserError: the directory cannot be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        raise UserError(f"checkpoints {directory} cannot be read ({_cause(error)})") from None
    matches = [re.fullmatch(r"step-([0-9]{8,15})", name) for name in names]
    return sorted(((int(match[1]), directory / match[0]) for match in matches if match), reverse=True)


def write_error_message(error: OSError, path: Path) -> str:
    """Return the message of an error that occurred while ``path`` was written, such as ``PATH: No space left on device``."""
    return f"{error.filename or path}: {_cause(error)}"


def _cause(error: Exception) -> str:
    """Return the message of an error, without the number and the path of an `OSError`."""
    return getattr(error, "strerror", None) or str(error)


# ---- Writing -------------------------------------------------------------------------------------------------------------


def prepare_directory(directory: Path) -> None:
    """Create the directory of a job's checkpoints if it is missing, and test that it can be written.

    Raises:
        UserError: it cannot be created or written.
    """
    probe = directory / f".probe-{os.getpid()}"
    try:
        _make_folder(directory)
        _write_file(probe, b"autoddl")
    except (OSError, ValueError) as error:
        raise UserError(f"checkpoints {directory} cannot be written ({_cause(error)})") from None
    finally:
        with contextlib.suppress(OSError, ValueError):
            probe.unlink()


def write_part(directory: Path, num_updates: int, rank: int, entries: Mapping[str, Entry]) -> CheckpointFile | None:
    """Write one rank's part of an unfinished checkpoint.

    Args:
        directory: Directory of the job's checkpoints.
        num_updates: Number of weight updates so far.
        rank: Rank that writes.
        entries: State of the parameters that this rank writes, by name.

    Returns:
        Name, size and checksum of the part; None if ``entries`` is empty, in which case nothing is written.

    Raises:
        OSError: the part cannot be written. An incomplete file is removed.
    """
    if not entries:
        return None
    folder = _unfinished_folder(directory, num_updates)
    _make_folder(folder)
    path = folder / f"rank-{rank}.npz"
    with _synchronized_file(path) as file:
        hashed = _HashedWriter(file)
        with zipfile.ZipFile(hashed, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
            for name, entry in entries.items():
                for key, value in entry.items():
                    with archive.open(zipfile.ZipInfo(f"{name}/{key}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)
    _synchronize(folder)
    return CheckpointFile(path.name, hashed.num_bytes, hashed.sha256())


def write_complete(
    directory: Path,
    num_updates: int,
    num_micro_batches: int,
    schedule: str,
    parts: Iterable[CheckpointFile],
    damaged: Collection[Path] = (),
    loss_scale: Mapping[str, float] | None = None,
) -> None:
    """Complete a checkpoint, all parts of which have been written, and remove old checkpoints. One rank calls this function.

    Args:
        directory: Directory of the job's checkpoints.
        num_updates: Number of weight updates so far.
        num_micro_batches: Number of micro-batches so far.
        schedule: Name of the schedule.
        parts: All parts of the checkpoint.
        damaged: Older checkpoints that are known to be damaged.
        loss_scale: State of the scale of the loss; None if losses are not scaled.

    Raises:
        OSError: a part is missing (because the ranks do not share the directory, say), or the disk is full.
    """
    unfinished, folder = _unfinished_folder(directory, num_updates), checkpoint_folder(directory, num_updates)
    parts = sorted(parts, key=lambda part: part.name)
    # Check that this rank sees all parts, and remove other files.
    _make_folder(unfinished)
    for part in parts:
        path = unfinished / part.name
        num_bytes = os.stat(path).st_size if path.exists() else 0
        if num_bytes != part.num_bytes:
            fault = f"has {num_bytes} bytes here, its rank wrote {part.num_bytes}; all hosts should share the directory"
            raise OSError(errno.EIO, fault, str(path))
    names = {part.name for part in parts}
    for path in unfinished.iterdir():
        if path.name not in names:  # left behind by a killed job with other ranks
            _remove(path)
    # Write the manifest, then give the folder its final name.
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "num_updates": num_updates,
        "num_micro_batches": num_micro_batches,
        "schedule": schedule,
        "files": [{"name": part.name, "bytes": part.num_bytes, "sha256": part.sha256} for part in parts],
    }
    if loss_scale is not None:
        document["loss_scale"] = dict(loss_scale)
    document["hash"] = canonical_hash(document)
    _write_file(unfinished / _MANIFEST, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    _synchronize(unfinished)
    _set_aside(folder)  # a damaged checkpoint, or one of an earlier training in this directory
    os.rename(unfinished, folder)
    _synchronize(directory)
    discard_unfinished(directory)
    _remove_old(directory, num_updates, damaged)


def discard_unfinished(directory: Path) -> None:
    """Remove unfinished and half-removed checkpoints of killed jobs. One rank calls this function while no rank writes."""
    for path in directory.glob(".step-*"):
        if path.suffix in (".part", ".old"):
            _remove(path)


def _remove_old(directory: Path, num_updates: int, damaged: Collection[Path]) -> None:
    """Remove old checkpoints. The checkpoint of ``num_updates`` and the newest intact one before it are kept."""
    num_kept = 1
    for number, folder in checkpoints_in(directory):
        if number >= num_updates:
            continue
        if num_kept == _NUM_KEPT:
            aside = _set_aside(folder)
            if aside is not None:
                _remove(aside)
        elif folder not in damaged and _seems_intact(folder):
            num_kept += 1


def _set_aside(folder: Path) -> Path | None:
    """Rename a checkpoint's folder, so that it is no longer a checkpoint.

    Returns:
        The new path; None if the folder does not exist or cannot be renamed.
    """
    aside = folder.with_name(f".{folder.name}.old")
    _remove(aside)
    try:
        os.rename(folder, aside)
    except OSError:
        return None
    return aside


def _remove(path: Path) -> None:
    """Remove a file or folder, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _make_folder(folder: Path) -> None:
    """Create a folder and its missing parents, and synchronize their names to the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _synchronize(path.parent)


@contextlib.contextmanager
def _synchronized_file(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, and synchronize it to the disk when the block ends.

    After an error, the file is removed; the message of an `OSError` names it.
    """
    try:
        with open(path, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        with contextlib.suppress(OSError):
            path.unlink()
        raise


def _write_file(path: Path, content: bytes) -> None:
    """Write a file, and synchronize it to the disk."""
    with _synchronized_file(path) as file:
        file.write(content)


def _synchronize(folder: Path) -> None:
    """Synchronize the names in a folder to the disk, if the file system supports this and the folder may be read."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # the folder can be written, but not read
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


class _HashedWriter:
    """A writable file that hashes its content. It has no method ``seek``, so that `zipfile` writes sequentially."""

    def __init__(self, file: BinaryIO) -> None:
        self.num_bytes = 0
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self.num_bytes += len(memoryview(data).cast("B"))
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def sha256(self) -> str:
        return self._hash.hexdigest()


# ---- Reading -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with an intact manifest.

    Attributes:
        folder: Folder of the checkpoint.
        num_updates: Number of weight updates when it was written.
        num_micro_batches: Number of micro-batches when it was written.
        parts: Parts of the checkpoint.
        loss_scale: State of the scale of the loss; None if losses were not scaled.
        hash: Hash of the manifest's content.
    """

    folder: Path
    num_updates: int
    num_micro_batches: int
    parts: tuple[CheckpointFile, ...]
    loss_scale: Mapping[str, float] | None = None
    hash: str = field(default="", compare=False)

    def verify(self, parts: Iterable[CheckpointFile]) -> None:
        """Check the sizes and checksums of some of the parts.

        Raises:
            DamagedError: a part is not intact.
        """
        for part in parts:
            with _as_damage(self.folder / part.name), self.open_part(part) as file:
                if part.sha256 is None:
                    continue
                checksum = hashlib.sha256()
                while chunk := file.read(_CHUNK_BYTES):
                    checksum.update(chunk)
                if checksum.hexdigest() != part.sha256:
                    raise DamagedError(
                        f"{part.name} has another SHA-256 ({checksum.hexdigest()[:12]}...) than when it was written "
                        f"({part.sha256[:12]}...)"
                    )

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Entry]:
        """Return the state of some parameters, by name.

        Args:
            shapes: Shapes of the parameters in the model, by name.

        Raises:
            DamagedError: a part cannot be read.
            UserError: a parameter is missing or has another shape, so the checkpoint belongs to another model.
        """
        entries: dict[str, Entry] = {}
        for part in self.parts:
            with _as_damage(self.folder / part.name), self.open_part(part) as file, zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    name, _, key = info.filename[: -len(".npy")].rpartition("/")
                    if name in shapes and info.filename.endswith(".npy"):
                        if len(key) > _MAX_KEY_LENGTH:
                            raise DamagedError(
                                f"{part.name} has an array of {name} whose key has {len(key)} characters, should have "
                                f"at most {_MAX_KEY_LENGTH}"
                            )
                        if key in entries.setdefault(name, {}):
                            raise DamagedError(f"{part.name} has {key!r} of {name} twice")
                        entries[name][key] = self._array(archive, info, shapes[name])
        missing = sorted(name for name in shapes if "value" not in entries.get(name, {}))
        if missing:
            raise UserError(f"checkpoint {self.folder} has no parameter {missing[0]}; it is of another model")
        return entries

    def open_part(self, part: CheckpointFile) -> BinaryIO:
        """Open a part, after checking that it is a file of the manifest's size."""
        path = self.folder / part.name
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise DamagedError(f"{part.name} is not a file")
        if part.num_bytes is not None and status.st_size != part.num_bytes:
            raise DamagedError(f"{part.name} has {status.st_size} bytes, should have {part.num_bytes}")
        return open(path, "rb")

    def _array(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, shape: tuple[int, ...]) -> np.ndarray:
        """Read an array from an archive, after comparing its header with its size and with the parameter's shape.

        Args:
            archive: A part of the checkpoint.
            info: Member of the archive.
            shape: Shape of the parameter in the model. Arrays of the optimizer state may be scalars instead.
        """
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise DamagedError(f"{info.filename} is compressed")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):
                raise DamagedError(f"{info.filename} is of version {version} of the array format, should be (1, 0)")
            stored_shape, _, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.kind not in "fiub":
                raise DamagedError(f"{info.filename} has elements of type {dtype}, should have numbers")
            if prod(stored_shape) * dtype.itemsize != info.file_size - member.tell():
                raise DamagedError(f"{info.filename} has {info.file_size} bytes, which is not its shape's size")
            file_name = info.filename.rpartition("/")[2]
            is_scalar = prod(stored_shape) == 1 and file_name != "value.npy"
            if file_name.startswith("all.") and not is_scalar:
                raise DamagedError(f"{info.filename} should be a single number")
            if stored_shape != shape and not is_scalar:
                found, wanted = ("x".join(map(str, lengths)) for lengths in (stored_shape, shape))
                raise UserError(
                    f"checkpoint {self.folder} has {info.filename[:-4]} of {found}, should be {wanted}; it is of "
                    "another model"
                )
            member.seek(0)
            # At the end of the member, `zipfile` checks its CRC-32.
            return np.lib.format.read_array(member, allow_pickle=False)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open the checkpoint in a folder.

    Raises:
        DamagedError: the manifest is missing, malformed, or has been changed.
    """
    path = folder / _MANIFEST
    try:
        with _as_damage(path):
            if not folder.is_dir():
                raise DamagedError("it is not a folder")
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedError(f"{_MANIFEST} is not a file")
            if status.st_size > _MAX_MANIFEST_BYTES:
                raise DamagedError(f"{_MANIFEST} has {status.st_size} bytes, at most {_MAX_MANIFEST_BYTES} are read")
            return _checkpoint_of_manifest(folder, Fields(json.loads(path.read_bytes()), _MANIFEST))
    except UserError as error:
        raise DamagedError(str(error)) from None


def _checkpoint_of_manifest(folder: Path, fields: Fields) -> Checkpoint:
    """Return the checkpoint in ``folder``, given the fields of its manifest.

    Raises:
        DamagedError: the manifest is malformed, or has been changed.
        UserError: a field of the manifest is missing or has a wrong type.
    """
    if fields.text("format") != _FORMAT:
        raise DamagedError(f"{_MANIFEST} is not a manifest of a checkpoint")
    version = fields.integer("version")
    if version not in (_UNCHECKED_VERSION, _VERSION):
        raise DamagedError(f"{_MANIFEST} is of version {version}, this release reads 1 and 2")
    if version == _UNCHECKED_VERSION:
        parts = tuple(CheckpointFile(name, None, None) for name in fields.texts("files"))
        content_hash = canonical_hash(fields.value)
    else:
        parts = tuple(
            CheckpointFile(file.text("name"), file.integer("bytes"), file.text("sha256"))
            for file in fields.objects("files")
        )
        content_hash = canonical_hash({name: value for name, value in fields.value.items() if name != "hash"})
        if fields.text("hash") != content_hash:
            raise DamagedError(f"{_MANIFEST} has another hash than its content")
    for part in parts:
        if not re.fullmatch(r"rank-[0-9]{1,9}\.npz", part.name):
            raise DamagedError(f"{_MANIFEST} lists {part.name[:60]!r}, which is not the name of a part")
    if len({part.name for part in parts}) != len(parts):
        raise DamagedError(f"{_MANIFEST} lists a part twice")
    counts = fields.integer("num_updates"), fields.integer("num_micro_batches")
    loss_scale = None
    if "loss_scale" in fields:
        state = fields.object("loss_scale")
        loss_scale = {name: state.number(name, maximum=2.0**1000) for name in asdict(LossScaler())}
    checkpoint = Checkpoint(folder, *counts, parts, loss_scale, hash=content_hash)
    if folder.name != checkpoint_folder(Path(), checkpoint.num_updates).name:
        raise DamagedError(f"{_MANIFEST} is of step {checkpoint.num_updates}")
    return checkpoint


def _seems_intact(folder: Path) -> bool:
    """Whether the manifest is intact and the parts have their sizes. The contents of the parts are not read."""
    try:
        checkpoint = open_checkpoint(folder)
        for part in checkpoint.parts:
            with _as_damage(folder / part.name), checkpoint.open_part(part):
                pass
    except DamagedError:
        return False
    return True


@contextlib.contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Turn any error that occurs while a file of a checkpoint is read into a `DamagedError` that names the file."""
    try:
        yield
    except (DamagedError, UserError, MemoryError):
        raise
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {_cause(error)}") from None
    except Exception as error:  # the errors of malformed zip files, arrays and JSON are not documented
        raise DamagedError(f"{path.name} is malformed: {str(error)[:100]}") from None
