"""`Availability`: whether the machine supports a feature, and the reason if it does not."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Availability"]


@dataclass(frozen=True)
class Availability:
    """Whether a feature is available. True if ``reason`` is empty.

    Attributes:
        reason: One line that says what is missing and how to get it; "" if the feature is available.
    """

    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason
