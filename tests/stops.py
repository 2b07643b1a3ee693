"""Stops for the tests of interrupted searches."""

from __future__ import annotations

from autoddl.costmodel.stopping import Stop

__all__ = ["StopAfter"]


class StopAfter(Stop):
    """Requested when it has been asked so many times: an interrupt at the same moment in every run."""

    def __init__(self, asks: int) -> None:
        super().__init__()
        self.left = asks

    @property
    def is_requested(self) -> bool:
        self.left -= 1
        if self.left < 0:
            self.request()
        return self._requested

    @property
    def has_fired(self) -> bool:
        """Whether it was requested; not an ask."""
        return self._requested
