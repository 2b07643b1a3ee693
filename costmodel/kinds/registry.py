"""The kinds of layers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import UserError, quote

if TYPE_CHECKING:
    from .kind import LayerKind

__all__ = ["kind_of", "kinds", "register"]

_KINDS: dict[str, LayerKind] = {}


def register(kind: LayerKind) -> None:
    """Make a kind of layer known by its name.

    Raises:
        UserError: another kind has this name.
    """
    known = _KINDS.get(kind.name)
    if known is not None and _name_of(type(known)) != _name_of(type(kind)):
        raise UserError(f"a kind of layer called {quote(kind.name)} is registered, another one needs another name")
    _KINDS[kind.name] = kind


def _name_of(kind: type) -> tuple[str, str]:
    """Of a class; a file that was loaded twice has two of one name."""
    return kind.__module__, kind.__qualname__


def kinds() -> tuple[str, ...]:
    """The names of all kinds, in the order in which they were registered."""
    return tuple(_KINDS)


def kind_of(name: str) -> LayerKind:
    """The kind of a name.

    Raises:
        UserError: it is not registered.
    """
    kind = _KINDS.get(name)
    if kind is None:
        raise UserError(f"kind {name!r} is not one of {', '.join(_KINDS)}")
    return kind
