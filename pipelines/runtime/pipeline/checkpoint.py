"""Checkpoints: what training needs to go on, by the names of parameters, so that it can go on with another schedule.

    DIRECTORY/step-00000120/rank-0.npz, rank-2.npz, ...    each parameter with its optimizer's state, by the first rank that has it
    DIRECTORY/step-00000120/checkpoint.json                the manifest: size and SHA-256 of every part, and a hash of itself
    DIRECTORY/.step-00000130.part/...                      one that is being written
    DIRECTORY/.step-00000110.old/...                       one that is being removed

**Writing.** A checkpoint is written under another name, and renamed when all of it is on the disk: parts, manifest and folders are
synchronized (``fsync``), so that neither a kill at any moment nor a power cut leaves half a checkpoint under a final name.
Checksums are taken of the bytes on their way to the disk, not of what is read back.

**Reading.** A checkpoint is whole if its manifest has its hash, and every part is a file of the size and the SHA-256 that the
manifest has. Anything else is damage (`DamagedError`), and so is a folder without a manifest, since nothing half written has such a
name. Parts hold plain numbers: pickled objects, compressed members and shapes other than the model's are refused before memory is
taken for them.

**Keeping.** After a new one, the newest whole one before it is kept too, and what is older is removed. Damaged ones do not count.
Here sizes and manifests are compared, not checksums, which would read everything again; those that restoring found damaged are
remembered.

**Versions of the format.** Version 2 has sizes and checksums. Version 1 has not; it is read all the same, and what damage it has is
found by the checks of the zip format (a CRC-32 of each array).
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
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from autoddl.costmodel.documents import Fields, canonical_hash
from autoddl.costmodel.errors import UserError

__all__ = [
    "Checkpoint",
    "DamagedError",
    "Entry",
    "Part",
    "checkpoint_folder",
    "checkpoints_in",
    "discard_unfinished",
    "open_checkpoint",
    "prepare_directory",
    "unwritable",
    "write_complete",
    "write_part",
]

_FORMAT, _VERSION, _UNCHECKED_VERSION = "autoddl-checkpoint", 2, 1
_MANIFEST = "checkpoint.json"
_MANIFEST_LIMIT_BYTES = 64 * 2**20
_KEPT = 2
_CHUNK_BYTES = 2**20
_LONGEST_KEY = 100  # characters of the name of an optimizer's state

Entry = dict[str, np.ndarray]
"""Of a parameter: its value, under ``value``, and what the optimizer keeps for it (and for all: scalars), by names of its own."""


class DamagedError(Exception):
    """A checkpoint is not whole; the message says what is wrong with which of its files."""


@dataclass(frozen=True)
class Part:
    """A file of a checkpoint; ``num_bytes`` and ``sha256`` are None where version 1 of the format has no checksums."""

    name: str
    num_bytes: int | None
    sha256: str | None


def checkpoint_folder(directory: Path, num_updates: int) -> Path:
    """Where a complete checkpoint is."""
    return directory / f"step-{num_updates:08d}"


def _unfinished(directory: Path, num_updates: int) -> Path:
    return directory / f".step-{num_updates:08d}.part"


def checkpoints_in(directory: Path) -> list[tuple[int, Path]]:
    """What has the name of a checkpoint in a directory, whole or not, the newest first, with its number of updates.

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


def unwritable(error: OSError, path: Path) -> str:
    """``PATH: No space left on device``: of an error that occurred while ``path`` was written."""
    return f"{error.filename or path}: {_cause(error)}"


