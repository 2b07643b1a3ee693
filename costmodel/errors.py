"""The one base of everything that a user can get wrong."""

from __future__ import annotations

__all__ = ["UserError"]


class UserError(ValueError):
    """A fault in what the user gave: one line that names the thing, its value and what would be right.

    The command line prints the message and exits with ``exit_code``; library users catch it as a ``ValueError``.
    """

    exit_code = 2
