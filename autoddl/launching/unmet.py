"""`UnmetDemand`: a requirement that a host does not meet."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["UnmetDemand"]


@dataclass(frozen=True)
class UnmetDemand:
    """A requirement that a host does not meet.

    Attributes:
        text: one line for the user.
        can_be_forced: whether the job may succeed nevertheless.
        is_warning: whether the job will run nevertheless, only slower: it is started with a message.
    """

    text: str
    can_be_forced: bool = False
    is_warning: bool = False
