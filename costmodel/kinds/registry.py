"""The kinds of layers, by name.

The built-in kinds are registered when :mod:`autoddl.costmodel.graph` is imported. A user's kind is registered when the file that
defines it is imported. This can be the file of the user's model, or a file that the environment variable ``AUTODDL_KINDS`` names
(several are separated as in ``PATH``). The files of ``AUTODDL_KINDS`` are imported as soon as an unknown kind is looked up.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UserError, quote

if TYPE_CHECKING:
    from typing import Any

    from .kind import LayerKind

__all__ = ["FILES", "kind_of", "kinds", "register", "source_of"]

#: The environment variable that names the files of users' kinds.
FILES = "AUTODDL_KINDS"
_KINDS: dict[str, LayerKind] = {}


def register(kind: LayerKind) -> None:
    """Register a kind of layer under its name.

    Raises:
        UserError: another kind of this name is registered.
    """
    known = _KINDS.get(kind.name)
    if known is not None and source_of(type(known)) != source_of(type(kind)):
        raise UserError(f"a kind of layer called {quote(kind.name)} is registered, another one needs another name")
    _KINDS[kind.name] = kind


def source_of(defined: Any) -> tuple[str, str]:
    """Return the file and the qualified name of a class or function.

    They identify it even if its file was imported twice, under two names of modules.
    """
    module = sys.modules.get(defined.__module__)
    return getattr(module, "__file__", None) or defined.__module__, defined.__qualname__


def kinds() -> tuple[str, ...]:
    """Return the names of all kinds, in the order in which they were registered."""
    return tuple(_KINDS)


def kind_of(name: str) -> LayerKind:
    """Return the kind that is registered under a name.

    Raises:
        UserError: no such kind is registered, or a file of ``AUTODDL_KINDS`` cannot be imported.
    """
    if name not in _KINDS:
        _import_files()
    if name not in _KINDS:
        raise UserError(f"kind {name!r} is not one of {', '.join(_KINDS)}; {FILES} can name files that register others")
    return _KINDS[name]


def _import_files() -> None:
    """Import the user's files. Each is imported under its own name, so that a model in the same folder imports the same module."""
    for file in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        path = Path(file).resolve()
        if path.suffix != ".py" or not path.is_file():
            raise UserError(f"{FILES} names {file}, which is no Python file")
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        environment = dict(os.environ)
        try:
            importlib.import_module(path.stem)
        except Exception as error:  # whatever a user's file raises
            raise UserError(f"{FILES}: {file} raises {type(error).__name__}: {error}") from error
        finally:  # OneFlow's import sets RANK, among others
            os.environ.clear()
            os.environ.update(environment)
