"""Converts records to a pandas DataFrame, if pandas is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autoddl.costmodel.errors import UserError

if TYPE_CHECKING:
    import pandas

__all__ = ["MissingPackageError", "frame_of"]


class MissingPackageError(UserError, ImportError):
    """An optional package is not installed."""


def frame_of(records: Sequence[dict[str, Any]], columns: Sequence[str], instead: str) -> pandas.DataFrame:
    """Return a DataFrame with one row per record.

    Args:
        columns: Names of the columns, in order.
        instead: Name of the attribute that holds the same values without pandas, for the error message.

    Raises:
        MissingPackageError: If pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingPackageError(
            f"to_frame needs pandas, which is not installed: pip install pandas; or use {instead}"
        ) from None
    return pandas.DataFrame.from_records(records, columns=list(columns))
