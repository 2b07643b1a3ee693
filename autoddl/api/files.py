"""Paths of files, and results that can be returned as text and also written to a file."""

from __future__ import annotations

import os
from typing import Union

from autoddl.costmodel.writing import write_atomically

__all__ = ["FilePath", "write_if_path"]

#: The path of a file or folder.
FilePath = Union[str, "os.PathLike[str]"]


def write_if_path(text: str, path: FilePath | None) -> str:
    """Return ``text``, and write it to ``path``, atomically, if a path is given."""
    if path is not None:
        write_atomically(path, text)
    return text
