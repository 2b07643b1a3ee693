"""Whether the machine can do something, and the reason where it cannot."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Availability"]


@dataclass(frozen=True)
class Availability:
    """True where ``reason`` is empty; otherwise ``reason`` says in one line what is missing and what would be right."""

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason
