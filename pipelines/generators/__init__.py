"""Generators of schedules: one module per family, one door, :func:`generate`, which validates what leaves it."""

from .draft import Family, GeneratorError
from .registry import families, generate

__all__ = ["Family", "GeneratorError", "families", "generate"]
