from __future__ import annotations
from .schedule import Schedule


def validate(schedule: Schedule) -> None:
    pass
