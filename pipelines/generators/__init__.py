"""Generators of schedules, one module per family; :func:`generate` validates every schedule that it returns."""

from .draft import GeneratorError, ScheduleFamily
from .registry import families, generate

__all__ = ["GeneratorError", "ScheduleFamily", "families", "generate"]