def _cause(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


# ---- Writing -------------------------------------------------------------------------------------------------------------


def prepare_directory(directory: Path) -> None:
    """Make the directory of a job's checkpoints where it is missing, and write there once to see that it can be written.

    Raises:
        UserError: it cannot.
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


def write_part(directory: Path, num_updates: int, rank: int, entries: Mapping[str, Entry]) -> Part | None:
    """Write one rank's part of a checkpoint that is not complete yet; None, and nothing, where it has no entries.

    Raises:
        OSError: it cannot be written; what was written of it is removed.
    """
    if not entries:
        return None
    folder = _unfinished(directory, num_updates)
    _make_folder(folder)
    path = folder / f"rank-{rank}.npz"
    with _written(path) as file:
        hashed = _HashedWriter(file)
        with zipfile.ZipFile(hashed, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]
            for name, entry in entries.items():
                for key, value in entry.items():
                    with archive.open(zipfile.ZipInfo(f"{name}/{key}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)
    _synchronize(folder)
    return Part(path.name, hashed.num_bytes, hashed.sha256())


def write_complete(
    directory: Path,
    num_updates: int,
    num_micro_batches: int,
    schedule: str,
    parts: Iterable[Part],
    damaged: Collection[Path] = (),
) -> None:
    """Complete a checkpoint all ``parts`` of which are written, and remove old ones; one rank calls.

    Args:
        damaged: older ones known not to be whole.

    Raises:
        OSError: a part is not there (the ranks do not share the directory, perhaps), or the disk is full.
    """
    unfinished, folder = _unfinished(directory, num_updates), checkpoint_folder(directory, num_updates)
    parts = sorted(parts, key=lambda part: part.name)
    _make_folder(unfinished)
    for part in parts:
        path = unfinished / part.name
        found = os.stat(path).st_size if path.exists() else 0
        if found != part.num_bytes:
            words = f"has {found} bytes here, its rank wrote {part.num_bytes}; all hosts should share the directory"
            raise OSError(errno.EIO, words, str(path))
    names = {part.name for part in parts}
    for path in unfinished.iterdir():
        if path.name not in names:  # of a killed job with other ranks
            _remove(path)
    document: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "num_updates": num_updates,
        "num_micro_batches": num_micro_batches,
        "schedule": schedule,
        "files": [{"name": part.name, "bytes": part.num_bytes, "sha256": part.sha256} for part in parts],
    }
    document["hash"] = canonical_hash(document)
    _write_file(unfinished / _MANIFEST, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    _synchronize(unfinished)
    _set_aside(folder)  # a damaged one, or one of a job that began anew here
    os.rename(unfinished, folder)
    _synchronize(directory)
    discard_unfinished(directory)
    _remove_old(directory, num_updates, damaged)


def discard_unfinished(directory: Path) -> None:
    """Remove what killed jobs, and checkpoints that could not be written, have left; one rank calls while none writes."""
    for path in directory.glob(".step-*"):
        if path.suffix in (".part", ".old"):
            _remove(path)


def _remove_old(directory: Path, num_updates: int, damaged: Collection[Path]) -> None:
    """Remove what is older than the newest whole ones, of which the one of ``num_updates`` is the first."""
    num_kept = 1
    for number, folder in checkpoints_in(directory):
        if number >= num_updates:
            continue
        if num_kept == _KEPT:
            aside = _set_aside(folder)
            if aside is not None:
                _remove(aside)
        elif folder not in damaged and _seems_whole(folder):
            num_kept += 1


def _set_aside(folder: Path) -> Path | None:
    """Give a checkpoint a name that is none of a checkpoint; None where there is none, or it cannot be renamed."""
    aside = folder.with_name(f".{folder.name}.old")
    _remove(aside)
    try:
        os.rename(folder, aside)
    except OSError:
        return None
    return aside


def _remove(path: Path) -> None:
    """A file or folder, as far as it can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()


def _make_folder(folder: Path) -> None:
    """A folder with those above it, which are on the disk when this returns."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        _synchronize(path.parent)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A new file that is on the disk when the block ends; removed where the block or that fails, with an error that names it."""
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
    with _written(path) as file:
        file.write(content)


def _synchronize(folder: Path) -> None:
    """Have the names in a folder on the disk, where its file system can do that and it may be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be written, not read
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)


class _HashedWriter:
    """A file for writing that hashes what passes. It cannot seek: the zip format then writes forwards only."""

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
    """A checkpoint whose manifest is whole."""

    folder: Path
    num_updates: int
    num_micro_batches: int
    parts: tuple[Part, ...]
    hash: str = field(default="", compare=False)
    """Of the manifest's content."""

    def verify(self, parts: Iterable[Part]) -> None:
        """Read some of the parts, and compare their checksums.

        Raises:
            DamagedError: one is not whole.
        """
        for part in parts:
            with _damage_of(self.folder / part.name), self.opened(part) as file:
                if part.sha256 is None:
                    continue
                found = hashlib.sha256()
                while chunk := file.read(_CHUNK_BYTES):
                    found.update(chunk)
                if found.hexdigest() != part.sha256:
                    raise DamagedError(
                        f"{part.name} has another SHA-256 ({found.hexdigest()[:12]}...) than when it was written "
                        f"({part.sha256[:12]}...)"
                    )

    def read(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Entry]:
        """The entries of some parameters of these shapes.

        Raises:
            DamagedError: a part cannot be read.
            UserError: there is no parameter of that name, or it has another shape: the checkpoint is of another model.
        """
        entries: dict[str, Entry] = {}
        for part in self.parts:
            with _damage_of(self.folder / part.name), self.opened(part) as file, zipfile.ZipFile(file) as archive:
                for info in archive.infolist():
                    name, _, what = info.filename[: -len(".npy")].rpartition("/")
                    if name in shapes and info.filename.endswith(".npy"):
                        if what in entries.setdefault(name, {}) or len(what) > _LONGEST_KEY:
                            raise DamagedError(
                                f"{part.name} has {what[:_LONGEST_KEY]!r} of {name} twice, or it is too long"
                            )
                        entries[name][what] = self._array(archive, info, shapes[name])
        missing = sorted(name for name in shapes if "value" not in entries.get(name, {}))
        if missing:
            raise UserError(f"checkpoint {self.folder} has no parameter {missing[0]}; it is of another model")
        return entries

    def opened(self, part: Part) -> BinaryIO:
        """A part, of which kind and size are those of its manifest."""
        path = self.folder / part.name
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise DamagedError(f"{part.name} is no file")
        if part.num_bytes is not None and found.st_size != part.num_bytes:
            raise DamagedError(f"{part.name} has {found.st_size} bytes, should have {part.num_bytes}")
        return open(path, "rb")

    def _array(self, archive: zipfile.ZipFile, info: zipfile.ZipInfo, shape: tuple[int, ...]) -> np.ndarray:
        """A member, its header compared with the member's size and the parameter's shape before memory is taken."""
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise DamagedError(f"{info.filename} is compressed")
        with archive.open(info) as member:
            version = np.lib.format.read_magic(member)
            if version != (1, 0):
                raise DamagedError(f"{info.filename} is of version {version} of the array format, should be (1, 0)")
            found, _, dtype = np.lib.format.read_array_header_1_0(member)
            if dtype.kind not in "fiub":
                raise DamagedError(f"{info.filename} has elements of type {dtype}, should have numbers")
            if prod(found) * dtype.itemsize != info.file_size - member.tell():
                raise DamagedError(f"{info.filename} has {info.file_size} bytes, which is not its shape's size")
            what = info.filename.rpartition("/")[2]
            is_scalar = prod(found) == 1 and what != "value.npy"
            if what.startswith("all.") and not is_scalar:
                raise DamagedError(f"{info.filename} should be a single number")
            if found != shape and not is_scalar:
                sizes = ["x".join(map(str, each)) for each in (found, shape)]
                raise UserError(
                    f"checkpoint {self.folder} has {info.filename[:-4]} of {sizes[0]}, should be {sizes[1]}; it is of another "
                    "model"
                )
            member.seek(0)
            return np.lib.format.read_array(member, allow_pickle=False)  # to its end, where its CRC-32 is compared


def open_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint by its folder.

    Raises:
        DamagedError: its manifest is missing, cannot be read, or is not what was written.
    """
    path = folder / _MANIFEST
    try:
        with _damage_of(path):
            if not folder.is_dir():
                raise DamagedError("it is no folder")
            found = os.stat(path)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedError(f"{_MANIFEST} is no file")
            if found.st_size > _MANIFEST_LIMIT_BYTES:
                raise DamagedError(f"{_MANIFEST} has {found.st_size} bytes, at most {_MANIFEST_LIMIT_BYTES} are read")
            return _checkpoint(folder, Fields(json.loads(path.read_bytes()), _MANIFEST))
    except UserError as error:
        raise DamagedError(str(error)) from None


def _checkpoint(folder: Path, fields: Fields) -> Checkpoint:
    if fields.text("format") != _FORMAT:
        raise DamagedError(f"{_MANIFEST} is no manifest of a checkpoint")
    version = fields.integer("version")
    if version not in (_UNCHECKED_VERSION, _VERSION):
        raise DamagedError(f"{_MANIFEST} is of version {version}, this release reads 1 and 2")
    if version == _UNCHECKED_VERSION:
        parts = tuple(Part(name, None, None) for name in fields.texts("files"))
        found = canonical_hash(fields.value)
    else:
        parts = tuple(
            Part(file.text("name"), file.integer("bytes"), file.text("sha256")) for file in fields.objects("files")
        )
        found = canonical_hash({name: value for name, value in fields.value.items() if name != "hash"})
        if fields.text("hash") != found:
            raise DamagedError(f"{_MANIFEST} has another hash than its content")
    for part in parts:
        if not re.fullmatch(r"rank-[0-9]{1,9}\.npz", part.name):
            raise DamagedError(f"{_MANIFEST} lists {part.name[:60]!r}, which is no part's name")
    if len({part.name for part in parts}) != len(parts):
        raise DamagedError(f"{_MANIFEST} lists a part twice")
    checkpoint = Checkpoint(
        folder, fields.integer("num_updates"), fields.integer("num_micro_batches"), parts, hash=found
    )
    if folder.name != checkpoint_folder(Path(), checkpoint.num_updates).name:
        raise DamagedError(f"{_MANIFEST} is of step {checkpoint.num_updates}")
    return checkpoint


def _seems_whole(folder: Path) -> bool:
    """Whether the manifest is whole and the parts have their sizes; their contents are not read."""
    try:
        checkpoint = open_checkpoint(folder)
        for part in checkpoint.parts:
            with _damage_of(folder / part.name), checkpoint.opened(part):
                pass
    except DamagedError:
        return False
    return True


@contextlib.contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Within it, whatever reading a file of a checkpoint raises becomes a `DamagedError` that names the file."""
    try:
        yield
    except (DamagedError, UserError, MemoryError):
        raise
    except FileNotFoundError:
        raise DamagedError(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path.name} cannot be read: {_cause(error)}") from None
    except Exception as error:  # which ones zip files, arrays and JSON raise where they are malformed is not documented
        raise DamagedError(f"{path.name} is malformed: {str(error)[:100]}") from None
